"""Plain values and tensors as bytes, and back. Equal values give equal bytes, so that members can
compare digests. The bytes contain no code."""

from __future__ import annotations

import ctypes
import json
import reprlib
import struct
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.arguments import is_number
from thinwire.errors import InvalidArgumentError

_LENGTH = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """Return the value as bytes. value: dicts, lists, tuples (unpack() returns lists), numbers,
    text, None, tensors."""
    tensors: list[bytes] = []
    text = json.dumps(_to_json(value, tensors), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *tensors])


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of memory_of()."""
    return bytes(memory_of(tensor))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, valid as long as the tensor."""
    length = tensor.numel() * tensor.element_size()
    # Not Tensor.numpy(), which requires numpy.
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")


def unpack(data: bytes) -> Any:
    """Return the value that was packed; tensors are on the host. InvalidArgumentError for bytes
    that pack() did not make."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        return _from_json(json.loads(data[_LENGTH.size : start]), memoryview(data)[start:])
    except (KeyError, TypeError, ValueError, struct.error, RuntimeError) as error:
        raise InvalidArgumentError(
            f"these {len(data)} bytes are no packed state: {error}"
        ) from None


def check_like(path: str, got: Any, like: Any) -> None:
    """InvalidArgumentError unless `got` has the keys, types, lengths, shapes and dtypes of `like`;
    None in `like` stands for anything. The error names the difference."""
    if isinstance(like, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            raise _unlike(f"{path} is {reprlib.repr(got)}, expected a tensor")
        if (got.shape, got.dtype) != (like.shape, like.dtype):
            raise _unlike(
                f"{path} has shape {list(got.shape)} and {got.dtype}, expected "
                f"{list(like.shape)} and {like.dtype}"
            )
    elif isinstance(like, Mapping):
        if not isinstance(got, Mapping):
            raise _unlike(f"{path} is {reprlib.repr(got)}, expected a dict")
        missing = [key for key in like if key not in got]
        unknown = [key for key in got if key not in like]
        if missing or unknown:
            raise _unlike(
                f"{path} lacks the keys {reprlib.repr(missing)}, and has the keys "
                f"{reprlib.repr(unknown)} that this one has not"
            )
        for key, each in like.items():
            check_like(f"{path}[{key!r}]", got[key], each)
    elif isinstance(like, list):
        if not isinstance(got, (list, tuple)) or len(got) != len(like):
            found = f"{len(got)} entries" if isinstance(got, (list, tuple)) else reprlib.repr(got)
            raise _unlike(f"{path} has {found}, expected {len(like)}")
        for at, each in enumerate(like):
            check_like(f"{path}[{at}]", got[at], each)
    elif like is not None and not is_number(got):
        raise _unlike(f"{path} is {reprlib.repr(got)}, expected a number")


def _unlike(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{message}; load what the same model, fragments and options have saved"
    )


def _to_json(value: Any, tensors: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        at = sum(map(len, tensors))
        raw = raw_bytes(flat)
        tensors.append(raw)
        return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape), at, len(raw)]}
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: (type(pair[0]).__name__, pair[0]))
        return {"d": [[key, _to_json(each, tensors)] for key, each in pairs]}
    if isinstance(value, (list, tuple)):
        return [_to_json(each, tensors) for each in value]
    return value


def _from_json(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_from_json(each, data) for each in value]
    if not isinstance(value, dict):
        return value
    if "d" in value:
        return {key: _from_json(each, data) for key, each in value["d"]}
    name, shape, at, length = value["t"]
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[at : at + length]), dtype=dtype).reshape(shape)
