"""StepPipeline: from gradients over means to the optimizer's step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.torch.exchange.bucket import Bucket, Submission
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.optimizer.gradient_bucket import GradientBucket, Phase
from thinwire.torch.optimizer.partial_step import step_partly

Groups = list[dict[str, Any]]  # param groups, with the hyperparameters of one step


class StepPipeline:
    """Sends buckets, waits for their means, and steps their parameters: all at once, or each bucket
    when its parameters are needed (a deferred step)."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        exchange: GradientExchange,
        find_unused: bool,
        own_step: Callable[[], Any] | None = None,
    ) -> None:
        """optimizer: None where nothing steps. own_step: the optimizer's, where its step() has been
        replaced."""
        self._own_step = own_step
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[torch.Tensor, GradientBucket] = {}
        self._optimizer, self._exchange = optimizer, exchange
        self._find_unused = find_unused
        self._deferred: dict[GradientBucket, Groups] = {}  # steps that were asked for
        self._used_bucket: Bucket | None = None
        self._used: Submission | None = None  # in flight: which parameters have a gradient
        self._unused: set[torch.Tensor] = set()  # parameters without a gradient on every rank

    def take(self, buckets: list[GradientBucket]) -> None:
        """Uses these buckets from the next step on."""
        self.buckets = buckets
        self.bucket_of = {parameter: b for b in buckets for parameter in b.parameters}
        # A sum, and no mean of gradients: it has no parts, and goes before them.
        self._used_bucket = Bucket(
            "used parameters", len(self.bucket_of), "float32", op="sum", priority=-1
        )

    @property
    def synchronized(self) -> bool:
        """Whether .grad is the mean of all ranks, for all parameters."""
        return all(bucket.phase is Phase.REDUCED for bucket in self.buckets)

    @property
    def device(self) -> torch.device:
        return self.buckets[0].parameters[0].device

    def groups(self) -> Groups:
        """The param groups with their hyperparameters of this moment."""
        return [{**group} for group in self._optimizer.param_groups]

    def begin(self, bucket: GradientBucket) -> None:
        """Before new gradients of the bucket are sent."""
        if bucket in self._deferred:
            self.apply(bucket)  # no forward pass has applied it since the last step
        elif bucket.phase is Phase.REDUCED:
            bucket.phase = Phase.IDLE  # its step was left out, as a loss scaler does
            bucket.made += 1

    def send(self, bucket: GradientBucket) -> None:
        """Submits the bucket. If that fails, all ranks are told why, since this one can't finish
        the step that others are in."""
        try:
            bucket.submit(self._exchange)
        except errors.Error as error:
            raise errors.again(self._exchange.fail(error)) from None

    def flush(self) -> None:
        """Ends the submissions of a step: buckets that are not complete go now, with zeros for the
        gradients that this rank has not made, so that no rank waits for them."""
        if self._find_unused:
            used = torch.tensor([float(p.grad is not None) for p in self.bucket_of])
            self._used = self._exchange.submit(self._used_bucket, used.to(self.device))
        for bucket in self.buckets:
            if bucket.phase is Phase.IDLE:
                self.send(bucket)
        self._exchange.end_step()

    def send_rest(self) -> None:
        """flush() at the end of a step that sent its gradients in backward: InvalidArgumentError if
        one of them was changed since."""
        self.flush()
        for bucket in self.buckets:
            bucket.check_untouched()

    def learn_unused(self) -> None:
        """Once a step: learns which parameters have no gradient on any rank."""
        if self._used is None:
            return
        used, self._used = self._used, None
        self._exchange.wait(used)
        counts = zip(self.bucket_of, used.buffer.tolist(), strict=True)
        self._unused = {parameter for parameter, count in counts if count == 0}

    def defer(self) -> None:
        """Every bucket's step is due from here on, with the hyperparameters of this moment."""
        self._deferred = dict.fromkeys(self.buckets, self.groups())

    def deferred(self) -> list[GradientBucket]:
        """The buckets whose step is due."""
        return list(self._deferred)

    def apply(self, bucket: GradientBucket) -> None:
        """Waits for the bucket's means and makes its step, if one is due."""
        groups = self._deferred.get(bucket)
        if groups is None:
            return
        bucket.wait(self._exchange)
        del self._deferred[bucket]
        self.learn_unused()
        self.step_bucket(bucket, dict(bucket.means()), groups)
        bucket.phase = Phase.IDLE

    def step_bucket(
        self, bucket: GradientBucket, means: dict[torch.Tensor, torch.Tensor], groups: Groups
    ) -> None:
        """The step of the bucket's parameters with these means; gradients stay as they are."""
        kept = {p: p.grad for p in bucket.parameters}
        inside = {p for p in bucket.parameters if p.requires_grad and p not in self._unused}
        for parameter, mean in means.items():
            parameter.grad = mean if parameter in inside else None
        try:
            with torch.inference_mode(False):  # the forward pass that needs them may be in it
                step_partly(self._optimizer, self._step, inside, groups)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        bucket.made += 1

    def take_means(self) -> None:
        """Waits for all means and writes them into .grad."""
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
        """The wrapped optimizer's step with the gradients as they are."""
        self._step()
        for bucket in self.buckets:
            bucket.phase = Phase.IDLE
            bucket.made += 1

    def _step(self) -> None:
        (self._own_step or self._optimizer.step)()

    def made(self) -> dict[str, int]:
        """The steps that each parameter has taken."""
        return {name: bucket.made for bucket in self.buckets for name in bucket.names}

    def restart(self, steps: int) -> None:
        """Forgets the step under way; the exchange goes on at `steps`."""
        self._deferred.clear()
        self._used = None
        for bucket in self.buckets:
            bucket.restart(steps)
