"""GradientBucket: parameters whose gradients DistributedOptimizer reduces together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from thinwire.errors import InvalidArgumentError
from thinwire.torch import private
from thinwire.torch.exchange.bucket import Submission
from thinwire.torch.exchange.flat_bucket import FlatBucket
from thinwire.torch.exchange.gradient_exchange import GradientExchange


class Phase(Enum):
    """A bucket goes through all of them once a step."""

    IDLE = "its gradients are being made"
    IN_FLIGHT = "it is being reduced"
    REDUCED = "its parameters' gradients are the mean"


class GradientBucket(FlatBucket):
    def __init__(
        self,
        exchange: GradientExchange,
        number: int,
        named: Sequence[tuple[str, torch.Tensor]],
        op: str = "mean",
    ) -> None:
        super().__init__(exchange, number, named, op)
        self.phase = Phase.IDLE
        self.made = exchange.steps  # those that the optimizer has taken, or left out
        self._ready: set[torch.Tensor] = set()
        self._versions: dict[torch.Tensor, int] = {}
        self._submission: Submission | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.tensors

    def ready(self, parameter: torch.Tensor) -> bool:
        """Notes that this gradient is made. Returns whether all of the bucket are."""
        self._ready.add(parameter)
        return len(self._ready) == len(self.parameters)

    def submit(self, exchange: GradientExchange) -> None:
        """Starts the reduction of the gradients as they are now."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._submission = self.send(exchange, gradients)
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
                raise InvalidArgumentError(
                    f"the gradient of '{name}' was changed between backward() and step(), when it "
                    "had been sent already; call optimizer.synchronize() before clipping or "
                    "unscaling, or use optimizer.clip_grad_norm_()"
                )

    def restart(self, made: int) -> None:
        """Forgets the step under way, which failed; `made` steps were made."""
        self.made, self.phase, self._submission = made, Phase.IDLE, None
        self._ready.clear()
        self._versions.clear()

    def wait(self, exchange: GradientExchange) -> None:
        """Returns when means() are there; raises the typed error of a failure."""
        if self.phase is Phase.IN_FLIGHT:
            exchange.wait(self._submission)
            self._submission = None
            self._ready.clear()
            self._versions.clear()
            self.phase = Phase.REDUCED
