"""codec="auto": the first steps are measured uncompressed, then the codec that advise would
recommend is tried, and kept unless it turns out slower.

What is predicted may be wrong, and compression must not cost time. So steps before and after the
choice are timed, and where it made them more than 3 % slower, fp32 comes back."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.config import Config
from thinwire.errors import Error, PeerLostError
from thinwire.torch.agree import from_rank_0, worst_of_ranks
from thinwire.torch.forecast.choice import ACCURATE, choose, predict
from thinwire.torch.forecast.probe import probe
from thinwire.torch.session import Session
from thinwire.torch.watched import Watched

AUTO = "auto"
START = ACCURATE[0]
_WARM_UP = 3  # steps that are not looked at: connecting, the optimizer's state, DDP's new buckets
_NOTED = 12  # steps whose computing is looked at
_TIMED = 12  # steps that are timed, of either codec
_LOSS = 1.03  # of time, that is let pass


class AutoCodec:
    """Chooses for one user of a process group, whose settings have codec="auto"."""

    def __init__(
        self,
        settings: Config,
        process_group: dist.ProcessGroup | None,
        watch: Callable[[Session], Watched],
    ) -> None:
        """watch: makes what the user is to use as its first session."""
        self.settings = dataclasses.replace(settings, codec=START)
        self._group = process_group
        self._watch = watch
        self._watched: Watched | None = None
        self._steps = 0
        self._last = 0.0
        self._times: list[float] = []
        self._start_s = 0.0
        self._codec = self._advised = START
        self._stage: Callable[[torch.device], str] | None = self._choose  # None: it is settled

    def watch(self, session: Session) -> Session | Watched:
        """What the user is to use as its session."""
        if self._watched is None:
            self._watched = self._watch(session)
            return self._watched
        return session

    def after_step(self, device: torch.device, finish: Callable[[], None]) -> str | None:
        """Between steps, on all ranks, which get the same answer: the codec to go on with, if it
        changes now. Then nothing is in flight, by `finish`. PeerLostError if a rank went."""
        if self._stage is None:
            return None
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _WARM_UP and self._watched.notes is not None:
            finish()
            self._watched.start_over()
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

    # The stages, each at the end of its steps.

    def _choose(self, device: torch.device) -> str:
        profile = self._watched.notes.profile(1, self._group)
        self._watched.notes = None
        policy, measured = self.settings.policy, probe(ACCURATE, device, self._group)
        rows = predict(
            {policy: profile}, measured.link, measured.costs, [policy], lanes=self.settings.lanes,
            chunk_bytes=self.settings.chunk_bytes, min_bytes=self.settings.min_bytes,
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
        return START if self._agreed_step() > _LOSS * self._start_s else self._advised

    def _agreed_step(self) -> float:
        """The median of the timed steps, of the slowest rank."""
        return worst_of_ranks([statistics.median(self._times)], self._group)[0]
