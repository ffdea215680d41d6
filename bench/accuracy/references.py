"""Formats and rules that others published, in numpy, for their error on the same gradients. Each
function returns what a decoder gets. Bits an element are by the rule: nothing is packed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray

# Dettmers et al., arXiv 2305.14314: quantiles of a Gaussian, 0 among them.
_NF4 = np.array(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip
# Magnitudes of E2M1, OCP's four-bit float.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E4M3_MAX = 448.0
_THC_CUT = 2.1539  # leaves 1/32 of a Gaussian outside


def _rows(x: Floats, block: int) -> Floats:
    return np.pad(x.astype(np.float64), (0, -len(x) % block)).reshape(-1, block)


def _nearest(values: Floats, levels: Floats) -> Floats:
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, values)]


def _over(values: Floats, scale: Floats) -> Floats:
    return values / np.where(scale == 0, 1, scale)


def _e2m1(values: Floats) -> Floats:
    return np.sign(values) * _nearest(np.abs(values), _E2M1)


def _e4m3(values: Floats) -> Floats:
    """Positive values to three bits behind the leading one."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(values, 1e-300))), -6)
    step = np.exp2(exponent - 3)
    return np.minimum(np.round(values / step) * step, _E4M3_MAX)


def _nf4(x: Floats, _random: np.random.Generator) -> Floats:
    y = _rows(x, 256)
    scale = np.abs(y).max(1, keepdims=True)
    return _nearest(_over(y, scale), _NF4) * scale


def _mxfp4(x: Floats, _random: np.random.Generator) -> Floats:
    y = _rows(x, 32)
    largest = np.abs(y).max(1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - 2)
    return _e2m1(y / scale) * scale


def _nvfp4(x: Floats, _random: np.random.Generator) -> Floats:
    y = _rows(x, 16)
    whole = max(np.abs(y).max() / (6 * _E4M3_MAX), 1e-300)
    scale = _e4m3(np.abs(y).max(1, keepdims=True) / 6 / whole) * whole
    return _e2m1(_over(y, scale)) * scale


def _minus8(x: Floats, _random: np.random.Generator) -> Floats:
    """int4 with the sign of the block's largest element in the scale, so that its code is -8."""
    y = _rows(x, 256)
    largest = np.take_along_axis(y, np.abs(y).argmax(1)[:, None], 1)
    scale = largest / -8
    return np.clip(np.round(_over(y, scale)), -8, 7) * scale


def _qsgd(x: Floats, random: np.random.Generator) -> Floats:
    """Alistarh et al., arXiv 1610.02132: the norm of 512 elements, a sign, 7 levels beside 0."""
    y = _rows(x, 512)
    norm = np.sqrt((y * y).sum(1, keepdims=True))
    return np.sign(y) * np.floor(_over(np.abs(y), norm) * 7 + random.random(y.shape)) / 7 * norm


def _thc(x: Floats, random: np.random.Generator) -> Floats:
    """Li et al., NSDI 2024, arXiv 2302.08545, with evenly spaced levels: a randomised Hadamard
    transform of the whole, cut where 1/32 of a Gaussian lies outside, rounded without bias."""
    size = 1 << (len(x) - 1).bit_length()
    signs = random.choice([-1.0, 1.0], size)
    y = _walsh(np.pad(x.astype(np.float64), (0, size - len(x))) * signs)
    cut = _THC_CUT * np.sqrt((y * y).mean())
    step = 2 * cut / 15
    codes = np.floor((np.clip(y, -cut, cut) + cut) / step + random.random(size))
    return _walsh(codes * step - cut) * signs


def _walsh(y: Floats) -> Floats:
    """Orthonormal."""
    stride = 1
    while stride < len(y):
        pairs = y.reshape(-1, 2, stride)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).ravel()
        stride *= 2
    return y / np.sqrt(len(y))


@dataclass(frozen=True)
class Reference:
    bits: float  # an element, scales included
    decoded: Callable[[Floats, np.random.Generator], Floats]

    def error(self, x: Floats) -> float:
        """|x - D(x)|^2 / |x|^2."""
        y = self.decoded(x, np.random.default_rng(0)).ravel()[: len(x)]
        exact = x.astype(np.float64)
        return float(((exact - y) ** 2).sum() / (exact**2).sum())


REFERENCES = {
    "NF4, blocks of 256": Reference(4.0625, _nf4),
    "MXFP4": Reference(4.25, _mxfp4),
    "NVFP4": Reference(4.5, _nvfp4),
    "int4, largest to -8": Reference(4.0625, _minus8),
    "QSGD, 4 bits": Reference(4.0625, _qsgd),
    "THC, 4 bits": Reference(4.0, _thc),
}
