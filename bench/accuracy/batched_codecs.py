"""fp32, int8, int4 and adaptive over many shards at once, with torch operations on the device of
the tensors, so that the workers and seeds of many runs can share one GPU.

The values and residuals are bit-identical to those of the library, which
tests/bench/test_batched_codecs.py checks on a CPU; no bytes are made. compress/FORMAT.md has the
rules. Shapes of results depend only on those of inputs, and the host waits for nothing, so a CUDA
graph can record it, after one call outside of the graph that creates a device's tables.

Equal bits require some special code: torch divides a CUDA tensor by a number by multiplying with
its rounded inverse, so divisors are tensors here; a multiplication and the following addition are
two operations, which torch.compile would fuse; sums of floats are written out in their order,
unless they are whole numbers below 2^24, whose sums are exact in any order."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

_BLOCK = 256
_TINY = 2.0**-100
_LEVELS = Path(__file__).parents[2] / "compress/codecs/adaptive_levels.h"


@torch.no_grad()
def through(spec: str, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return each shard as a receiver decodes it: thinwire.encode(), then thinwire.decode().

    Args:
        spec: fp32, int8, int4, or adaptive with bits and floor. ValueError for any other.
        x: float32. Each row of the last dimension is a shard of any length.
        residual: like x, or None. It is added to x, and holds the encoding's error afterwards; a
            block that is not finite leaves it unchanged.

    Returns:
        A tensor of x's shape, which may not be contiguous; with fp32 and no residual x itself.
    """
    decoded = _codec(spec)
    if residual is None:
        return decoded(x)
    x = x + residual
    out = decoded(x)
    lost = x - out
    residual.copy_(torch.where(lost.isnan(), residual, lost))
    return out


@functools.cache
def _codec(spec: str) -> Callable[[torch.Tensor], torch.Tensor]:
    name, _, text = spec.partition(":")
    given = dict(item.split("=", 1) for item in text.split(",")) if text else {}
    if name == "adaptive" and given.keys() <= {"bits", "floor"}:
        sixteenths = 16 * float(given.get("bits", 2))
        floor = int(given.get("floor", 0))
        if sixteenths in range(8, 97) and floor in range(3) and 16 * floor <= sixteenths:
            return functools.partial(_adaptive, sixteenths=int(sixteenths), floor=floor)
    elif not given and name in ("fp32", "int8", "int4"):
        qmax = {"int8": 127.0, "int4": 7.0}.get(name)
        return functools.partial(_quantised, qmax=qmax) if qmax else lambda x: x
    raise ValueError(f"spec: expected fp32, int8, int4 or adaptive with bits and floor, got {spec}")


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Return [..., n] as [..., blocks, 256], padded with zeros."""
    n = x.shape[-1]
    blocks = -(-n // _BLOCK)
    padded = functional.pad(x, (0, blocks * _BLOCK - n)) if n % _BLOCK else x
    return padded.unflatten(-1, (blocks, _BLOCK))


def _quantised(x: torch.Tensor, qmax: float) -> torch.Tensor:
    """int8 and int4, by FORMAT.md, "Quantisers"."""
    n, x = x.shape[-1], _blocks(x)
    largest = x.abs().amax(-1, keepdim=True)  # NaN if there is one
    # A tiny block gets the scale 1, with which all its codes are 0.
    divided = torch.where(largest < _TINY, qmax, largest) / torch.full_like(largest, qmax)
    scale = ((divided.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    codes = (x * scale.reciprocal()).round_().clamp_(-qmax, qmax)
    out = codes.add_(0.0).mul_(scale)  # turns -0 into 0
    return torch.where(largest < 2.0**127, out, math.nan).flatten(-2)[..., :n]


# adaptive.

_FIRST = 0x0D80 - 8 * 128  # the lowest useful threshold: even the least head gets all bits
_FAN = 32  # thresholds that a round of the search distinguishes; three rounds suffice


class _Tables(NamedTuple):
    """Constants of adaptive on a device."""

    signs: torch.Tensor  # 256 of +1 and -1
    walsh: torch.Tensor  # 256 x 256, symmetric
    signed: torch.Tensor  # the transform of elements by their signs
    level: torch.Tensor  # [width, transformed number + 2^15] flat: the nearest level, with its sign
    fan: torch.Tensor  # 1 to _FAN - 1


@functools.cache
def _tables(device: torch.device) -> _Tables:
    # Philox4x32-10 under seed 0: FORMAT.md, "hadamard".
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    words += (0xF8E4CCA4, 0x5CB200DB, 0xB1A574EB, 0x097EFF67)
    signs = torch.tensor([1.0 - 2 * (words[i // 32] >> i % 32 & 1) for i in range(_BLOCK)])
    walsh = torch.ones(1, 1)
    for _ in range(8):
        walsh = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), walsh)
    rows = re.findall(r"^ +(\d[\d, ]*)", _LEVELS.read_text(), re.MULTILINE)
    levels = torch.tensor([int(text) for text in re.findall(r"\d+", " ".join(rows))])
    whole = torch.arange(-(2**15), 2**15)
    level = torch.zeros(9, whole.numel())
    for width in range(1, 9):
        own = levels[2 ** (width - 1) - 1 : 2**width - 1]
        borders = (own[:-1] + own[1:]) * 1008 // (32 if width <= 5 else 256)
        nearest = own[torch.searchsorted(borders, whole.abs())]
        level[width] = torch.where(whole < 0, -nearest, nearest)
    fan = torch.arange(1, _FAN, dtype=torch.int16)
    tables = signs, walsh, signs[:, None] * walsh, level.flatten(), fan
    return _Tables(*(table.to(device) for table in tables))


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum [..., 256] to [..., 1] in 32 lanes, which are then folded: FORMAT.md, "onebit"."""
    first, *rest = (x * x).unflatten(-1, (8, 32)).unbind(-2)
    lanes = functools.reduce(torch.Tensor.add_, rest, first.clone())
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    total = _sum_of_squares(x)
    factor = torch.where(total < 2.0**96, 1.0, 2.0**-80)
    factor = torch.where(total < 2.0**-60, 2.0**64, factor)
    return (_sum_of_squares(x * factor) * (1 / _BLOCK)).sqrt_().mul_(factor.reciprocal())


