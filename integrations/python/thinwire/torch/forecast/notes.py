"""Notes: when steps needed each bucket's mean and when they had its gradients; from these follows
the profile of a step. StepObserver takes them while an exchange with codec="auto" is used."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from thinwire.simulate import Layer, Profile
from thinwire.torch.agree import mean_of_ranks, worst_of_ranks
from thinwire.torch.exchange.bucket import Bucket

_Times = dict[int, float]  # seconds, by bucket number
Finish = Callable[[], None]


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


class StepObserver:
    """Notes when the steps of a GradientExchange submit buckets and wait for them.

    Its clock stands while a step waits for the exchange, so that the notes tell how long the model
    computes between two buckets.

    With submit() and wait(), a bucket's priority is its number in forward order. With start(),
    buckets come in backward order, numbered from 0 by their priority, and the step ends when all of
    them are done; so a bucket's number in forward order is its priority, negated."""

    def __init__(self) -> None:
        self.notes = Notes()
        self._waited_s = 0.0
        self._step: list[int] = []  # the buckets that were started, by number in forward order
        self._last_start = 0.0
        self._last_done = 0.0

    def forget(self) -> None:
        """Between steps: drops what was noted so far."""
        self.notes = Notes()
        self._step.clear()

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":  # the time when it has been computed, not when it was queued
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter() - self._waited_s

    def submitting(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Before a submit()."""
        if bucket.parts:
            self.notes.submitted(bucket.priority, bucket.numel, self._now(tensor.device))

    @contextmanager
    def waiting(self, bucket: Bucket, device: torch.device) -> Iterator[None]:
        """Around a wait()."""
        if not bucket.parts:
            yield
            return
        start = self._now(device)
        self.notes.waited_for(bucket.priority, start)
        yield
        self._waited_s += self._now(device) - start

    def starting(self, bucket: Bucket, tensor: torch.Tensor, finish: Finish | None) -> Finish:
        """Before a start(); returns what start() is to call when the bucket is done."""
        number = -bucket.priority
        if number in self._step:
            self._end_step()
        self._last_start = self._now(tensor.device)
        self.notes.submitted(number, bucket.numel, self._last_start)
        self._step.append(number)

        def done() -> None:
            if finish is not None:
                finish()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            self._last_done = time.perf_counter()

        return done

    def _end_step(self) -> None:
        """The next step has begun, so all buckets of the last one are done."""
        for number in self._step:
            self.notes.waited_for(number, self._last_start)
        self._waited_s += max(0.0, self._last_done - self._waited_s - self._last_start)
        self._step.clear()
