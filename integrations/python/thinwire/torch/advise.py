"""advise: predicts the best codec, order of chunks and DDP bucket size for this model on this link.

Two rehearsals (steps that exchange nothing) measure how long the model computes, and a probe
measures the link and the codecs. The simulator of schedule/sim then predicts a step for every codec
and policy. codec="auto" uses the same prediction; `thinwire advise` calls main()."""

from __future__ import annotations

import copy
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from thinwire import cli
from thinwire.errors import InvalidArgumentError
from thinwire.simulate import Link, Profile
from thinwire.torch.exchange.bucket import Bucket, InFlight
from thinwire.torch.forecast import (
    ACCURATE,
    CODECS,
    DDP_CAP_MB,
    PLAIN,
    POLICIES,
    TIE,
    Notes,
    Prediction,
    choose,
    choose_cap,
    codecs_on,
    predict,
    predict_caps,
    probe,
)
from thinwire.torch.optimizer.module_compression import OptimizedCompression

__all__ = ["ACCURATE", "CODECS", "POLICIES", "Advice", "Prediction", "advise"]

_WARM_UP = 2  # steps that are not timed; the first one creates the optimizer's state
_HOW = "torchrun --nproc-per-node 2 -m thinwire advise MODULE:FUNCTION"


@dataclass(frozen=True)
class Advice:
    """The result of advise(), equal on all ranks."""

    rows: tuple[Prediction, ...]
    best: Prediction
    compute_s: float  # seconds of a step without any exchange
    link: Link
    caps: dict[int, float]  # seconds of a step under DDP with best.codec, by bucket_cap_mb

    @property
    def bucket_cap_mb(self) -> int:
        """The recommended bucket_cap_mb of DistributedDataParallel with best.codec."""
        return choose_cap(self.caps)

    @property
    def compress(self) -> bool:
        """True if compression is recommended."""
        return self.best.codec != PLAIN[0]

    @property
    def plain(self) -> Prediction:
        """The prediction for DDP without thinwire, or the first row if there is none."""
        for row in self.rows:
            if (row.codec, row.policy) == PLAIN:
                return row
        return self.rows[0]

    def _how_plain(self, gain: float) -> str:
        policy, none = self.best.policy, f"no codec gains {100 * (TIE - 1):.0f} %"
        if policy == PLAIN[1]:
            return f"stay with plain DDP, since {none}"
        return f"policy='{policy}', codec='fp32' is {gain:.2f} x plain {PLAIN[1]}, and {none}"

    def table(self) -> str:
        """Return the predictions and the recommendation as text."""
        policies = list(dict.fromkeys(row.policy for row in self.rows))
        lines = ["predicted ms a step" + "".join(f"{policy:>10}" for policy in policies)]
        times = {(row.codec, row.policy): row.step_s for row in self.rows}
        for codec in dict.fromkeys(row.codec for row in self.rows):
            cells = [f"{1000 * times[codec, policy]:10.1f}" for policy in policies]
            lines.append(f"{codec:<19}" + "".join(cells))
        lines.append(
            f"computing alone: {1000 * self.compute_s:.1f} ms; {self.link.ranks} ranks, "
            f"{8e-9 * self.link.bytes_per_s:.2f} Gb/s, latency {1000 * self.link.latency_s:.2f} ms"
        )
        gain = self.plain.step_s / self.best.step_s
        if not self.compress:
            lines.append(f"do not compress: {self._how_plain(gain)}")
        else:
            lines.append(
                f"recommended: codec='{self.best.codec}', policy='{self.best.policy}', "
                f"{gain:.2f} x plain fp32"
            )
        cap = self.bucket_cap_mb
        lines.append(
            f"under DDP with {self.best.codec}: bucket_cap_mb={cap}, "
            f"{1000 * self.caps[cap]:.1f} ms; DDP's default is {DDP_CAP_MB}, "
            f"{1000 * self.caps[DDP_CAP_MB]:.1f} ms"
        )
        return "\n".join(lines)


def advise(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[], Any],
    *,
    codecs: Sequence[str] = CODECS,
    policies: Sequence[str] = POLICIES,
    allowed: Sequence[str] = ACCURATE,
    steps: int = 8,
    process_group: dist.ProcessGroup | None = None,
    lanes: int | None = None,
    chunk_bytes: int | None = None,
    min_bytes: int | None = None,
) -> Advice:
    """Predict how long a training step takes with each codec and policy. All ranks call it.

    It takes the computing of 2 * (steps + 3) steps, and two or three seconds on the link.

    Args:
        model: not wrapped. It is restored afterwards, including a BatchNorm's running means.
        optimizer: the model's. It is restored afterwards.
        run: makes one forward and backward pass, including its batch.
        codecs: from the most accurate to the least; those that do not run on the model's device are
            left out.
        policies: the orders of chunks to predict.
        allowed: the codecs that may be recommended.
        steps: the number of steps to time in each of two rehearsals.
        process_group: torch's group; None: the default group.
        lanes: as compress() takes it.
        chunk_bytes: as compress() takes it.
        min_bytes: as compress() takes it.

    Returns:
        The predictions and the recommendation.

    Raises:
        InvalidArgumentError: a codec is unknown.
        Error: an exchange failed.
    """
    profiles = {
        policy: rehearse(model, optimizer, run, policy, steps, process_group)
        for policy in ("p3", "wfbp")
    }
    device = next(model.parameters()).device
    measured = probe(codecs_on(device, codecs), device, process_group)
    options = {"lanes": lanes, "chunk_bytes": chunk_bytes, "min_bytes": min_bytes}
    rows = predict(profiles, measured.link, measured.costs, policies, **options)
    best, profile = choose(rows, allowed), profiles["wfbp"]
    caps = predict_caps(profile, measured.link, best.codec, measured.costs[best.codec], **options)
    return Advice(rows, best, profile.compute_s, measured.link, caps)


