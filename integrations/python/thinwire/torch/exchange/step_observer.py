"""StepObserver: notes when steps submit buckets and wait for them, for codec="auto".

Its clock stands while a step waits for the exchange, so that the notes tell how long the model
computes between two buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.forecast.notes import Notes

Finish = Callable[[], None]


class StepObserver:
    """Observes both ways to use a GradientExchange.

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
