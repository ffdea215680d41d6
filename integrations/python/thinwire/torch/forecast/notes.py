"""Notes of when a step needed each unit's mean and when it had its gradients, and the profile that
follows from them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.simulate import Layer, Profile
from thinwire.torch.agree import mean_of_ranks, worst_of_ranks

_Times = dict[int, float]  # seconds, by unit


class Notes:
    """Of one rank. Units are numbered in forward order."""

    def __init__(self) -> None:
        self._numels: dict[int, int] = {}
        self._needed: list[_Times] = [{}]  # by step
        self._ready: list[_Times] = []
        self._sending = False

    def submitted(self, unit: int, numel: int, at: float) -> None:
        if not self._sending:  # the first of a backward pass
            self._sending = True
            self._ready.append({})
            self._needed.append({})
        self._ready[-1][unit] = at
        self._numels[unit] = numel

    def waited_for(self, unit: int, at: float) -> None:
        self._sending = False
        self._needed[-1].setdefault(unit, at)

    def profile(self, leave_out: int, process_group: dist.ProcessGroup | None) -> Profile:
        """Without the first `leave_out` steps; all ranks call it. Of all ranks: their mean,
        stretched to the slowest rank of every step, for which the others wait in real steps."""
        units = sorted(self._numels)
        steps = [
            _gaps(units, needed, ready, after)
            for needed, ready, after in zip(
                self._needed[leave_out:], self._ready[leave_out:], self._needed[leave_out + 1 :],
                strict=False,
            )
            if after
        ]  # fmt: skip
        slowest = worst_of_ranks([sum(step) for step in steps], process_group)
        parts = [statistics.median(values) for values in zip(*steps, strict=True)]
        parts = mean_of_ranks(parts, process_group)
        stretch = statistics.median(slowest) / sum(parts)
        forward, backward = parts[: len(units)], parts[len(units) : -1]
        layers = [
            Layer(self._numels[unit], stretch * ahead, stretch * back)
            for unit, ahead, back in zip(units, forward, backward, strict=True)
        ]
        return Profile(tuple(layers), stretch * parts[-1])


def _gaps(units: Sequence[int], needed: _Times, ready: _Times, after: _Times) -> list[float]:
    """Seconds of one step: forward of every unit, backward of every unit, and what is between. The
    last unit's forward and the loss are part of its backward, since nothing is waited for there."""
    asked = [max(needed[u] for u in units[: i + 1]) for i in range(len(units))]
    made = [max(ready[u] for u in units[i:]) for i in range(len(units))]
    forward = [later - at for at, later in itertools.pairwise(asked)] + [0.0]
    backward = [at - before for at, before in itertools.pairwise(made)]
    return [*forward, *backward, made[-1] - asked[-1], min(after.values()) - made[0]]
