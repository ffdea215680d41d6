"""How a rank strikes itself: at once, or a moment later from another thread. It writes the time to
a file first, since it may not be able to report it afterwards."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cases import Case


class Striker:
    """Strikes the victim; does nothing on other ranks. abort: fails the group, if there is one."""

    abort: Callable[[], None]

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._armed = rank == case.victim

    def now(self, phase: str) -> None:
        """Strike if this rank is the victim and the phase is the case's."""
        if self._armed and phase == self._case.phase:
            self._strike()

    def soon(self, phase: str, within_s: float) -> None:
        """Like now(), but from another thread, at the case's moment of the next `within_s`
        seconds."""
        if not self._armed or phase != self._case.phase:
            return
        end = time.monotonic() + self._case.moment * within_s

        def wait() -> None:
            time.sleep(max(0.0, end - time.monotonic()))
            self._strike()

        threading.Thread(target=wait, daemon=True).start()

    def _strike(self) -> None:
        self._armed = False
        fd = os.open(struck_file(self._folder), os.O_WRONLY | os.O_CREAT)
        os.write(fd, struct.pack("d", time.monotonic()))
        os.close(fd)
        if self._case.blow == "abort":
            self.abort()
        else:
            os.kill(os.getpid(), signal.Signals[self._case.blow])


def struck_file(folder: Path) -> Path:
    return folder / "struck"


def struck_at(folder: Path) -> float | None:
    """Return when the victim was struck, by time.monotonic; None if it was not struck yet."""
    try:
        return struct.unpack("d", struck_file(folder).read_bytes())[0]
    except (FileNotFoundError, struct.error):
        return None
