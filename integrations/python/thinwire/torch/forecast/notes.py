"""Notes: when steps needed each bucket's mean and when they had its gradients; from these follows
the profile of a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.simulate import Layer, Profile
from thinwire.torch.agree import mean_of_ranks, worst_of_ranks

_Times = dict[int, float]  # seconds, by bucket number


class Notes:
    """The times of one rank. Buckets are numbered in forward order."""

    def __init__(self) -> None:
        self._numels: dict[int, int] = {}
        self._needed: list[_Times] = [{}]  # by step
        self._ready: list[_Times] = []
        self._sending = False

    def submitted(self, bucket: int, numel: int, at: float) -> None:
        if not self._sending:  # the first of a backward pass
            self._sending = True
            self._ready.append({})
            self._needed.append({})
        self._ready[-1][bucket] = at
        self._numels[bucket] = numel

    def waited_for(self, bucket: int, at: float) -> None:
        self._sending = False
        self._needed[-1].setdefault(bucket, at)

    def profile(self, leave_out: int, process_group: dist.ProcessGroup | None) -> Profile:
        """The mean profile of all ranks, stretched to the slowest rank of every step, for which the
        others wait in real steps. The first `leave_out` steps are left out. All ranks call it."""
        buckets = sorted(self._numels)
        steps = [
            _gaps(buckets, needed, ready, after)
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
        forward, backward = parts[: len(buckets)], parts[len(buckets) : -1]
        layers = [
            Layer(self._numels[bucket], stretch * ahead, stretch * back)
            for bucket, ahead, back in zip(buckets, forward, backward, strict=True)
        ]
        return Profile(tuple(layers), stretch * parts[-1])


def _gaps(buckets: Sequence[int], needed: _Times, ready: _Times, after: _Times) -> list[float]:
    """Seconds of one step: forward of every bucket, backward of every bucket, and the time between
    backward and forward. The last bucket's forward and the loss count as its backward, since
    nothing is waited for in between."""
    asked = [max(needed[b] for b in buckets[: i + 1]) for i in range(len(buckets))]
    made = [max(ready[b] for b in buckets[i:]) for i in range(len(buckets))]
    forward = [later - at for at, later in itertools.pairwise(asked)] + [0.0]
    backward = [at - before for at, before in itertools.pairwise(made)]
    return [*forward, *backward, made[-1] - asked[-1], min(after.values()) - made[0]]
