#!/usr/bin/env python3
"""Writes compress/codecs/adaptive_levels.h: the levels of the codec adaptive, as whole numbers.

The levels have the least mean squared error for a Gaussian of variance 1: Lloyd, "Least Squares
Quantization in PCM", 1982; Max, "Quantizing for Minimum Distortion", 1960. They are symmetric, so
only the positive ones are listed. With --errors the script prints the error that rounding to whole
numbers adds."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from statistics import NormalDist

PAGE = Path(__file__).resolve().parent.parent / "compress" / "codecs" / "adaptive_levels.h"
WIDTHS = range(1, 9)
_NARROW = 5  # up to this width the sum of 256 levels fits in 16 bits
_UNITS = {width: 32 if width <= _NARROW else 256 for width in WIDTHS}  # per standard deviation
_ROUNDS = 20_000
_GAUSS = NormalDist()

_HEAD = """\
// The levels of adaptive: scripts/lloyd_max.py writes this file. compress/FORMAT.md, "adaptive".
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_LEVELS_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_LEVELS_H_

#include <cstdint>

namespace thinwire {

// The magnitudes of widths 1 to 8, one width after the other: 2^(width - 1) of each, ascending.
inline constexpr uint16_t kAdaptiveLevels[255] = {
"""
_TAIL = """\
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_LEVELS_H_
"""


def _edges(levels: list[float]) -> list[float]:
    """The points where the nearest level changes, and both ends."""
    inner = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    return [0.0, *inner, float("inf")]


def _moments(a: float, b: float) -> tuple[float, float, float]:
    """The integrals of the density, and of x and x^2 times the density, from a to b."""
    mass = _GAUSS.cdf(-a) - _GAUSS.cdf(-b)
    first = _GAUSS.pdf(a) - (_GAUSS.pdf(b) if b != float("inf") else 0.0)
    ends = a * _GAUSS.pdf(a) - (b * _GAUSS.pdf(b) if b != float("inf") else 0.0)
    return mass, first, mass + ends


def levels_of(width: int) -> list[float]:
    """The positive levels: each is the mean of the values nearest to it. The iteration starts from
    the density of levels that is best for many levels (Panter and Dite, 1951), close to the result.
    """
    count = 2 ** (width - 1)
    wide = NormalDist(0, 3**0.5)
    levels = [wide.inv_cdf(0.5 + (i + 0.5) / (2 * count)) for i in range(count)]
    for _ in range(_ROUNDS):
        edges = _edges(levels)
        means = [_moments(a, b) for a, b in itertools.pairwise(edges)]
        new = [first / mass for mass, first, _ in means]
        if max(abs(a - b) for a, b in zip(new, levels, strict=True)) < 1e-10:
            break
        levels = new
    return levels


def error_of(levels: list[float]) -> float:
    """The mean squared error."""
    edges = _edges(levels)
    error = 0.0
    for level, a, b in zip(levels, edges, edges[1:], strict=False):
        mass, first, second = _moments(a, b)
        error += second - 2 * level * first + level * level * mass
    return 2 * error


def whole(width: int) -> list[int]:
    """The levels in the width's units."""
    return [round(level * _UNITS[width]) for level in levels_of(width)]


def page() -> str:
    lines = []
    for width in WIDTHS:
        lines.append(f"    // width {width}, in units of 1/{_UNITS[width]}")
        line = "   "
        for level in whole(width):
            if len(line) + len(f" {level},") > 100:
                lines.append(line)
                line = "   "
            line += f" {level},"
        lines.append(line)
    lines[-1] = lines[-1].removesuffix(",")
    return _HEAD + "\n".join(lines) + _TAIL


def main() -> int:
    if "--errors" in sys.argv[1:]:
        for width in WIDTHS:
            exact = error_of(levels_of(width))
            rounded = error_of([level / _UNITS[width] for level in whole(width)])
            print(f"width {width}: {exact:.3g}, in whole numbers {rounded / exact - 1:+.2%}")
        return 0
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
