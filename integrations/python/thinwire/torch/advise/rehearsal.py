"""Rehearsal: training steps that compute everything and exchange nothing, to see how long each part
of a model computes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire.simulate import Profile
from thinwire.torch.exchange.bucket import Bucket, Submission
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.forecast.notes import Notes
from thinwire.torch.optimizer import DistributedOptimizer

_WARM_UP = 2  # steps that are left out; the first makes the optimizer's state


class _SilentExchange(GradientExchange):
    """Sends nothing and notes its calls. But ranks begin every step together, as a real exchange
    makes them: those that share a machine then want the same part of it at the same time. The clock
    stands while they wait for each other."""

    def __init__(self, process_group: dist.ProcessGroup | None, **options: Any) -> None:
        super().__init__("fp32", process_group, **options)
        self.notes = Notes()
        self._barrier_group = process_group
        self._waited_s = 0.0

    def submit(self, bucket: Bucket, buffer: torch.Tensor) -> Submission:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        self.notes.submitted(bucket.priority, bucket.numel, self._now())
        return Submission(bucket, buffer, None)

    def wait(self, submission: Submission) -> None:
        self.notes.waited_for(submission.bucket.priority, self._now())

    def end_step(self, *, repeats: bool = True) -> None:
        start = time.perf_counter()
        dist.barrier(self._barrier_group)
        self._waited_s += time.perf_counter() - start

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s


class _Rehearsal(DistributedOptimizer):
    def _open_exchange(
        self, _codec: Codec | None, group: dist.ProcessGroup | None, options: Mapping[str, Any]
    ) -> GradientExchange:
        return _SilentExchange(group, purpose="optimizer", **options)

    def _broadcast(self, _group: dist.ProcessGroup) -> None:
        pass

    def profile(self) -> Profile:
        """The profile of all ranks' steps; all ranks call it."""
        return self.exchange.notes.profile(_WARM_UP, self._group)


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
    subject = _Rehearsal(optimizer, model, policy=policy, process_group=process_group)
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
