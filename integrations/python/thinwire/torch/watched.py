"""Sessions whose calls are noted, for codec="auto": what the steps around them compute, by a clock
that stands while they wait for the exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire.comm import Segments, Work
from thinwire.torch.forecast.notes import Notes
from thinwire.torch.session import Session


class Watched:
    """A Session, and notes of it while somebody wants to read them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waited_s = 0.0
        self.notes: Notes | None = Notes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def start_over(self) -> None:
        """Between steps: forgets what was noted."""
        self.notes = Notes()

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":  # what has been computed, and not what has been queued
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter() - self._waited_s


class WatchedUnits(Watched):
    """Of DistributedOptimizer, whose units are submitted and completed on the training thread. A
    unit's priority is its number in forward order; below 0 are other things."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._units: dict[Work, tuple[int, torch.device]] = {}

    def submit(
        self,
        tensor: torch.Tensor,
        dtype: str,
        op: str,
        name: str,
        segments: Segments | None = None,
        priority: int = 0,
    ) -> Work:
        is_noted = priority >= 0 and self.notes is not None
        if is_noted:
            self.notes.submitted(priority, tensor.numel(), self._now(tensor.device))
        work = self._session.submit(tensor, dtype, op, name, segments, priority)
        if is_noted:
            self._units[work] = priority, tensor.device
        return work

    def complete(self, work: Work) -> None:
        unit, device = self._units.pop(work, (None, None))
        if unit is None or self.notes is None:
            self._session.complete(work)
            return
        now = self._now(device)
        self.notes.waited_for(unit, now)
        self._session.complete(work)
        self._waited_s += self._now(device) - now


class WatchedBuckets(Watched):
    """Of a DDP hook: buckets come in backward order, numbered from 0, and DDP waits for all of them
    when the last was started."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._buckets: list[int] = []  # of the step under way, in forward order's numbers
        self._last = self._done = 0.0  # when the last one was started, and when all were there

    def start_over(self) -> None:
        super().start_over()
        self._buckets.clear()

    def start(
        self,
        tensor: torch.Tensor,
        *what: Any,
        priority: int,
        finish: Callable[[], None] | None,
    ) -> torch.futures.Future[torch.Tensor]:
        """As Session.start; `what`: dtype, op, name, segments."""
        if self.notes is None:
            return self._session.start(tensor, *what, priority=priority, finish=finish)
        if -priority in self._buckets:
            self._end_step()
        self._last = self._now(tensor.device)
        self.notes.submitted(-priority, tensor.numel(), self._last)
        self._buckets.append(-priority)

        def done() -> None:
            if finish is not None:
                finish()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            self._done = time.perf_counter()

        return self._session.start(tensor, *what, priority=priority, finish=done)

    def _end_step(self) -> None:
        """The next step has begun, so everything of the last one is there."""
        for bucket in self._buckets:
            self.notes.waited_for(bucket, self._last)
        self._waited_s += max(0.0, self._done - self._waited_s - self._last)
        self._buckets.clear()
