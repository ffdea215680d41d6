"""codec="auto": measures the first steps uncompressed, then tries the codec that advise would
recommend, and keeps it unless it turns out slower.

A prediction may be wrong, and compression must not cost time. So steps before and after the choice
are timed. If the codec made them more than 3 % slower, the exchange returns to fp32. A machine that
is busy for a moment looks the same, so fp32 is then timed again, and then the codec; a codec is
dropped only if it was slower twice.

The simulator does not model some steps (FSDP2's, which wait for each reduce-scatter). There the
codecs take turns of a few steps over one connection, so that a busy moment affects all of them
alike, and the most accurate codec near the fastest one is kept."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.config import Config
from thinwire.torch.agree import agreeing, from_rank_0, worst_of_ranks
from thinwire.torch.forecast import (
    ACCURATE,
    Prediction,
    StepObserver,
    choose,
    codecs_on,
    predict,
    probe,
)

AUTO = "auto"
START = ACCURATE[0]
_WARM_UP = 3  # steps that are not measured: connecting, the optimizer's state, DDP's new buckets
_TIMED = 12  # steps that are noted, or timed with a codec, before a decision
_LOSS = 1.03  # a codec may take this many times as long as fp32 before it counts as slower
_LOSSES = 2  # a codec that was slower this many times is dropped

# Turns. The first step of a turn is not timed, because packets of the step before it may still be
# queued on the link.
_TURN = 4  # steps per turn, including the one that is not timed
_ROUNDS = 4  # the least number of rounds; in each, every codec has a turn
_TURNS = 32  # the largest number of turns, if codecs are close
_CLOSE = 1.06
_EVEN = 1.02  # steps this close are equal, and accuracy decides


class Choice(NamedTuple):
    """The codec to continue with."""

    codec: str
    among: tuple[str, ...]  # the codecs that the connection needs


class _Turns:
    """The step times of codecs that take turns: A B C D, B D A C, D C B A, C A D B and so on. So in
    four rounds each of four codecs has each place once, so that a drift favours none, and no codec
    has two turns in a row, so that a busy moment does not affect just one. Step times are divided
    by the fastest turn of their round, so that busy rounds can be compared with others."""

    def __init__(self, codecs: Sequence[str]) -> None:
        """codecs: from the most accurate to the least."""
        self.codecs = tuple(codecs)
        self._left = list(codecs)  # the codecs that may still be chosen
        self._rounds: list[dict[str, list[float]]] = []
        self._done = 0  # number of turns
        self._round: dict[str, list[float]] = {}

    def begin(self) -> str:
        """Return the first codec of the first round."""
        return self._left[0]

    def end_turn(self, codec: str, seconds: Sequence[float]) -> str | None:
        """Return the codec whose turn is next, or None at the end of a round."""
        self._done += 1
        self._round[codec] = list(seconds)
        return next((other for other in self._order() if other not in self._round), None)

    def end_round(self, group: dist.ProcessGroup | None) -> tuple[str, bool]:
        """Return (the codec whose turn is next, False) or (the chosen codec, True). All ranks call
        it and use the slowest rank's times, so all get the same result."""
        mine = [self._round[codec] for codec in self._left]
        slowest = iter(worst_of_ranks([each for turn in mine for each in turn], group))
        steps = zip(self._left, mine, strict=True)
        self._rounds.append({codec: [next(slowest) for _ in turn] for codec, turn in steps})
        self._round = {}
        if len(self._rounds) >= _ROUNDS and len(self._rounds) % 2 == 0:
            rows = self._typical()
            fastest = min(row.step_s for row in rows)
            close = [row.codec for row in rows if row.step_s <= _CLOSE * fastest]
            if len(close) == 1 or self._done + 2 * len(close) > _TURNS:
                return choose(rows, self.codecs, _EVEN).codec, True
            self._left = close
        return self._order()[0], False

    def _order(self) -> list[str]:
        number, left = len(self._rounds), self._left
        order = left[1::2] + left[::2] if number % 2 else left
        return order[::-1] if number % 4 > 1 else order

    def _typical(self) -> list[Prediction]:
        """Return each codec's median step, divided by the fastest turn of the same round; of two
        middle values the lower one, because noise only adds time."""
        found: dict[str, list[float]] = {codec: [] for codec in self._left}
        for steps in self._rounds:
            fastest = min(statistics.median(steps[codec]) for codec in self._left)
            for codec, each in found.items():
                each += [seconds / fastest for seconds in steps[codec]]
        return [Prediction(codec, "", statistics.median_low(each)) for codec, each in found.items()]


