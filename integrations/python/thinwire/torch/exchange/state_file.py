"""State files: a rank's state dict as a safetensors file, written atomically.

A file has the tensors "PARAMETER/first", "PARAMETER/second" and "PARAMETER/momentum", all float32.
Its header has, as text: thinwire_state (the version of this format), world, rank, steps, replicas
(FSDP2 only), parts and part (FSDP2 with tensor or expert parallelism only: the number of parts of
the model, and which one this is), codec and sparse as JSON, meshes (FSDP2 over several sets of
ranks only: these entries for each set, as JSON), and digest, of all these and of all tensors.
Nothing is pickled, so a file cannot run code."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from thinwire import _library
from thinwire.arguments import check_kind, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange import checkpoint

VERSION = "2"
_NUMBERS = ("world", "rank", "steps")
_OPTIONAL = ("replicas", "parts", "part")  # optional numbers
_JSON = ("codec", "sparse")
_OPTIONAL_JSON = ("meshes",)

PathLike = str | os.PathLike


def save(state_dict: Mapping[str, Any], path: PathLike) -> None:
    """Replace the file atomically: at any time, also after a crash during the save, it is complete,
    the old file or the new one. A crash may leave a file `.NAME.*.part` in the same folder."""
    _check_path(path)
    _replace(Path(os.path.realpath(path)), to_bytes(state_dict))


def to_bytes(state_dict: Mapping[str, Any]) -> bytes:
    """Return the contents of a state file."""
    tensors = {
        f"{name}/{kind}": tensor.clone(memory_format=torch.contiguous_format)
        for name, memory in state_dict["residuals"].items()
        for kind, tensor in memory.items()
    }
    header = {"thinwire_state": VERSION}
    header |= {key: str(state_dict[key]) for key in _NUMBERS}
    header |= {key: str(state_dict[key]) for key in _OPTIONAL if key in state_dict}
    texts = (*_JSON, *(key for key in _OPTIONAL_JSON if key in state_dict))
    header |= {key: json.dumps(state_dict[key]) for key in texts}
    header["digest"] = _digest(header, tensors)
    return safetensors.torch.save(tensors, header)


def from_bytes(content: bytes, what: str) -> dict[str, Any]:
    """Return the state dict of a state file with these contents; `what` names it in errors."""
    try:
        tensors = safetensors.torch.load(content)
        (size,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (safetensors.SafetensorError, ValueError, struct.error) as error:
        raise _bad(what, f"expected a whole state file, got one with '{error}'", _FIX) from None
    return _read(what, header, tensors)


def load(path: PathLike) -> dict[str, Any]:
    """Return the state dict. InvalidArgumentError if the file does not exist, is not a state file,
    or is damaged."""
    _check_path(path)
    file = os.fspath(path)
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise _bad(file, f"can't be read: {error}", "give the path that save() was given") from None
    except safetensors.SafetensorError as error:
        raise _bad(
            file, f"expected a whole safetensors file, got one with '{error}'", _FIX
        ) from None
    return _read(file, header, tensors)


def _read(file: str, header: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    _check_version(file, header)
    expected = header.pop("digest", None)
    digest = _digest(header, tensors)
    if expected != digest:
        raise _bad(file, f"expected contents of digest {expected}, got {digest}", _FIX)
    residuals = _nested(file, tensors)
    return {"format": checkpoint.FORMAT, **_numbers(file, header), "residuals": residuals}


def load_all(paths: PathLike | Sequence[PathLike]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return this rank's file, or all ranks' files, in the form that load_state_dict() takes."""
    if isinstance(paths, (str, os.PathLike)):
        return load(paths)
    if not isinstance(paths, Sequence) or not paths:
        raise wrong("path", paths, "a path, or the list of all ranks' paths")
    return [load(path) for path in paths]


def _check_path(path: object) -> None:
    check_kind("path", path, PathLike, "a path as text or os.PathLike")


_FIX = "it was cut short or damaged, or is no state file: take another copy, or an older one"


def _bad(file: str, what: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"state file '{file}': {what}; {fix}")


def _check_version(file: str, header: Mapping[str, str]) -> None:
    got = header.get("thinwire_state")
    if got is None:
        raise _bad(
            file, "expected a state file of thinwire, got a safetensors file of something else",
            "give the path that save() was given",
        )  # fmt: skip
    if got != VERSION:
        raise _bad(
            file, f"expected version {VERSION}, got {got}", "load it with the thinwire it is of"
        )


def _numbers(file: str, header: Mapping[str, str]) -> dict[str, Any]:
    try:
        numbers = (*_NUMBERS, *(key for key in _OPTIONAL if key in header))
        texts = (*_JSON, *(key for key in _OPTIONAL_JSON if key in header))
        return {key: int(header[key]) for key in numbers} | {
            key: json.loads(header[key]) for key in texts
        }
    except (KeyError, ValueError) as error:
        raise _bad(file, f"expected a whole header, got one with {error!r}", _FIX) from None


def _nested(file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    residuals: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, slash, kind = key.rpartition("/")
        if not slash:
            raise _bad(file, f"expected tensors 'PARAMETER/KIND', got '{key}'", _FIX)
        residuals.setdefault(name, {})[kind] = tensor
    return residuals


def _digest(header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and values. safetensors notices a truncated file, but not a changed
    bit."""
    library, parts = _library.load(), [json.dumps(header, sort_keys=True).encode()]
    for key in sorted(tensors):
        tensor, name = tensors[key].contiguous(), key.encode()
        size = tensor.numel() * tensor.element_size()
        parts.append(struct.pack("<Q", library.tw_digest(name, len(name))))
        parts.append(struct.pack("<Q", library.tw_digest(tensor.data_ptr(), size)))
    whole = b"".join(parts)
    return f"{library.tw_digest(ctypes.c_char_p(whole), len(whole)):016x}"


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the bytes must be on the disk before the name
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        fix = "make room, or give a folder that may be written"
        raise _bad(str(path), f"can't be written: {error}", fix) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power failure, too
    finally:
        os.close(folder)
