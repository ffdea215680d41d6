"""Recovery: after an error the remaining ranks agree on a step and continue from there.

A rank that has all means of a step has received the last bytes of every peer, and peers change
their residuals before they send. So if one rank has a step, the residuals of all others are those
after it, but their parameters are not: these are copied from that rank. A step that no rank has is
undone on all ranks. Ranks are at most one step apart, because none can finish a step before all
have submitted it; so one undo log is enough."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from thinwire.errors import DataLossError, MismatchError
from thinwire.torch import agree, group, tensors
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.checkpoint import Memory, Residuals, merged

_UNDER_WAY = 2  # most steps in flight: with delay=1 a step begins before the last one's means come


class StepLedger:
    """The buckets of the last step, and those whose means have come back.

    Additions and removals are atomic in the interpreter, so the waiter's thread may call
    came_back() while the caller submits."""

    def __init__(self) -> None:
        self.in_step = False  # True between a step's first submission and end_step()
        self._touched: set[Bucket] = set()  # buckets of the last step that was begun
        self._unfinished: set[Bucket] = set()  # those of them that are in flight or failed

    def submitted(self, bucket: Bucket) -> None:
        if not self.in_step:
            self._touched.clear()
            self._unfinished.clear()
            self.in_step = True
        self._touched.add(bucket)
        self._unfinished.add(bucket)

    def came_back(self, bucket: Bucket) -> None:
        """Note that the bucket holds the mean."""
        self._unfinished.discard(bucket)

    def end_step(self) -> frozenset[Bucket]:
        """Return the buckets submitted since the last end_step()."""
        touched = frozenset(self._touched if self.in_step else ())
        self.in_step = False
        return touched

    @property
    def lost(self) -> bool:
        """True if all of the last step was submitted, and some of its means did not come back."""
        return not self.in_step and bool(self._unfinished)

    def touched(self) -> set[str]:
        """Return the parameters of the last step that was begun."""
        return {part.name for bucket in self._touched for part in bucket.parts}


class Recovery(NamedTuple):
    """The agreement of the ranks, the same on all of them."""

    step: int  # the number of steps that count as made
    source: int  # the lowest rank of the new group that has made them all
    equal: bool  # all ranks have made the same steps; else parameters must come from `source`


class Progress(NamedTuple):
    """How far a rank has come, in steps."""

    made: int  # steps whose means the optimizer has, or may have
    begun: int  # steps that were begun; the last one may have touched only some parameters
    made_of: Mapping[str, int]  # `made` by parameter, for all of them; empty if they do not differ
    codec: str
    momentum: float
    users: Mapping[str, int]  # group.users_of()
    whole: bool  # its parameters are of one step: no recovery was interrupted while copying them

    def of(self, name: str) -> int:
        return self.made_of.get(name, self.made)

    def all_made(self) -> int:
        """Return the number of steps that all parameters have made."""
        return min(self.made_of.values(), default=self.made)

    def order(self) -> tuple[int, int]:
        """Return a sort key: ranks that have made more come later."""
        return self.all_made(), sum(self.made_of.values())


class Agreement:
    """The progress of all ranks of the new group. All its ranks create one."""

    def __init__(self, mine: Progress, process_group: dist.ProcessGroup) -> None:
        """MismatchError on every rank if ranks are further apart than is possible in one run."""
        self._group = process_group
        reports: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(reports, mine, group=process_group)
        group.count_alike(process_group, [report.users for report in reports])
        self._mine = mine
        whole = [rank for rank, report in enumerate(reports) if report.whole]
        if not whole:
            raise DataLossError(
                "recover: a recovery before this one was cut while every rank that is left took "
                "parameters from one that is lost, so none has whole ones; load a checkpoint"
            )
        source = max(whole, key=lambda r: (reports[r].order(), -r))
        self.goal: Progress = reports[source]
        _check_distance(reports, self.goal)
        equal = all(
            r.whole and (r.made, r.made_of) == (self.goal.made, self.goal.made_of) for r in reports
        )
        self.result = Recovery(self.goal.all_made(), source, equal)

    def choose(self, now: Residuals, before: Residuals, touched: Collection[str]) -> Residuals:
        """Return this rank's residuals after the agreed step. before: the residuals before the last
        step, which has changed those of the parameters in `touched`."""
        last = self._mine.begun - 1
        return {
            name: before.get(name, memory)
            if name in touched and last >= self.goal.of(name)
            else memory
            for name, memory in now.items()
        }

    def share_momentum(self, kept: Residuals, sparse: Collection[str]) -> Residuals:
        """Return the residuals with the momentum of the source, unless all ranks are equal: a rank
        that lacks the last step's means lacks its momentum, too. sparse: the parameters whose
        momentum differs between ranks."""
        if self.result.equal:
            return kept
        mine = {
            name: memory.momentum
            for name, memory in kept.items()
            if memory.momentum is not None and name not in sparse
        }
        source = self.result.source
        sizes = agree.from_rank(source, {n: m.numel() for n, m in mine.items()}, self._group)
        shared = dict(kept)
        for name, numel in sizes.items():
            momentum = agree.tensor_from_rank(
                source, mine.get(name, tensors.zeros(numel)), self._group
            )
            zeros = tensors.zeros(numel)
            shared[name] = shared.get(name, Memory(zeros, zeros))._replace(momentum=momentum)
        return shared


def _check_distance(reports: Sequence[Progress], goal: Progress) -> None:
    for rank, report in enumerate(reports):
        if report.begun > goal.all_made() + _UNDER_WAY:
            raise MismatchError(
                f"recover: rank {rank} has begun {report.begun} steps, expected at most "
                f"{goal.all_made() + _UNDER_WAY}, since no rank has made more than "
                f"{goal.all_made()}; these ranks are not of one run: load one run's state files on "
                "all of them"
            )


def progress_of(
    ledger: StepLedger,
    codec: str,
    momentum: float,
    steps: int,
    made: Mapping[str, int] | int | None,
    users: Mapping[str, int],
    whole: bool,
) -> Progress:
    """Return this rank's progress. steps: the number of steps that were submitted as a whole. made:
    as GradientExchange.recover() takes it."""
    begun = steps + ledger.in_step
    default = made if isinstance(made, int) else steps - ledger.lost
    made_of = made if isinstance(made, Mapping) else {}
    return Progress(default, begun, made_of, codec, momentum, users, whole)


def fit(kept: Residuals, old: int, new: int) -> Residuals:
    """Convert the residuals of a rank of `old` ranks for a world of `new` ranks."""
    if old == new:
        return kept
    return {name: merged(memory, old) for name, memory in kept.items()}
