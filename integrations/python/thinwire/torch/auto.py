"""codec="auto": the first steps are measured uncompressed, then the codec that advise would
recommend is tried, and kept unless it turns out slower.

What is predicted may be wrong, and compression must not cost time. So the steps after the choice
are timed as well, and where they are more than 3 % slower the optimizer goes back to fp32."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.config import Config
from thinwire.torch.forecast.choice import ACCURATE, choose, predict
from thinwire.torch.forecast.notes import Notes
from thinwire.torch.forecast.probe import probe
from thinwire.torch.session import Session

START = ACCURATE[0]
_WARM_UP = 3  # steps that are not looked at: connecting, the optimizer's state
_STEPS = 12  # that are measured of either codec
_LOSS = 1.03


class Watched:
    """A Session whose calls are noted, by a clock that stands while they wait."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waited_s = 0.0
        self._units: dict[object, int] = {}  # by work
        self.notes: Notes | None = Notes()  # None: nobody reads them any more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def submit(self, tensor, dtype, op, name, segments=None, priority: int = 0):
        is_noted = priority >= 0 and self.notes is not None  # a unit
        if is_noted:
            self.notes.submitted(priority, tensor.numel(), self._now())
        work = self._session.submit(tensor, dtype, op, name, segments, priority)
        if is_noted:
            self._units[work] = priority
        return work

    def complete(self, work) -> None:
        unit = self._units.pop(work, None)
        if unit is not None and self.notes is not None:
            self.notes.waited_for(unit, self._now())
        start = time.perf_counter()
        self._session.complete(work)
        self._waited_s += time.perf_counter() - start

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s


class AutoCodec:
    """Chooses for one optimizer. `settled` is the codec, once it is known."""

    def __init__(self, policy: str, process_group: dist.ProcessGroup, settings: Config) -> None:
        self._policy, self._group, self._settings = policy, process_group, settings
        self._steps = 0
        self._last: float | None = None
        self._times: dict[str, list[float]] = {}
        self._codec = START
        self.settled: str | None = None
        self.watched: Watched | None = None

    def watch(self, session: Session) -> Session | Watched:
        """What the optimizer is to use as its session."""
        if self._codec != START or self.settled is not None:
            return session
        self.watched = Watched(session)
        return self.watched

    def after_step(self, device: torch.device, finish: Callable[[], None]) -> str | None:
        """At the end of every step(). The codec to go on with, if it changes now; then `finish` has
        been called. All ranks get the same answer."""
        if self.settled is not None:
            return None
        self._steps += 1
        now = time.perf_counter()
        if self._last is not None and self._steps > _WARM_UP:
            self._times.setdefault(self._codec, []).append(now - self._last)
        self._last = now
        if self._steps < _WARM_UP + _STEPS + 1:
            return None
        self._steps, self._last = 0, None
        finish()
        return self._next(device)

    def _next(self, device: torch.device) -> str | None:
        if self._codec == START:
            chosen = self._advised(device)
        else:  # every rank must come to the same answer
            start, tried = self._agreed(self._times[START]), self._agreed(self._times[self._codec])
            self.settled = START if tried > _LOSS * start else self._codec
            chosen = self.settled
        if chosen == self._codec:
            self.settled = chosen
            return None
        self._codec = chosen
        return chosen

    def _advised(self, device: torch.device) -> str:
        profile = self.watched.notes.profile(_WARM_UP, self._group)
        self.watched.notes = None
        measured = probe(ACCURATE, device, self._group)
        rows = predict(
            {self._policy: profile}, measured.link, measured.costs, [self._policy],
            lanes=self._settings.lanes, chunk_bytes=self._settings.chunk_bytes,
            min_bytes=self._settings.min_bytes,
        )  # fmt: skip
        box = [choose(rows, ACCURATE).codec]
        source = dist.get_process_group_ranks(self._group)[0]
        dist.broadcast_object_list(box, source, group=self._group)
        return box[0]

    def _agreed(self, times: list[float]) -> float:
        """The median step, of the slowest rank."""
        seconds = torch.tensor(statistics.median(times))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self._group)
        return seconds.item()
