"""StepBuckets: where a step of DDP begins and ends, and which number each of its buckets has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


class StepBuckets:
    """Counts the buckets of a step itself. In the first step of static_graph=True DDP hands all
    buckets over at once, each with the index 0 and none of them as the last one."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """parameters: all of the model, or none if they are not known."""
        self._all = frozenset(map(id, parameters))
        self._seen: set[int] = set()  # the ids of this step's parameters so far
        self._count = 0

    @property
    def number(self) -> int:
        """The present bucket's, from 0; the same on all ranks."""
        return self._count - 1

    def begin(self, bucket: dist.GradBucket) -> bool:
        """Makes this bucket the present one. Returns whether it shows that the step before is over,
        which ends() could not tell: a parameter comes once a step."""
        ids = set(map(id, bucket.parameters()))
        missed = not ids.isdisjoint(self._seen)
        if missed:
            self._clear()
        self._count += 1
        self._seen |= ids
        return missed

    def ends(self, bucket: dist.GradBucket) -> bool:
        """Whether the present bucket is the last one of its step. Where DDP does not say it, the
        parameters tell, if they are known; else the next step's first bucket does."""
        uncounted = bucket.index() != self.number
        last = bucket.is_last() or (uncounted and bool(self._all) and self._seen >= self._all)
        if last:
            self._clear()
        return last

    def abandon(self) -> None:
        """The step under way failed; the next bucket begins another."""
        self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self._count = 0