class _Stage(NamedTuple):
    """A number of steps, and the function that decides on the codec after them."""

    decide: Callable[[torch.device], str]
    skipped: int = _WARM_UP
    timed: int = _TIMED


class AutoCodec:
    """Chooses the codec of one exchange with codec="auto"."""

    def __init__(self, config: Config, process_group: dist.ProcessGroup | None) -> None:
        self.config = dataclasses.replace(config, codec=START)  # the exchange starts with this
        self.observer: StepObserver | None = StepObserver()  # None if nothing must be noted
        self._group = process_group
        self._steps = 0
        self._last = 0.0
        self._times: list[float] = []
        self._start_s, self._losses = 0.0, 0
        self._advised = START
        self._choice = Choice(START, (START,))
        self._stage: _Stage | None = _Stage(self._choose)  # None after the final decision
        self._tried: tuple[str, ...] = ()  # codecs to compare in turns, in place of a prediction
        self._turns: _Turns | None = None  # None unless codecs take turns now

    def try_each(self, codecs: Sequence[str]) -> None:
        """Compare these codecs in turns, in place of a prediction. Call it before the first step.
        codecs: from the most accurate to the least; fp32 goes first."""
        self._tried = (START, *(codec for codec in codecs if codec != START))
        self._stage, self.observer = _Stage(self._compare, timed=0), None

    def after_step(self, device: torch.device, finish: Callable[[], None]) -> Choice | None:
        """Return the codec to continue with, or None for no change. All ranks call it between
        steps, and get the same result. `finish` is called before a decision and waits until nothing
        is in flight. PeerLostError if a rank was lost."""
        if self._stage is None:
            return None
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _WARM_UP and self.observer is not None:
            finish()
            self.observer.forget()
        if self._steps > self._stage.skipped:
            self._times.append(now - self._last)
        self._last = now
        if self._steps < self._stage.skipped + self._stage.timed:
            return None
        finish()
        choice = self._decide(device)
        self._steps = 0
        self._times.clear()
        return choice

    @property
    def comparing(self) -> bool:
        """True while codecs take turns, so that the next step may use another codec."""
        return self._turns is not None

    def settle(self, process_group: dist.ProcessGroup | None, codec: str) -> None:
        """Continue in another group, and keep `codec`: measurements of the old group say little
        about the new one, and its ranks may be in different stages."""
        self._group, self._choice = process_group, Choice(codec, (codec,))
        self._stage = self.observer = self._turns = None

    def _decide(self, device: torch.device) -> Choice | None:
        before = self._choice
        with agreeing("a codec", self._group):
            codec = self._stage.decide(device)
        among = (codec,) if self._turns is None else self._turns.codecs
        self._choice = Choice(codec, among)
        return None if self._choice == before else self._choice

    # The stages. Each is called at the end of its steps and returns the codec to continue with.

    def _choose(self, device: torch.device) -> str:
        profile = self.observer.notes.profile(1, self._group)
        self.observer = None
        policy = self.config.policy
        measured = probe(codecs_on(device, ACCURATE), device, self._group)
        rows = predict(
            {policy: profile}, measured.link, measured.costs, [policy], lanes=self.config.lanes,
            chunk_bytes=self.config.chunk_bytes, min_bytes=self.config.min_bytes,
        )  # fmt: skip
        self._advised = from_rank_0(choose(rows, ACCURATE).codec, self._group)
        self._stage = None if self._advised == START else _Stage(self._time)
        return START

    def _time(self, _device: torch.device) -> str:
        self._start_s = self._agreed_step()
        self._stage = _Stage(self._judge)
        return self._advised

    def _judge(self, _device: torch.device) -> str:
        self._stage = None
        if self._agreed_step() <= _LOSS * self._start_s:
            return self._advised
        self._losses += 1
        if self._losses < _LOSSES:
            self._stage = _Stage(self._time)
        return START

    def _compare(self, device: torch.device) -> str:
        self._turns = _Turns(codecs_on(device, self._tried))
        self._stage = _Stage(self._end_turn, skipped=1, timed=_TURN - 1)
        return self._turns.begin()

    def _end_turn(self, _device: torch.device) -> str:
        codec = self._turns.end_turn(self._choice.codec, self._times)
        if codec is not None:
            return codec
        codec, stays = self._turns.end_round(self._group)
        if stays:
            self._stage = self._turns = None
        return codec

    def _agreed_step(self) -> float:
        """Return the median of the timed steps on the slowest rank, in seconds."""
        return worst_of_ranks([statistics.median(self._times)], self._group)[0]
