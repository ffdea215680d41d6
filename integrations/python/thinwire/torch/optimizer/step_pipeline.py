"""StepPipeline: reduces gradients to means and makes the optimizer's step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.torch import private
from thinwire.torch.exchange.bucket import Bucket, FlatBucket, InFlight
from thinwire.torch.exchange.gradient_exchange import GradientExchange

Groups = list[dict[str, Any]]  # param groups, with the hyperparameters of one step


class Phase(Enum):
    """The phases of a bucket; it goes through all of them once per step."""

    IDLE = "its gradients are being made"
    IN_FLIGHT = "it is being reduced"
    REDUCED = "its parameters' gradients are the mean"


class GradientBucket(FlatBucket):
    """Parameters whose gradients are reduced together."""

    def __init__(self, bucket: Bucket, held: Sequence[torch.Tensor]) -> None:
        super().__init__(bucket, held)
        self.phase = Phase.IDLE
        self.made = 0  # steps that the optimizer has made or skipped
        self._ready: set[torch.Tensor] = set()
        self._versions: dict[torch.Tensor, int] = {}
        self._submission: InFlight | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.tensors

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether this gradient has been made since the last step."""
        return parameter in self._ready

    def ready(self, parameter: torch.Tensor) -> bool:
        """Note that this gradient is made. Return whether all gradients of the bucket are."""
        self._ready.add(parameter)
        return len(self._ready) == len(self.parameters)

    def dropped(self) -> str | None:
        """Return the name of a parameter whose gradient was made and is not there any more."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter in self._ready and parameter.grad is None:
                return name
        return None

    def submit(self, exchange: GradientExchange) -> None:
        """Start the reduction of the gradients as they are now."""
        gradients = [parameter.grad for parameter in self.parameters]
        buffer = self.fill(gradients, exchange.rank, exchange.momentum.weight_decay_of)
        self._submission = exchange.submit(self.bucket, buffer)
        self._versions = {
            parameter: private.version_of(gradient)
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
            if gradient is not None
        }
        self.phase = Phase.IN_FLIGHT

    def check_untouched(self) -> None:
        """InvalidArgumentError if gradients were changed after they had been sent."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            version = self._versions.get(parameter)
            grad = parameter.grad
            if version is not None and grad is not None and private.version_of(grad) != version:
                raise errors.InvalidArgumentError(
                    f"the gradient of '{name}' was changed between backward() and step(), when it "
                    "had been sent already; call synchronize() of what compress() returned before "
                    "clipping or unscaling, or clip by its clip_grad_norm_()"
                )

    def restart(self, made: int) -> None:
        """Discard the present step, which failed; `made` steps were made."""
        self.made, self.phase, self._submission = made, Phase.IDLE, None
        self._ready.clear()
        self._versions.clear()

    def wait(self, exchange: GradientExchange) -> None:
        """Return when means() are ready; raise the typed error of a failure."""
        if self.phase is Phase.IN_FLIGHT:
            exchange.wait(self._submission)
            self._submission = None
            self._ready.clear()
            self._versions.clear()
            self.phase = Phase.REDUCED


