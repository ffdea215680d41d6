"""Plain values and tensors as bytes, and back: equal values give equal bytes, so that a digest of
them compares members. Nothing in the bytes is code."""

from __future__ import annotations

import ctypes
import json
import struct
from typing import Any

import torch

from thinwire.errors import InvalidArgumentError

_LENGTH = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """value: dicts, lists, tuples (which come back as lists), numbers, text, None, tensors."""
    tensors: list[bytes] = []
    text = json.dumps(_to_json(value, tensors), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *tensors])


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of memory_of()."""
    return bytes(memory_of(tensor))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, valid as long as the tensor."""
    length = tensor.numel() * tensor.element_size()
    # Not numpy(), which torch has only where numpy is installed.
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")


def unpack(data: bytes) -> Any:
    """Return what pack() was given; tensors are on the host. InvalidArgumentError for bytes that it
    did not make."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        return _from_json(json.loads(data[_LENGTH.size : start]), memoryview(data)[start:])
    except (KeyError, TypeError, ValueError, struct.error, RuntimeError) as error:
        raise InvalidArgumentError(
            f"these {len(data)} bytes are no packed state: {error}"
        ) from None


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
