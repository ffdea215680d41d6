"""When a round is due: after a number of steps, after a time, or as often as a share of the time
allows."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.arguments import as_int, is_finite, is_whole, wrong
from thinwire.errors import InvalidArgumentError


@dataclass(frozen=True)
class Overhead:
    """Chooses the least number of steps between rounds with which exchanges take at most this share
    of the time, as measured by all members.

    Args:
        share: between 0 and 1; 0.05 leaves 95 % of the time for training.
        first: steps before the first round, when nothing has been measured yet.
        most: the largest number of steps between rounds.
    """

    share: float = 0.05
    first: int = 8
    most: int = 4096

    def __post_init__(self) -> None:
        if not (is_finite(self.share) and 0 < self.share < 1):
            raise wrong("share", self.share, "a number between 0 and 1")
        first = as_int("first", self.first, 1)
        object.__setattr__(self, "first", first)  # the class is frozen
        object.__setattr__(self, "most", as_int("most", self.most, first))


SyncEvery = int | datetime.timedelta | Overhead


class Pace:
    """Tells after each step whether the next round is due. The clock is time.monotonic()."""

    def __init__(self, sync_every: SyncEvery, fragments: int, delay: int) -> None:
        """sync_every: the period in which every fragment has one round. delay: steps from the
        beginning of a round to its end. InvalidArgumentError if a fragment's next round would begin
        before its last one ends."""
        delay = as_int("fragment_sync_delay", delay, 0)
        self._seconds, self._overhead, self.steps = None, None, 1
        if isinstance(sync_every, datetime.timedelta):
            self._seconds = sync_every.total_seconds() / fragments
            if self._seconds <= 0:
                raise wrong("sync_every", sync_every, "a positive time")
        elif isinstance(sync_every, Overhead):
            self._overhead = sync_every
            self.steps = max(1, sync_every.first // fragments)
        elif is_whole(sync_every):
            sync_every = as_int("sync_every", sync_every, fragments)
            if sync_every % fragments or delay >= sync_every:
                raise InvalidArgumentError(
                    f"sync_every is {sync_every}, expected a multiple of the {fragments} fragments "
                    f"and more than fragment_sync_delay, which is {delay}"
                )
            self.steps = sync_every // fragments
        else:
            raise wrong("sync_every", sync_every, "steps, a timedelta or an Overhead")
        # With a fixed number of steps the first round ends, and not begins, after that many.
        self.since = delay % self.steps if self._seconds is None else 0
        self._begun = self._last = time.monotonic()
        self._step_s = self._round_s = 0.0

    @property
    def by_clock(self) -> bool:
        """True if rounds are due by time, and not by the number of steps."""
        return self._seconds is not None

    def stepped(self) -> bool:
        """Count a step, and return whether a round is due."""
        now = time.monotonic()
        self._step_s = _smoothed(self._step_s, now - self._last)
        self._last = now
        self.since += 1
        return self.due(now)

    def due(self, now: float) -> bool:
        if self._seconds is not None:
            return now - self._begun >= self._seconds
        return self.since >= self.steps

    def began(self) -> None:
        """Call when a round begins."""
        self.since, self._begun = 0, time.monotonic()

    def ended(self, exchange_s: float) -> None:
        """Note that a round took `exchange_s` seconds. The time since the last step does not count
        as a step's."""
        self._round_s = _smoothed(self._round_s, exchange_s)
        self._begun = self._last = time.monotonic()

    def measured(self) -> tuple[float, float]:
        """Return the seconds of a round and of a step on this member; 0 before the first ones."""
        return self._round_s, self._step_s

    def settle(self, measured: Sequence[tuple[float, float]]) -> None:
        """Set the number of steps from the measurements of a round's members. The shortest round
        time counts: the member that came last did not wait for others."""
        known = [each for each in measured if min(each) > 0]
        if self._overhead is None or not known:
            return
        share = self._overhead.share
        round_s = min(each[0] for each in known)
        step_s = max(each[1] for each in known)
        steps = math.ceil(round_s * (1 - share) / (share * step_s))
        self.steps = max(1, min(self._overhead.most, steps))


def _smoothed(old: float, new: float) -> float:
    return new if old == 0 else 0.75 * old + 0.25 * new
