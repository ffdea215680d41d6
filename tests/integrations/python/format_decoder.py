"""A decoder in numpy of every codec, written only from compress/FORMAT.md.

The levels of adaptive are read from that page's table. Sums and products are in fp32 where the page
requires it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

FORMAT = Path(__file__).resolve().parents[3] / "compress" / "FORMAT.md"
Floats = np.ndarray
_BITS = {"int8": 8, "int4": 4, "onebit": 1}
_SUB_BLOCK = 65536


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Return the codec's name and its parameters, as text."""
    name, _, rest = spec.partition(":")
    return name, dict(pair.split("=") for pair in rest.split(",") if pair)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _bf16(words: np.ndarray) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _philox(counter: int, key: int) -> list[int]:
    """Return Philox4x32-10 (Salmon et al.) of the counters (counter, 0, 0, 0)."""
    words, low, high = [counter, 0, 0, 0], key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            second >> 32 ^ words[1] ^ low, second & 0xFFFFFFFF,
            first >> 32 ^ words[3] ^ high, first & 0xFFFFFFFF,
        ]  # fmt: skip
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return words


def signs_of(seed: int) -> Floats:
    """Return +1/16 or -1/16 for each of 256 elements."""
    words = _philox(0, seed) + _philox(1, seed)
    bits = np.array([words[i // 32] >> (i % 32) & 1 for i in range(256)])
    return np.where(bits == 1, -1 / 16, 1 / 16).astype(np.float32)


def walsh(values: np.ndarray) -> np.ndarray:
    """Return the unscaled transform, by strides 1, 2, ... 128."""
    values = values.copy()
    for stride in (1, 2, 4, 8, 16, 32, 64, 128):
        pairs = values.reshape(-1, 2, stride)
        first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0], pairs[:, 1] = first + second, first - second
    return values


def _blocks(name: str, options: dict[str, str], data: bytes, n: int) -> Floats:
    block, bits = int(options.get("block", 256)), _BITS[name]
    count = -(-n // block)
    scales = _bf16(np.frombuffer(data, "<u2", count))
    raw = np.frombuffer(data, np.uint8, -(-n * bits // 8), _padded(2 * count))
    if name == "int8":
        codes = raw.view(np.int8).astype(np.int32)
    elif name == "int4":
        nibbles = np.stack([raw & 15, raw >> 4], 1).ravel()[:n].astype(np.int32)
        codes = np.where(nibbles > 7, nibbles - 16, nibbles)
    else:
        codes = 1 - 2 * np.unpackbits(raw, bitorder="little")[:n].astype(np.int32)
    values = codes.astype(np.float32) * np.repeat(scales, block)[:n]
    if options.get("hadamard") == "1":
        signs = signs_of(int(options.get("seed", 0)))
        for b in range(n // 256):
            part = slice(256 * b, 256 * b + 256)
            if scales[b] > 0:
                values[part] = walsh(values[part]) * signs
    return values


def _topk(options: dict[str, str], data: bytes, n: int) -> Floats:
    millionths = round(float(options.get("density", 0.01)) * 1e6)
    k = max(1, -(-n * millionths // 1_000_000))
    parts = -(-n // _SUB_BLOCK)
    counts = np.frombuffer(data, "<u4", parts)
    entries = np.frombuffer(data, "<u4", k, _padded(4 * parts))
    values, at = np.zeros(n, np.float32), 0
    for part, count in enumerate(counts):
        mine = entries[at : at + count]
        values[part * _SUB_BLOCK + (mine & 0xFFFF)] = _bf16(mine >> 16)
        at += count
    return values


def levels() -> dict[int, np.ndarray]:
    """Return adaptive's magnitudes by width, from the page's table."""
    section = FORMAT.read_text().split("\n## adaptive\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([1-8]) \| ([\d ]+) \|$", section, re.MULTILINE)
    return {int(width): np.array(row.split(), np.int64) for width, row in rows}


def widths(heads: np.ndarray, planes: int, floor: int) -> np.ndarray:
    """Return the bits of each block's codes."""
    heads = heads.astype(np.int64)
    coded = (heads > 0) & (heads < 0x7F80)

    def under(threshold: int) -> np.ndarray:
        return np.where(coded, np.clip((heads - threshold) // 128, floor, 8), 0)

    threshold = next(t for t in range(-1023, 32641) if under(t).sum() <= planes)
    low, high = under(threshold), under(threshold - 1)
    fits = low.sum() + np.cumsum(high - low) <= planes
    first = len(heads) if fits.all() else int(np.argmin(fits))
    return np.where(np.arange(len(heads)) < first, high, low)


def _adaptive(options: dict[str, str], data: bytes, n: int) -> Floats:
    blocks = -(-n // 256)
    bits = float(options.get("bits", 2))
    heads = np.frombuffer(data, "<u2", blocks)
    per_block = widths(heads, int(np.ceil(blocks * bits)), int(options.get("floor", 0)))
    signs, table, at = signs_of(int(options.get("seed", 0))), levels(), _padded(2 * blocks)
    values = np.zeros((blocks, 256), np.float32)
    for b, width in enumerate(per_block):
        if heads[b] >= 0x7F80:
            values[b] = np.nan
        if width == 0:
            continue
        raw = np.frombuffer(data, np.uint8, 32 * width, at).reshape(width, 32)
        at += 32 * width
        planes = np.unpackbits(raw, axis=1, bitorder="little").astype(np.int64)
        index = np.zeros(256, np.int64)
        for plane in planes[1:]:
            index = 2 * index + plane
        sums = walsh(np.where(planes[0] == 1, -1, 1) * table[width][index])
        step = _bf16(heads[b : b + 1]) / np.float32(32 if width <= 5 else 256)
        values[b] = sums.astype(np.float32) * (signs * step)
    return values.ravel()[:n]


def _ternary(options: dict[str, str], data: bytes, n: int) -> Floats:
    t = float(options.get("threshold", 0.5))
    raw = np.frombuffer(data, np.uint8, -(-n // 4))
    codes = (raw[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).ravel()[:n]
    return np.array([0, t, np.nan, -t], np.float32)[codes]


def decode(spec: str, data: bytes, n: int) -> Floats:
    """Return the n fp32 elements of a shard."""
    name, options = parse(spec)
    if name == "fp32":
        return np.frombuffer(data, "<f4", n)
    if name == "bf16":
        return _bf16(np.frombuffer(data, "<u2", n))
    if name == "topk":
        return _topk(options, data, n)
    if name == "adaptive":
        return _adaptive(options, data, n)
    if name == "ternary":
        return _ternary(options, data, n)
    return _blocks(name, options, data, n)
