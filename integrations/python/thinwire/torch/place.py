"""Where tensors lie, and what that means for the order of work: nothing on the host; on a GPU the
streams that make a tensor, reduce it, and use the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Place:
    """The host, where a result is there as soon as a wait returns."""

    name = "cpu"

    def stream(self) -> int | None:
        """What the library orders its work after: a cudaStream_t, or None."""
        return None

    def later_stream(self) -> int | None:
        """What the library orders its results before."""
        return None

    @contextlib.contextmanager
    def finishing(self, _tensor: torch.Tensor) -> Iterator[None]:
        """What is done to a result, and completes its future, is done in here."""
        yield

    def future(self) -> torch.futures.Future:
        return torch.futures.Future()


class CudaPlace(Place):
    """A GPU. Futures carry events: whoever waits for one makes its stream wait, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._later = torch.cuda.Stream(device)
        self.name = f"cuda:{device.index}"

    def stream(self) -> int | None:
        return torch.cuda.current_stream(self._device).cuda_stream

    def later_stream(self) -> int | None:
        return self._later.cuda_stream

    @contextlib.contextmanager
    def finishing(self, tensor: torch.Tensor) -> Iterator[None]:
        with torch.cuda.stream(self._later):
            # Its memory may not go to another tensor before this stream is done with it.
            tensor.record_stream(self._later)
            yield

    def future(self) -> torch.futures.Future:
        return torch.futures.Future(devices=[self._device])


def place_of(tensor: torch.Tensor) -> Place:
    """A new place for the tensor's device, the host or a GPU (tensors.check)."""
    return CudaPlace(tensor.device) if tensor.device.type == "cuda" else Place()
