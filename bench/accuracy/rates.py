"""Each method's own learning rate: a climb on a grid of factors of the task's rate, the same grid
for every method."""

from __future__ import annotations

import math
from collections.abc import Mapping

GRID = tuple(2.0**exponent for exponent in range(-3, 4))
_FIRST = (0.5, 1.0, 2.0)


def best(scores: Mapping[float, float]) -> float:
    """The factor of the highest score; a run that diverged has none (NaN)."""
    return max(scores, key=lambda factor: _ranked(scores[factor]))


def missing(scores: Mapping[float, float]) -> list[float]:
    """The factors to be tried next; none if both neighbours of the best one are worse, or the grid
    ends there."""
    first = [factor for factor in _FIRST if factor not in scores]
    if first:
        return first
    place = GRID.index(best(scores))
    return [factor for factor in GRID[max(place - 1, 0) : place + 2] if factor not in scores]


def _ranked(score: float) -> float:
    return -math.inf if math.isnan(score) else score