def _widths(
    heads: torch.Tensor, coded: torch.Tensor, sixteenths: int, floor: int, fan: torch.Tensor
) -> torch.Tensor:
    """Return the bits per code of each block, int16. heads: [..., blocks], whole numbers minus
    _FIRST."""
    budget = (heads.shape[-1] * sixteenths + 15) // 16
    counted = coded.to(torch.int16)
    least, most = counted * floor, counted * 8

    def under(threshold: torch.Tensor) -> torch.Tensor:
        wide = (heads[..., None, :] - threshold[..., None]) >> 7
        return wide.clamp_(least[..., None, :], most[..., None, :])

    low = heads.new_zeros((*heads.shape[:-1], 1))
    for step in (_FAN * _FAN, _FAN, 1):
        planes = under(low + (step * fan - 1)).sum(-1, dtype=torch.int32)
        low = low + step * (planes > budget).sum(-1, keepdim=True, dtype=torch.int16)
    widths, raised = under(low).squeeze(-2), under(low - 1).squeeze(-2)
    left = budget - widths.sum(-1, keepdim=True)
    more = raised - widths
    return widths + more * (more.cumsum(-1) <= left)


def _adaptive(x: torch.Tensor, sixteenths: int, floor: int) -> torch.Tensor:
    n, x = x.shape[-1], _blocks(x)
    tables = _tables(x.device)
    root = _root_mean_square(x)
    coded = (root >= _TINY) & (root < 2.0**116)
    half = torch.where(coded, root, 1.0).bfloat16()
    heads = torch.where(coded, half.view(torch.int16) - _FIRST, 0).squeeze(-1)
    widths = _widths(heads, coded.squeeze(-1), sixteenths, floor, tables.fan)[..., None]
    head = half.float()
    # The transform's numbers and the levels are whole and below 2^11, so TF32 is exact, too.
    whole = torch.where(coded, x, 0.0).mul_(torch.full_like(head, 126.0) / head).round_()
    rows = widths * float(2**16) + float(2**15)
    levels = tables.level.take((whole @ tables.signed).add_(rows).long())
    step = head * torch.where(widths > 5, 2.0**-12, 2.0**-9)
    out = (levels @ tables.walsh).mul_(tables.signs).mul_(step)
    # A block without codes is 0, never -0.
    out = torch.where(widths > 0, out, torch.where(root < 2.0**116, 0.0, math.nan))
    return out.flatten(-2)[..., :n]
