"""The Works that a process group's collectives return, and the errors that they raise."""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.torch import collectives, private

_MOST_DONE = 256  # kept works that are done and had neither wait() nor get_future() called


class Kept:
    """Keeps works alive that C++ may still use. C++ holds only the C++ half of a Python Work, and
    may call its wait() and then get_future() after the caller has dropped the Python half, as
    DDP.join does. So a group keeps every work until it was waited for or its future is done, and
    then until that holds for the next one."""

    def __init__(self) -> None:
        self._works: dict[_Work, None] = {}
        self._last: _Work | None = None

    def add(self, work: _Work) -> None:
        if len(self._works) > _MOST_DONE:
            for each in [each for each in list(self._works) if each.is_completed()]:
                self._works.pop(each, None)
        self._works[work] = None

    def release(self, work: _Work) -> None:
        if self._works.pop(work, self) is None:
            self._last = work


class _Work(dist.Work):
    """A collective in flight."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        kept.add(self)

    def _release(self) -> None:
        self._kept.release(self)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait; return the tensors with the results."""
        self.wait()
        return self.get_future().value()

    def is_success(self) -> bool:
        """Return whether the collective is done and has not failed."""
        future = self.get_future()
        if not future.done():
            return False
        try:
            future.value()
        except RuntimeError:
            return False
        return True


class CompressedWork(_Work):
    """Compressed exchanges in flight, one for each tensor."""

    def __init__(
        self,
        works: Sequence[collectives.Work],
        tensors: list[torch.Tensor],
        kept: Kept,
    ) -> None:
        futures = torch.futures.collect_all([work.get_future() for work in works])
        self._works = works
        self._future = futures.then(lambda done: _results(done, tensors))
        super().__init__(kept)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the results are ready and the future is done; raise the typed error of a
        failure. `timeout` is ignored; the group's timeout applies."""
        try:
            for work in self._works:
                work.wait()
            self._future.wait()
        except errors.Error as error:
            raise as_torchs(error) from None
        finally:
            self._release()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the results. It raises a RuntimeError with the typed error's text."""
        self._future.add_done_callback(lambda _: self._release())
        return self._future


def _results(
    done: torch.futures.Future[list[torch.futures.Future]], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    for future in done.value():
        future.value()  # raises its error
    return tensors


class GlooWork(_Work):
    """A Gloo collective in flight, which raises typed errors."""

    def __init__(
        self,
        work: dist.Work,
        typed: Callable[[Exception], errors.Error],
        kept: Kept,
    ) -> None:
        """typed: converts Gloo's error into a typed one."""
        self._work, self._typed = work, typed
        super().__init__(kept)

    def wait(self, *timeout: Any) -> bool:
        try:
            return self._work.wait(*timeout)
        except RuntimeError as error:
            raise as_torchs(self._typed(error)) from None
        finally:
            self._release()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._work.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        try:
            future = self._work.get_future()
        except RuntimeError:  # Gloo's sends and receives have no future
            future = torch.futures.Future()
            threading.Thread(target=self._complete, args=(future,), daemon=True).start()
        future.add_done_callback(lambda _: self._release())
        return future

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        with private.in_torch():
            try:
                self.wait()
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result([])


class GatherWork(_Work):
    """A compressed gather of parameters in flight. wait() completes it."""

    def __init__(self, finish: Callable[[], None], kept: Kept) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        super().__init__(kept)

    def wait(self, *_: Any) -> bool:
        """Block until the parameters are ready; raise the typed error of a failure."""
        finish, self._finish = self._finish, None
        self._release()
        if finish is not None:
            try:
                finish()
            except errors.Error as error:
                self._error = as_torchs(error)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait; return a completed future."""
        self.wait()
        return DoneWork(self._kept).get_future()


class DoneWork(_Work):
    """A Work that is complete from the start."""

    def wait(self, *_: Any) -> bool:
        self._release()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future = torch.futures.Future()
        future.set_result([])
        return future


# Errors.


def typed_error(rank: int, collective: str, error: Exception) -> errors.Error:
    """Return the typed error for an error of a Gloo collective, which has only a text."""
    text = f"rank {rank}, {collective}: {error}"
    if "imed out" in str(error):
        return errors.TimeoutError(f"{text}; look what the other ranks do instead")
    if "onnection" in str(error) or "onnect timeout" in str(error):
        return errors.PeerLostError(f"{text}; look why the peer's process ended")
    return errors.Error(text)


def as_torchs(error: errors.Error) -> errors.Error:
    """Return the error as an instance of torch's DistBackendError or DistNetworkError, too."""
    return _class_of_both(type(error))(*error.args)


@functools.cache
def _class_of_both(kind: type[errors.Error]) -> type[errors.Error]:
    network = issubclass(kind, errors.PeerLostError)
    theirs = dist.DistNetworkError if network else dist.DistBackendError
    again = {"__module__": kind.__module__, "__reduce__": lambda error: (kind, error.args)}
    return type(kind.__name__, (kind, theirs), again)
