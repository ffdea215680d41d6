"""WarmUp: the steps before OneBitAdam's variance is frozen, whose gradients go in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.ddp.layout import Layout
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.momentum import Pairing

if TYPE_CHECKING:
    from thinwire.torch.ddp.onebit_adam import OneBitAdam


class WarmUp:
    """Has an exchange of its own, since the momentum's exchange would keep what it is given."""

    def __init__(
        self,
        exchange: GradientExchange,
        process_group: dist.ProcessGroup | None,
        options: Mapping[str, Any],
        optimizer: OneBitAdam,
        beta: float,
        steps: int,
    ) -> None:
        """exchange: the momentum's. options: those that it was made with. beta: of the optimizer's
        momentum. InvalidArgumentError if the exchange does not go with the optimizer."""
        momentum = exchange.config.momentum
        if momentum != beta:
            raise InvalidArgumentError(
                f"the state's momentum is {momentum}, expected betas[0] = {beta}; make it with "
                f"State(..., momentum={beta})"
            )
        if exchange.automatic:
            raise InvalidArgumentError(
                "OneBitAdam got a state with codec='auto', expected a codec that is chosen; take "
                "State(codec='onebit', ...)"
            )
        self.steps = steps
        self.exchange = GradientExchange("fp32", process_group, purpose="warmup", **options)
        self._optimizer = optimizer
        exchange.momentum.pair(Pairing(optimizer, beta, ()))

    def exchange_now(self, after: GradientExchange, layout: Layout) -> GradientExchange:
        """The exchange for the present bucket. After the warm-up the momentum that the optimizer
        has made goes on in `after`."""
        if after.steps < self.steps:
            return self.exchange
        if after.steps == self.steps and layout.step.number == 0:
            found = {p: self._optimizer.momentum_of(p) for p in layout.parameters()}
            after.load_momentum({layout.name_of(p): m for p, m in found.items() if m is not None})
        return after
