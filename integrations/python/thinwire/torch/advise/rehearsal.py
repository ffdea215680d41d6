"""Rehearsal: training steps that compute everything and exchange nothing, to see how long each part
of a model computes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.config import Config
from thinwire.simulate import Profile
from thinwire.torch.distributed_optimizer import DistributedOptimizer
from thinwire.torch.forecast.notes import Notes
from thinwire.torch.group import Group
from thinwire.torch.settled import Settled

_WARM_UP = 2  # steps; the first makes the optimizer's state


class _Silence:
    """Stands for a Session: nothing is sent, and its calls are noted. But ranks begin every step
    together, as the exchange makes them: those that share a machine then want the same part of it
    at the same time. The clock stands while they wait for each other."""

    def __init__(self, group: Group, config: Config, process_group: dist.ProcessGroup) -> None:
        self.group, self.config = group, config
        self.communicator = None
        self.notes = Notes()
        self._process_group = process_group
        self._waited_s = 0.0

    def submit(self, tensor, _dtype, _op, _name, _segments=None, priority: int = 0) -> int:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        self.notes.submitted(priority, tensor.numel(), self._now())
        return priority

    def complete(self, work: int) -> None:
        self.notes.waited_for(work, self._now())

    def end_step(self) -> None:
        start = time.perf_counter()
        dist.barrier(self._process_group)
        self._waited_s += time.perf_counter() - start

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s

    def close(self) -> None:
        pass


class _Rehearsal(DistributedOptimizer):
    def _open_session(self, group: Group, settled: Settled) -> Any:
        return _Silence(group, settled.settings, self._group)

    def _broadcast(self, _group: dist.ProcessGroup) -> None:
        pass

    def profile(self) -> Profile:
        return self._session.notes.profile(_WARM_UP, self._group)


def rehearse(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[], Any],
    policy: str,
    steps: int,
    process_group: dist.ProcessGroup | None,
) -> Profile:
    """The profile of all ranks' steps under a policy; all ranks call it. Model, optimizer and
    random numbers are afterwards as they were; gradients are gone."""
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.random.get_rng_state()
    subject = _Rehearsal(optimizer, model, codec="fp32", policy=policy, process_group=process_group)
    try:
        for _ in range(_WARM_UP + steps + 1):
            subject.zero_grad()
            run()
            subject.step()
        subject.finish()
        return subject.profile()
    finally:
        subject.close()
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        torch.random.set_rng_state(random)
        optimizer.zero_grad(set_to_none=True)
