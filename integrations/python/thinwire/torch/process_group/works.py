"""Works of a compressed process group as torch's, with typed errors: our allreduces, and Gloo's
collectives."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.torch import functional


class CompressedWork(dist.Work):
    """Allreduces of a Communicator in flight."""

    def __init__(self, works: Sequence[functional.Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        futures = torch.futures.collect_all([work.get_future() for work in works])
        self._future = futures.then(lambda done: _results(done, tensors))

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises the typed error of a failure. The group's own timeout counts."""
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Its error is torch's RuntimeError with the typed one's text."""
        return self._future


def _results(
    done: torch.futures.Future[list[torch.futures.Future]], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    for future in done.value():
        future.value()  # raises its error
    return tensors


class GlooWork(dist.Work):
    """A collective of Gloo's in flight."""

    def __init__(self, work: dist.Work, typed: Callable[[Exception], errors.Error]) -> None:
        """typed: what an error of Gloo's is raised as."""
        super().__init__()
        self._work, self._typed = work, typed

    def wait(self, *timeout: Any) -> bool:
        try:
            return self._work.wait(*timeout)
        except errors.Error:
            raise
        except RuntimeError as error:
            raise self._typed(error) from None

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._work.get_future()


def typed_error(rank: int, collective: str, error: Exception) -> errors.Error:
    """Gloo's error of a collective, which has a text only."""
    text = f"rank {rank}, {collective}: {error}"
    if "imed out" in str(error):
        return errors.TimeoutError(f"{text}; look what the other ranks do instead")
    if "onnection" in str(error) or "onnect timeout" in str(error):
        return errors.PeerLostError(f"{text}; look why the peer's process ended")
    return errors.Error(text)
