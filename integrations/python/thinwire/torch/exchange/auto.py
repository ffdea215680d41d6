"""codec="auto": the first steps are measured uncompressed, then the codec that advise would
recommend is tried, and kept unless it turns out slower.

A prediction may be wrong, and compression must not cost time. So steps before and after the choice
are timed, and where it made them more than 3 % slower, fp32 comes back. A machine that is busy for
a moment looks the same, so fp32 is then timed again, and the codec after it; only one that was
slower twice is given up.

Where the simulator does not know the steps (FSDP2's, which wait for each reduce-scatter), the
codecs are timed one after another, and the most accurate of those near the fastest stays."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from thinwire.config import Config
from thinwire.errors import Error, PeerLostError
from thinwire.torch.agree import from_rank_0, worst_of_ranks
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
_NOTED = 12  # steps whose computing is measured
_TIMED = 12  # steps that are timed with each codec that is compared
_LOSS = 1.03  # a step that takes up to this many times fp32's is no reason to go back
_LOSSES = 2  # times that a codec must be slower


class AutoCodec:
    """Chooses a codec for one exchange, whose settings have codec="auto"."""

    def __init__(self, config: Config, process_group: dist.ProcessGroup | None) -> None:
        self.config = dataclasses.replace(config, codec=START)  # the exchange starts with this
        self.observer: StepObserver | None = StepObserver()  # None: nothing is to be noted
        self._group = process_group
        self._steps = 0
        self._last = 0.0
        self._times: list[float] = []
        self._start_s, self._losses = 0.0, 0
        self._codec = self._advised = START
        # How the codec is decided on at the end of the steps under way; None: it is decided.
        self._stage: Callable[[torch.device], str] | None = self._choose
        self._tried: tuple[str, ...] = ()  # codecs that are timed in place of a prediction
        self._rows: list[Prediction] = []  # their measured steps

    def try_each(self, codecs: Sequence[str]) -> None:
        """Before the first step: time these codecs one after another, in place of a prediction.
        codecs: from the most accurate to the least; fp32 goes first."""
        self._tried = (START, *(codec for codec in codecs if codec != START))
        self._stage, self.observer = self._compare, None

    def after_step(self, device: torch.device, finish: Callable[[], None]) -> str | None:
        """The codec to go on with, if it changes now. Called between steps on all ranks, which get
        the same answer. `finish` is called before a decision and waits until nothing is in flight.
        PeerLostError if a rank was lost."""
        if self._stage is None:
            return None
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _WARM_UP and self.observer is not None:
            finish()
            self.observer.forget()
        if self._steps > _WARM_UP:
            self._times.append(now - self._last)
        self._last = now
        if len(self._times) < (_NOTED if self._stage == self._choose else _TIMED):
            return None
        finish()
        codec = self._decide(device)
        self._steps = 0
        self._times.clear()
        return codec

    def settle(self, process_group: dist.ProcessGroup | None, codec: str) -> None:
        """Goes on in another group, and stays with `codec`: what was measured in the old group says
        little about the new one, and its ranks may be in different stages."""
        self._group, self._codec = process_group, codec
        self._stage = self.observer = None

    def _decide(self, device: torch.device) -> str | None:
        before = self._codec
        try:
            self._codec = self._stage(device)
        except Error:
            raise
        except RuntimeError as error:  # torch's own exchanges
            raise PeerLostError(
                f"rank {dist.get_rank(self._group)}: codec='auto' could not agree with the other "
                f"ranks: {error}"
            ) from error
        return None if self._codec == before else self._codec

    # The stages. Each is called at the end of its steps and returns the codec to go on with.

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
        self._stage = None if self._advised == START else self._time
        return START

    def _time(self, _device: torch.device) -> str:
        self._start_s = self._agreed_step()
        self._stage = self._judge
        return self._advised

    def _judge(self, _device: torch.device) -> str:
        self._stage = None
        if self._agreed_step() <= _LOSS * self._start_s:
            return self._advised
        self._losses += 1
        if self._losses < _LOSSES:
            self._stage = self._time
        return START

    def _compare(self, device: torch.device) -> str:
        """After the timed steps of a codec: the next one, or at last the one that stays."""
        codecs = codecs_on(device, self._tried)
        self._rows.append(Prediction(self._codec, self.config.policy, self._agreed_step()))
        if len(self._rows) < len(codecs):
            return codecs[len(self._rows)]
        self._stage = None
        return choose(self._rows, codecs).codec

    def _agreed_step(self) -> float:
        """Seconds: the median of the timed steps, of the slowest rank."""
        return worst_of_ranks([statistics.median(self._times)], self._group)[0]
