"""Worker: a thread that runs calls one after the other, in the order of their submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A daemon, in contrast to the threads of concurrent.futures, so that a process whose main
    thread fails ends at once, even while a call waits for a peer. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """A future of what the call returns or raises."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:  # whoever asks for the result gets it
                future.set_exception(error)
            del item, future, call  # they may hold tensors