class StepPipeline:
    """Sends buckets, waits for their means, and steps their parameters: all of them, or each bucket
    when its parameters are needed (a deferred step)."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        exchange: GradientExchange,
        find_unused: bool,
        own_step: Callable[[], Any] | None = None,
    ) -> None:
        """optimizer: None if the pipeline makes no steps. own_step: the optimizer's original step()
        if it has been replaced."""
        self._own_step = own_step
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[torch.Tensor, GradientBucket] = {}
        self._optimizer, self._exchange = optimizer, exchange
        self._find_unused = find_unused
        self._deferred: dict[GradientBucket, Groups] = {}  # steps that are due
        self._used_bucket: Bucket | None = None
        self._used: InFlight | None = None  # the exchange of which parameters have a gradient
        self._unused: set[torch.Tensor] = set()  # parameters that have no gradient on any rank

    def take(self, buckets: list[GradientBucket]) -> None:
        """Use these buckets from the next step on."""
        self.buckets = buckets
        for bucket in buckets:
            bucket.made = self._exchange.steps
        self.bucket_of = {parameter: b for b in buckets for parameter in b.parameters}
        # This is a sum and no gradient, so it has no parts. It is sent before the gradients.
        self._used_bucket = Bucket(
            "used parameters", len(self.bucket_of), "float32", op="sum", priority=-1
        )

    @property
    def synchronized(self) -> bool:
        """Return whether .grad of all parameters is the mean of all ranks."""
        return all(bucket.phase is Phase.REDUCED for bucket in self.buckets)

    @property
    def device(self) -> torch.device:
        return self.buckets[0].parameters[0].device

    def groups(self) -> Groups:
        """Return the param groups with their present hyperparameters and trained parameters.
        Freezing or unfreezing a parameter later does not change a deferred step."""
        return [
            {**group, "params": [p for p in group["params"] if p.requires_grad]}
            for group in self._optimizer.param_groups
        ]

    def is_due(self, bucket: GradientBucket | None) -> bool:
        """Return whether the bucket's last step is still due. A forward pass that waits for its
        parameters would have made it."""
        return bucket in self._deferred

    def begin(self, bucket: GradientBucket) -> None:
        """Prepare the bucket for new gradients."""
        if bucket.phase is Phase.REDUCED:
            bucket.phase = Phase.IDLE  # its step was skipped, for example by a loss scaler
            bucket.made += 1

    def send(self, bucket: GradientBucket) -> None:
        """Submit the bucket. If that fails, fail all ranks with the reason, because this rank
        cannot finish the step that the others are in."""
        try:
            bucket.submit(self._exchange)
        except errors.Error as error:
            raise errors.again(self._exchange.fail(error)) from None

    def flush(self) -> None:
        """End the submissions of a step: send incomplete buckets, with zeros for the gradients that
        this rank has not made, so that no rank waits for them."""
        if self._find_unused:
            used = torch.tensor(
                [p.grad is not None for p in self.bucket_of],
                dtype=torch.float32,
                device=self.device,
            )
            self._used = self._exchange.submit(self._used_bucket, used)
        for bucket in self.buckets:
            if bucket.phase is Phase.IDLE:
                self.send(bucket)
        self._exchange.end_step()

    def send_rest(self) -> None:
        """flush() at the end of a step that sent gradients in backward(). InvalidArgumentError if
        one of them was changed afterwards."""
        self.flush()
        for bucket in self.buckets:
            bucket.check_untouched()

    def learn_unused(self) -> None:
        """Find out which parameters have no gradient on any rank. Call it once per step."""
        if self._used is None:
            return
        used, self._used = self._used, None
        self._exchange.wait(used)
        counts = zip(self.bucket_of, used.tensor.tolist(), strict=True)
        self._unused = {parameter for parameter, count in counts if count == 0}

    def defer(self) -> None:
        """Make every bucket's step due, with the present hyperparameters."""
        self._deferred = dict.fromkeys(self.buckets, self.groups())

    def deferred(self) -> list[GradientBucket]:
        """Return the buckets whose step is due."""
        return list(self._deferred)

    def apply(self, bucket: GradientBucket) -> None:
        """Wait for the bucket's means and make its step, if one is due."""
        groups = self._deferred.get(bucket)
        if groups is None:
            return
        with private.outside_transforms():  # the forward pass may be one of torch.func.grad
            bucket.wait(self._exchange)
            del self._deferred[bucket]
            self.learn_unused()
            self.step_bucket(bucket, dict(bucket.means()), groups)
        bucket.phase = Phase.IDLE

    def step_bucket(
        self, bucket: GradientBucket, means: dict[torch.Tensor, torch.Tensor], groups: Groups
    ) -> None:
        """Step the bucket's parameters with these means; .grad stays unchanged."""
        kept = {p: p.grad for p in bucket.parameters}
        inside = {p for p in bucket.parameters if p not in self._unused}
        for parameter, mean in means.items():
            parameter.grad = mean.to(parameter.dtype) if parameter in inside else None
        try:
            with torch.inference_mode(False):  # the forward pass may be in inference mode
                _step_partly(self._optimizer, self._step, inside, groups)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        bucket.made += 1

    def take_means(self) -> None:
        """Wait for all means and write them into .grad."""
        for bucket in self.buckets:
            bucket.wait(self._exchange)
        self.learn_unused()
        with torch.no_grad():
            for bucket in self.buckets:
                for parameter, mean in bucket.means():
                    if parameter in self._unused or not parameter.requires_grad:
                        parameter.grad = None
                    elif parameter.grad is None:
                        parameter.grad = mean.clone()
                    else:
                        parameter.grad.copy_(mean)

    def step(self) -> None:
        """Make the wrapped optimizer's step with the present gradients."""
        self._step()
        for bucket in self.buckets:
            bucket.phase = Phase.IDLE
            bucket.made += 1

    def _step(self) -> None:
        (self._own_step or self._optimizer.step)()

    def made(self) -> dict[str, int]:
        """Return the number of steps of each parameter."""
        return {name: bucket.made for bucket in self.buckets for name in bucket.names}

    def restart(self, steps: int) -> None:
        """Discard the present step; the exchange continues at `steps`."""
        self._deferred.clear()
        self._used = None
        for bucket in self.buckets:
            bucket.restart(steps)


def _step_partly(
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Any],
    parameters: set[torch.Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """Step only these parameters, with `step` and the hyperparameters of `groups`.

    InvalidArgumentError for an optimizer that keeps state for a whole param group, because that
    couples its parameters."""
    chosen = []
    for group in groups:
        mine = [p for p in group["params"] if p in parameters]
        if mine:
            chosen.append({**group, "params": mine})
    before = [{**group} for group in chosen]
    everything = optimizer.param_groups
    optimizer.param_groups = chosen
    try:
        step()
    finally:
        optimizer.param_groups = everything
    for group, was in zip(chosen, before, strict=True):
        for key, value in was.items():
            if key != "params" and group[key] is not value:
                raise errors.InvalidArgumentError(
                    f"{type(optimizer).__name__} keeps '{key}' for a whole param group, "
                    "which couples parameters; use policy='wfbp'"
                )
