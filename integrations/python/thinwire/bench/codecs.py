"""How fast this machine encodes and decodes, on one thread, beside memcpy."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire import _library, encoded_bytes

_NUMEL = 1 << 22  # 16 MiB of fp32: more than a core's caches hold
_ROUNDS = 5


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _calls(spec: str, x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Encoding as in training, with a residual, and decoding; into memory that is there."""
    library, numel, name = _library.load(), x.numel(), spec.encode()
    size = encoded_bytes(spec, numel)
    wire, residual = ctypes.create_string_buffer(max(size, 1)), torch.zeros(numel)

    def encode() -> None:
        _library.check(
            library.tw_encode(name, x.data_ptr(), numel, residual.data_ptr(), wire, size, None)
        )

    def decode() -> None:
        _library.check(library.tw_decode(name, wire, size, y.data_ptr(), numel))

    return {"encode": encode, "decode": decode}


def measure(specs: Sequence[str], numel: int = _NUMEL) -> list[dict[str, Any]]:
    """A row for each codec: GB/s of fp32, the typical one, and the same as a share of memcpy's,
    which is measured in the same rounds."""
    x, y = torch.randn(numel), torch.empty(numel)
    size = 4 * numel
    calls = {("memcpy", "copy"): lambda: ctypes.memmove(y.data_ptr(), x.data_ptr(), size)}
    for spec in specs:
        calls |= {(spec, what): call for what, call in _calls(spec, x, y).items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(_ROUNDS + 1):
        for key, call in calls.items():
            times[key].append(_seconds(call))
    # The first round touches memory for the first time.
    typical = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}
    copy_s = typical["memcpy", "copy"]
    rows = []
    for spec in specs:
        row: dict[str, Any] = {"codec": spec, "bits": 8 * encoded_bytes(spec, numel) / numel}
        for what in ("encode", "decode"):
            seconds = typical[spec, what]
            row |= {f"{what}_gb_s": 1e-9 * size / seconds, f"{what}_of_memcpy": copy_s / seconds}
        rows.append(row)
    return rows
