"""The errors and warnings of thinwire. Every message names the rank, the tensor, the expected and
the actual value, and the fix."""

from __future__ import annotations

import inspect
import sys
import warnings


class Error(RuntimeError):
    """Base class of all errors of thinwire. Aborted groups and internal errors have this type."""


class InvalidArgumentError(Error, ValueError):
    """Bad input, found before anything was sent."""


class MismatchError(Error):
    """The ranks disagree: codec, world, tensor, size, order or version."""


class TimeoutError(Error, TimeoutError):
    """A deadline passed."""


class PeerLostError(Error, ConnectionError):
    """A rank died or closed its connections."""


class DataLossError(Error):
    """Data is damaged or lost: bytes of a peer (found by `checksum=True`), a store's journal, or
    state of which no rank has a good copy."""


class OutOfMemoryError(Error, MemoryError):
    """A device, pinned or host memory is full. The message has the GPU memory that torch's
    allocator keeps, if torch is used."""


class UnavailableError(Error):
    """This build or machine lacks a part."""


def again(error: Error) -> Error:
    """Return a copy of the error to raise. A raised exception keeps its stack frames and all their
    objects alive, such as a model and its process group, so a stored error must not be raised."""
    return type(error)(*error.args)


# The type of the error for each tw_status of integrations/c/thinwire.h. TW_ABORTED (6) and
# TW_INTERNAL (7) have no type of their own.
_BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgumentError,
    2: MismatchError,
    3: TimeoutError,
    4: PeerLostError,
    5: UnavailableError,
    8: DataLossError,
    9: OutOfMemoryError,
}


_ABORTED = 6


def to_status(error: Error) -> int:
    """Return the `tw_status` of an error that a caller passes as the reason to abort."""
    return next((code for code, kind in _BY_STATUS.items() if isinstance(error, kind)), _ABORTED)


def from_status(status: int, message: str) -> Error:
    """Return the error for a `tw_status` other than TW_OK."""
    kind = _BY_STATUS.get(status, Error)
    return kind(message + _kept_by_torch() if kind is OutOfMemoryError else message)


def _kept_by_torch() -> str:
    """Return, for a message, the memory of each GPU that only torch's caching allocator can use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    kept = []
    for device in range(torch.cuda.device_count()):
        held = torch.cuda.memory_reserved(device)
        if held > 0:
            unused = held - torch.cuda.memory_allocated(device)
            kept.append(f"{held >> 20} MiB of cuda:{device}, {unused >> 20} MiB of that unused")
    if not kept:
        return "; torch's caching allocator holds nothing"
    return f"; torch's caching allocator holds {', '.join(kept)}"


_PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost caller outside this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
