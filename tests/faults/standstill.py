"""Detects that this machine gave our processes no processor: times measured then prove nothing."""

from __future__ import annotations

import threading
import time

TICK_S = 0.02


class Standstill:
    """Within the context a thread wakes every 20 ms. longest_s: its greatest delay."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last - TICK_S)
            last = now
