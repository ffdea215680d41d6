"""FlatBucket: a bucket with a buffer of its own, into which tensors are copied, so that the
tensors stay the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from thinwire.torch import tensors
from thinwire.torch.exchange.bucket import Submission

if TYPE_CHECKING:
    from thinwire.torch.exchange.gradient_exchange import GradientExchange

MERGE_BYTES = 1 << 20  # a bucket of at least this takes no more large tensors
_SMALL = MERGE_BYTES // 8  # a tensor below this joins its neighbour in any case

Named = tuple[str, torch.Tensor]
_Flat = TypeVar("_Flat", bound="FlatBucket")


class FlatBucket:
    """Tensors that are reduced together: a large one, or several small neighbours."""

    def __init__(
        self, exchange: GradientExchange, number: int, named: Sequence[Named], op: str = "mean"
    ) -> None:
        """number: in forward order, which is the bucket's priority. named: all of one dtype and
        device. op: "mean" or "sum"."""
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        first, numels = self.tensors[0], [tensor.numel() for tensor in self.tensors]
        parts = list(zip(self.names, numels, strict=True))
        self._bucket = exchange.bucket(
            self.names[0], parts, first.dtype, priority=number, op=op,
            shape=tensors.shape_of(self.tensors),
        )  # fmt: skip
        self._buffer = torch.zeros(sum(numels), dtype=first.dtype, device=first.device)
        self._views = [
            part.view(tensor.shape)
            for part, tensor in zip(self._buffer.split(numels), self.tensors, strict=True)
        ]

    def send(self, exchange: GradientExchange, values: Sequence[torch.Tensor | None]) -> Submission:
        """Submits the values, one for each tensor. A missing one counts as zeros, and what
        compression kept of it waits for a step that has one."""
        rank = exchange.rank
        with torch.no_grad():
            parts = zip(self.names, self.tensors, self._views, values, strict=True)
            for index, (name, tensor, view, value) in enumerate(parts):
                self._bucket.mark_absent(index, value is None)
                if value is None:
                    view.zero_()
                    continue
                tensors.check(value, rank, lambda name=name: name)
                view.copy_(value)
                if decay := exchange.momentum.weight_decay_of(tensor):
                    view.add_(tensor, alpha=decay)
        return exchange.submit(self._bucket, self._buffer)

    def means(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, its mean or sum), after the wait; it is valid until the next send()."""
        return zip(self.tensors, self._views, strict=True)


def lay_out(
    kind: Callable[..., _Flat], exchange: GradientExchange, named: Iterable[Named]
) -> list[_Flat]:
    """Buckets of tensors in forward order: neighbours of one dtype and device, merged up to
    MERGE_BYTES."""
    groups: list[list[Named]] = []
    size = 0
    for name, tensor in named:
        bytes_ = tensor.numel() * tensor.element_size()
        last = groups[-1][-1][1] if groups else None
        alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not alike or (size >= MERGE_BYTES and bytes_ >= _SMALL):
            groups.append([])
            size = 0
        groups[-1].append((name, tensor))
        size += bytes_
    return [kind(exchange, number, group) for number, group in enumerate(groups)]
