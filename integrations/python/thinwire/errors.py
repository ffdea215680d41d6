"""The errors of thinwire. Every message names the rank, the tensor, what was expected, what came,
and the mend."""

from __future__ import annotations


class Error(RuntimeError):
    """Any failure that thinwire reports; an aborted group and our own faults have this type."""


class InvalidArgumentError(Error, ValueError):
    """Bad input, seen before anything was sent."""


class MismatchError(Error):
    """The ranks disagree: codec, world, tensor, size, order or version."""


class TimeoutError(Error, TimeoutError):
    """A deadline passed."""


class PeerLostError(Error, ConnectionError):
    """A rank died or closed its connections."""


class DataLossError(Error):
    """What a peer sent came damaged, as `checksum=True` finds out."""


class UnavailableError(Error):
    """This build or machine lacks a part."""


def again(error: Error) -> Error:
    """The same error for another raise. What is raised keeps the frames that it goes through, and
    all that they hold, such as a model and its process group; what is kept must not."""
    return type(error)(*error.args)


# tw_status of integrations/c/thinwire.h -> the error's type. TW_ABORTED (6) and TW_INTERNAL (7)
# have no type of their own.
_BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgumentError,
    2: MismatchError,
    3: TimeoutError,
    4: PeerLostError,
    5: UnavailableError,
    8: DataLossError,
}


_ABORTED = 6


def to_status(error: Error) -> int:
    """The `tw_status` that stands for an error that a caller gives as its reason to abort."""
    return next((code for code, kind in _BY_STATUS.items() if isinstance(error, kind)), _ABORTED)


def from_status(status: int, message: str) -> Error:
    """The error that stands for a `tw_status` other than TW_OK."""
    return _BY_STATUS.get(status, Error)(message)
