"""A thread that waits for allreduces in flight and completes torch futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from thinwire import errors
from thinwire.comm import Work
from thinwire.torch import private
from thinwire.torch.exchange.device import Device


def failed_future(error: errors.Error) -> torch.futures.Future:
    """A completed future whose wait(), value() and use by DDP raise `error`."""
    future = torch.futures.Future()
    private.fail_future(future, error)
    return future


class Waiter:
    """Completes futures in the order of their submission. Thread-safe."""

    def __init__(self, device: Device, on_error: Callable[[errors.Error], errors.Error]) -> None:
        """on_error: called on the waiter's thread before a future fails; returns the error that it
        fails with, which is the first one of all."""
        self._device = device
        self._on_error = on_error
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="thinwire-waiter", daemon=True)
        self._thread.start()

    def add(
        self,
        work: Work,
        tensor: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """A future of `tensor`, which is kept alive until `work` is done; `finish` runs then."""
        future: torch.futures.Future[torch.Tensor] = self._device.future()
        with self._changed:
            self._pending += 1
        self._queue.put((work, tensor, finish, future))
        return future

    def busy(self) -> bool:
        """True while something is in flight."""
        with self._changed:
            return self._pending > 0

    def wait_idle(self) -> None:
        """Returns when everything added so far is done or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """Ends the thread after what was added."""
        self._queue.put(None)
        # The thread may hold the last reference to its owner, and so close itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, tensor, finish, future = item
            with self._device.finishing(tensor):
                error = self._wait(work, finish)
                # Idle before complete: who has seen the future may look at the residuals.
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()
                if error is None:
                    future.set_result(tensor)
                else:
                    private.fail_future(future, self._on_error(error))
            del work, tensor, finish, future, item

    def _wait(self, work: Work, finish: Callable[[], None] | None) -> errors.Error | None:
        try:
            work.wait_stream(self._device.later_stream())
            if finish is not None:
                finish()
        except errors.Error as error:
            return error
        except Exception as error:  # a failure of ours must not leave the future unfinished
            return errors.Error(f"completing an allreduce failed: {error!r}")
        return None