class _Rehearsal(OptimizedCompression):
    """Sends nothing and notes its calls. Ranks begin every step together, as with a real exchange,
    because ranks on one machine compete for its cores at the same time. The clock does not count
    the time for which they wait for each other."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._notes, self._waited_s = Notes(), 0.0
        super().__init__(*arguments, **options)

    def _share_replica(self) -> None:
        pass

    def submit(
        self, bucket: Bucket, buffer: torch.Tensor, _result: torch.Tensor | None = None
    ) -> InFlight:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        self._notes.submitted(bucket.priority, bucket.numel, self._now())
        return InFlight(bucket, buffer, None)

    def wait(self, submission: InFlight) -> None:
        self._notes.waited_for(submission.bucket.priority, self._now())

    def end_step(self, *, repeats: bool = True) -> None:
        start = time.perf_counter()
        dist.barrier(self._group)
        self._waited_s += time.perf_counter() - start

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s

    def profile(self) -> Profile:
        """Return the profile of all ranks' steps. All ranks call it."""
        if self._notes.steps() <= _WARM_UP:
            raise InvalidArgumentError(
                f"rank {dist.get_rank(self._group)}: run() made no gradients of the model, "
                "expected a forward and a backward pass in each call"
            )
        return self._notes.profile(_WARM_UP, self._group)


def rehearse(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[], Any],
    policy: str,
    steps: int,
    process_group: dist.ProcessGroup | None,
) -> Profile:
    """Return the profile of all ranks' steps under a policy. All ranks call it. Model, optimizer
    and random state are restored afterwards; gradients are set to None."""
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.random.get_rng_state()
    subject = _Rehearsal(model, "fp32", optimizer, policy=policy, process_group=process_group)
    try:
        for _ in range(_WARM_UP + steps + 1):
            optimizer.zero_grad()
            run()
            optimizer.step()
        subject.finish()
        return subject.profile()
    finally:
        subject.close()
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        torch.random.set_rng_state(random)
        optimizer.zero_grad(set_to_none=True)


def _imported(name: str) -> ModuleType:
    """Import a module of the user's. ModuleNotFoundError if it is not there; one that it imports
    itself, and that is not there, is an error of its own."""
    with cli.users(f"the import of {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            absent = error
    raise absent


def _import(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    if not module or not function or "/" in module or module.endswith(".py") or module[0] == ".":
        guess = f"{Path(module).stem or 'MODULE'}:{function or 'FUNCTION'}"
        raise InvalidArgumentError(
            f"{name!r} names no function of a module, expected MODULE:FUNCTION, as in `{_HOW}`; "
            f"did you mean {guess}, in the module's folder?"
        )
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(_imported(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{name!r} is not there ({error}); expected MODULE:FUNCTION, as in `{_HOW}`"
        ) from error
    if not callable(found):
        raise InvalidArgumentError(f"{name!r} is {found!r}, expected a function")
    return found


def _check_made(make: str, made: object) -> None:
    if isinstance(made, tuple) and len(made) == 3:
        model, optimizer, run = made
        is_model = isinstance(model, torch.nn.Module) and any(True for _ in model.parameters())
        if is_model and isinstance(optimizer, torch.optim.Optimizer) and callable(run):
            return
    raise InvalidArgumentError(
        f"{make}() returned {made!r}, expected (model, optimizer, run): a torch.nn.Module with "
        "parameters, one of torch.optim, and a function run()"
    )


def main(make: str, codecs: Sequence[str] | None) -> int:
    """Run `thinwire advise` on every rank; rank 0 prints the table."""
    if "RANK" not in os.environ:
        raise InvalidArgumentError(f"there are no ranks to measure between; start it with `{_HOW}`")
    function = _import(make)
    with cli.users(f"{make}()"):
        made = function()
    _check_made(make, made)
    model, optimizer, run = made

    def run_theirs() -> None:
        with cli.users(f"run() of {make}"):
            run()

    cuda = next(model.parameters()).is_cuda
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    chosen = tuple(codecs) if codecs else CODECS
    allowed = chosen if codecs else ACCURATE
    try:
        advice = advise(model, optimizer, run_theirs, codecs=chosen, allowed=allowed)
        if dist.get_rank() == 0:
            print(advice.table())
        return 0
    finally:
        dist.destroy_process_group()
