"""The device of a session's tensors, and how work is ordered there.

On the host a result is there as soon as a wait returns. On a GPU three streams are ordered by
events: the stream that makes a tensor, the library's own, and the stream that uses the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Device:
    """The host, where a result is there as soon as a wait returns."""

    name = "cpu"

    def stream(self) -> int | None:
        """The stream that the library's work comes after: a cudaStream_t, or None."""
        return None

    def later_stream(self) -> int | None:
        """The stream that the library's results come before: a cudaStream_t, or None."""
        return None

    @contextlib.contextmanager
    def finishing(self, _tensor: torch.Tensor) -> Iterator[None]:
        """Work on a result runs inside this context, and its future completes there."""
        yield

    def future(self) -> torch.futures.Future:
        """A new future of a tensor on this device."""
        return torch.futures.Future()


class CudaDevice(Device):
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
            # The allocator must not reuse the tensor's memory before this stream is done with it.
            tensor.record_stream(self._later)
            yield

    def future(self) -> torch.futures.Future:
        return torch.futures.Future(devices=[self._device])


def device_of(tensor: torch.Tensor) -> Device:
    """A new object for the tensor's device, the host or a GPU (tensors.check refuses others)."""
    return CudaDevice(tensor.device) if tensor.device.type == "cuda" else Device()
