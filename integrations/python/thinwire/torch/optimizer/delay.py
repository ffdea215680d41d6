"""One-step delay: a step's mean gradient is in flight while the next step computes with weights
that this rank has updated with its own gradient.

Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training", arXiv
2005.06728, sections 3 and 4: the means update global weights W, W(t) = optimizer(W(t-1), the mean
gradient of step t-1); each rank computes step t+1 with local weights, W(t) updated with its own
gradient of step t. The first steps, the warm-up, wait for the mean as usual.

The paper updates local weights by lr * gradient. With momentum 0.9 that is only a tenth of the
coming step, so gradients are computed at weights that lag by nine tenths of a step, which loses
accuracy. Here the local step is the optimizer's, including weight decay, momentum, dampening and
Nesterov. So ranks with equal gradients train exactly as without a delay."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from thinwire import errors
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.optimizer.step_pipeline import GradientBucket, Groups, Phase, StepPipeline


class OneStepDelay:
    """The global weights and late means of compress(..., delay=1)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warm_up_steps: int,
        exchange: GradientExchange,
        pipeline: StepPipeline,
    ) -> None:
        """Raise InvalidArgumentError unless the optimizer is an SGD."""
        if not isinstance(optimizer, torch.optim.SGD):
            raise errors.InvalidArgumentError(
                f"delay=1 got {type(optimizer).__name__}, expected torch.optim.SGD, whose "
                "step each rank takes with its own gradient in between; or leave delay=0"
            )
        self._optimizer = optimizer
        self._warm_up_steps = warm_up_steps
        self._exchange, self._pipeline = exchange, pipeline
        self._global: dict[torch.Tensor, torch.Tensor] = {}  # W, while parameters are local
        self._groups: dict[GradientBucket, Groups] = {}  # of the step whose mean W does not have
        # Means that came before they could be applied to W.
        self._means: dict[GradientBucket, dict[torch.Tensor, torch.Tensor]] = {}

    def begun(self) -> bool:
        """Return whether the present step is delayed, and not one of the warm-up."""
        return self._exchange.steps >= self._warm_up_steps

    def make_room(self, bucket: GradientBucket) -> None:
        """Save the bucket's last mean before the bucket is submitted again."""
        if bucket in self._groups and bucket not in self._means:
            bucket.wait(self._exchange)
            self._means[bucket] = {p: mean.clone() for p, mean in bucket.means()}
            bucket.phase = Phase.IDLE

    def step(self) -> None:
        """After backward(): send the remaining buckets, and make the local step."""
        pipeline = self._pipeline
        for bucket in pipeline.deferred():  # the last step of the warm-up
            pipeline.apply(bucket)
        for bucket in pipeline.buckets:
            self.make_room(bucket)
        pipeline.learn_unused()
        pipeline.send_rest()
        groups = pipeline.groups()
        for bucket in pipeline.buckets:
            self._catch_up(bucket)
            self._groups[bucket] = groups
        with torch.no_grad():
            for group in groups:
                for parameter in group["params"]:
                    self._step_locally(parameter, group)

    def finish(self) -> None:
        """Wait for the means in flight and set the parameters to W, which is equal on all ranks."""
        for bucket in self._pipeline.buckets:
            self.make_room(bucket)
            self._catch_up(bucket)
        self._global.clear()

    def give_up(self) -> None:
        """After a failure: set the parameters to W, with the means that came back."""
        for bucket in self._pipeline.buckets:
            with contextlib.suppress(errors.Error):
                self.make_room(bucket)
            if bucket in self._means:
                self._catch_up(bucket)
            else:
                self._be_global(bucket)
        self._groups.clear()
        self._global.clear()

    def _be_global(self, bucket: GradientBucket) -> None:
        with torch.no_grad():
            for parameter in bucket.parameters:
                if parameter in self._global:
                    parameter.copy_(self._global[parameter])

    def _catch_up(self, bucket: GradientBucket) -> None:
        """Set the bucket's parameters to W, updated with the bucket's last mean."""
        groups = self._groups.pop(bucket, None)
        if groups is None:
            return
        self._be_global(bucket)
        self._pipeline.step_bucket(bucket, self._means.pop(bucket), groups)

    def _step_locally(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None or not parameter.requires_grad:
            self._global.pop(parameter, None)
            return
        kept = self._global.get(parameter)
        self._global[parameter] = parameter.clone() if kept is None else kept.copy_(parameter)
        # The step of torch.optim.SGD. Its momentum buffer stays unchanged until the mean comes.
        step = -parameter.grad if group["maximize"] else parameter.grad
        if group["weight_decay"]:
            step = step.add(parameter, alpha=group["weight_decay"])
        if momentum := group["momentum"]:
            buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is None:
                velocity = step
            else:
                velocity = (buffer * momentum).add_(step, alpha=1 - group["dampening"])
            step = step.add(velocity, alpha=momentum) if group["nesterov"] else velocity
        parameter.add_(step, alpha=-float(group["lr"]))
