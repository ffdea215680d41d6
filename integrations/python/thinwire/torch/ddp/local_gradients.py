"""LocalGradients: preparation of each rank's own gradients before they are exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.gradient_exchange import GradientExchange


@dataclass(frozen=True)
class LocalGradients:
    """clip_value: gradients are clipped to [-clip_value, clip_value]. clip_norm: each parameter's
    gradient is scaled to a norm of at most clip_norm / sqrt(ranks) (DGC, arXiv 1712.01887, section
    3.2). None: not at all.

    InvalidArgumentError for a limit that is not above 0."""

    clip_value: float | None
    clip_norm: float | None

    def __post_init__(self) -> None:
        for key, limit in {"clip_value": self.clip_value, "clip_norm": self.clip_norm}.items():
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if limit is not None and not (number and limit > 0):
                raise InvalidArgumentError(f"{key} is {limit!r}, expected a number above 0")

    def prepare(
        self, bucket: dist.GradBucket, exchange: GradientExchange
    ) -> Callable[[], None] | None:
        """Clips the gradients of DDP's bucket in place and, if the exchange owns the momentum, adds
        weight decay, as the optimizer would have done. Returns what is to be called when the bucket
        holds the result, if anything."""
        self._clip(bucket, exchange.world_size)
        momentum = exchange.momentum
        momentum.check()
        if not momentum.paired:
            return None
        parts = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        with torch.no_grad():
            for parameter, gradient in parts:
                if decay := momentum.weight_decay_of(parameter):
                    gradient.add_(parameter.detach().view_as(gradient), alpha=decay)

        def finish() -> None:
            for parameter, gradient in parts:
                momentum.mark(parameter, gradient)

        return finish

    def _clip(self, bucket: dist.GradBucket, ranks: int) -> None:
        if self.clip_value is not None:
            bucket.buffer().clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            limit = self.clip_norm / math.sqrt(ranks)
            for gradient in bucket.gradients():
                norm = gradient.norm()
                gradient.mul_(torch.where(norm > limit, limit / norm, 1.0))
