"""WholeStep: all gradients of a step at once, for training loops that have them all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thinwire import errors
from thinwire.torch import private, tensors
from thinwire.torch.exchange.flat_bucket import FlatBucket, lay_out

if TYPE_CHECKING:
    from thinwire.torch.exchange.gradient_exchange import GradientExchange


class WholeStep:
    """Keeps the buckets of the tensors that it was given last."""

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._buckets: list[FlatBucket] = []

    def reduce(self, exchange: GradientExchange, named: Mapping[str, torch.Tensor]) -> None:
        """As GradientExchange.reduce."""
        tensors.check_named(named, exchange.rank)
        for name, tensor in named.items():
            tensors.check(tensor, exchange.rank, lambda name=name: name)
            tensors.check_writable(tensor, exchange.rank, name)
        self._send_and_wait(exchange, named, list(named.values()))
        with torch.no_grad():
            for tensor, mean in zip(named.values(), self._means(), strict=True):
                tensor.copy_(mean)

    def reduce_gradients(
        self, exchange: GradientExchange, named: Mapping[str, torch.Tensor]
    ) -> None:
        """As GradientExchange.reduce_gradients."""
        tensors.check_named(named, exchange.rank)
        exchange.momentum.check()
        trained = {private.plain_name(name): p for name, p in named.items() if p.requires_grad}
        self._send_and_wait(exchange, trained, [p.grad for p in trained.values()])
        with torch.no_grad():
            for parameter, mean in zip(trained.values(), self._means(), strict=True):
                if parameter.grad is None:
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)
                exchange.momentum.mark(parameter, parameter.grad)

    def _means(self) -> list[torch.Tensor]:
        return [mean for bucket in self._buckets for _, mean in bucket.means()]

    def _send_and_wait(
        self,
        exchange: GradientExchange,
        named: Mapping[str, torch.Tensor],
        values: Sequence[torch.Tensor | None],
    ) -> None:
        if not named:
            return
        self._lay_out(exchange, named)
        left = iter(values)
        try:
            in_flight = [
                bucket.send(exchange, list(itertools.islice(left, len(bucket.names))))
                for bucket in self._buckets
            ]
            exchange.end_step()
            for submission in in_flight:
                exchange.wait(submission)
        except errors.Error as error:  # the peers must not wait for what will not come
            raise errors.again(exchange.fail(error)) from None
        exchange.between_steps(self._buckets[0].tensors[0].device)

    def _lay_out(self, exchange: GradientExchange, named: Mapping[str, torch.Tensor]) -> None:
        layout = [(name, id(t), t.shape, t.dtype, t.device) for name, t in named.items()]
        if layout != self._layout:
            self._buckets = lay_out(FlatBucket, exchange, named.items())
            self._layout = layout
