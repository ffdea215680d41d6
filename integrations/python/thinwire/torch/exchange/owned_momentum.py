"""OwnedMomentum: the part of a GradientExchange that owns an optimizer's momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_call, check_kind
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.momentum import Pairing, take_over


class OwnedMomentum:
    """No-op unless the exchange was created with momentum > 0, but for take(), which raises."""

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._pairing: Pairing | None = None

    @property
    def paired(self) -> bool:
        """Whether an optimizer's momentum belongs to the exchange."""
        return self._pairing is not None

    def pair(self, pairing: Pairing) -> None:
        """For optimizers that hand over finished momentum buffers themselves (1-bit Adam)."""
        self._pairing = pairing

    def take(
        self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str | None]
    ) -> dict[str, torch.Tensor]:
        """Moves momentum and weight decay out of an optimizer's param groups that still have them;
        returns the momentum buffers that it had, by name. See GradientExchange.take_momentum."""
        check_kind("optimizer", optimizer, Optimizer, "one of torch.optim")
        check_call("name_of", name_of)
        if not self._momentum:
            raise InvalidArgumentError("this state owns no momentum; make it with momentum=0.9")
        pairing, buffers = take_over(optimizer, self._momentum, self._nesterov)
        self._pairing = self._pairing or pairing
        named = {name_of(parameter): buffer for parameter, buffer in buffers.items()}
        return {name: buffer for name, buffer in named.items() if name is not None}

    def weight_decay_of(self, parameter: torch.Tensor) -> float:
        """The fraction of the parameter that is added to its gradient before a submission."""
        return 0.0 if self._pairing is None else self._pairing.weight_decay_of(parameter)

    def check(self) -> None:
        """Before gradients are submitted: InvalidArgumentError if the exchange owns the momentum
        and no optimizer is paired, or if the optimizer has momentum or weight decay again."""
        if self._pairing is not None:
            self._pairing.check()
        elif self._momentum:
            raise InvalidArgumentError(
                f"State(momentum={self._momentum}) is not paired with an optimizer; call "
                "state.take_momentum(optimizer) before the first backward, or pass optimizer= to "
                "compress()"
            )

    def mark(self, parameter: torch.Tensor, result: torch.Tensor) -> None:
        """After a wait: the optimizer's next step raises if the result was changed in between."""
        if self._pairing is not None:
            self._pairing.mark(parameter, result)
