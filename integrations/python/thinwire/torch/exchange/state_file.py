"""State files: a rank's state dict as a safetensors file, written so that a crash loses nothing.

A file has the tensors "PARAMETER/first", "PARAMETER/second" and "PARAMETER/momentum", all float32,
and in its header, as text: thinwire_state (the version of this form), world, rank, steps, and as
JSON codec and sparse; and digest, of all tensors. Nothing is pickled, so a file can't run code."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire import _library
from thinwire.errors import InvalidArgumentError, UnavailableError
from thinwire.torch.exchange import checkpoint

VERSION = "1"
_NUMBERS = ("world", "rank", "steps")
_JSON = ("codec", "sparse")

PathLike = str | os.PathLike


def save(state_dict: Mapping[str, Any], path: PathLike) -> None:
    """Replaces the file at once: who opens it at any time, also after a crash in mid-save, finds
    the old one or the new one, whole. A crash may leave a file `.NAME.*.part` beside it."""
    tensors = {
        f"{name}/{kind}": tensor.clone(memory_format=torch.contiguous_format)
        for name, memory in state_dict["residuals"].items()
        for kind, tensor in memory.items()
    }
    header = {"thinwire_state": VERSION, "digest": _digest(tensors)}
    header |= {key: str(state_dict[key]) for key in _NUMBERS}
    header |= {key: json.dumps(state_dict[key]) for key in _JSON}
    _replace(Path(os.path.realpath(path)), _safetensors().torch.save(tensors, header))


def load(path: PathLike) -> dict[str, Any]:
    """The state dict. InvalidArgumentError for a file that is not there, is no state file, or is
    damaged."""
    safetensors, file = _safetensors(), os.fspath(path)
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            _check_version(file, header)
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise _bad(file, f"can't be read: {error}", "give the path that save() was given") from None
    except safetensors.SafetensorError as error:
        raise _bad(
            file, f"expected a whole safetensors file, got one with '{error}'", _MEND
        ) from None
    digest = _digest(tensors)
    if header.get("digest") != digest:
        raise _bad(file, f"expected tensors of digest {header.get('digest')}, got {digest}", _MEND)
    return {"format": checkpoint.FORMAT, **_numbers(file, header), "residuals": _nested(tensors)}


def load_all(paths: PathLike | Sequence[PathLike]) -> dict[str, Any] | list[dict[str, Any]]:
    """What load_state_dict takes: of this rank's file, or of all ranks'."""
    if isinstance(paths, (str, os.PathLike)):
        return load(paths)
    return [load(path) for path in paths]


_MEND = "it was cut short or damaged, or is no state file: take another copy, or an older one"


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise UnavailableError(
            "state files need the package safetensors, which is not there: pip install safetensors"
        ) from None
    return safetensors


def _bad(file: str, what: str, mend: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"state file '{file}': {what}; {mend}")


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
        return {key: int(header[key]) for key in _NUMBERS} | {
            key: json.loads(header[key]) for key in _JSON
        }
    except (KeyError, ValueError) as error:
        raise _bad(file, f"expected a whole header, got one with {error!r}", _MEND) from None


def _nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    residuals: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        residuals.setdefault(name, {})[kind] = tensor
    return residuals


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names and values: safetensors itself notices a file that was cut, and no changed bit."""
    library, parts = _library.load(), []
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
            os.fsync(file.fileno())  # the bytes come before the name
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        mend = "make room, or give a folder that may be written"
        raise _bad(str(path), f"can't be written: {error}", mend) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, outlives a loss of power
    finally:
        os.close(folder)
