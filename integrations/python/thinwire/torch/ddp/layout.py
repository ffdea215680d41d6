"""The steps of a DDP model, and the places of parameters in its flat buckets.

Residuals belong to parameters, because DDP rebuilds its buckets after the first iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from thinwire.errors import Error
from thinwire.torch import tensors
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.gradient_exchange import GradientExchange


class StepBuckets:
    """Counts the buckets of a step. DDP's own numbers do not suffice: in the first step with
    static_graph=True every bucket has the index 0 and none is marked as the last one."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """parameters: all of the model, or none if they are not known."""
        self._all = frozenset(map(id, parameters))
        self._seen: set[int] = set()  # the ids of this step's parameters so far
        self._count = 0

    @property
    def number(self) -> int:
        """The present bucket's number, from 0; the same on all ranks."""
        return self._count - 1

    def begin(self, bucket: dist.GradBucket) -> bool:
        """Make this bucket the present one. Return whether it has a parameter that this step has
        seen before, so that a new step has begun, which ends() could not tell."""
        ids = set(map(id, bucket.parameters()))
        missed = not ids.isdisjoint(self._seen)
        if missed:
            self._clear()
        self._count += 1
        self._seen |= ids
        return missed

    def ends(self, bucket: dist.GradBucket) -> bool:
        """Return whether this is the last bucket of a step: DDP says so, or all parameters have
        been seen. If the parameters are unknown, begin() of the next step may tell instead."""
        uncounted = bucket.index() != self.number
        last = bucket.is_last() or (uncounted and bool(self._all) and self._seen >= self._all)
        if last:
            self._clear()
        return last

    def abandon(self) -> None:
        """Call when the present step has failed; the next bucket begins a new step."""
        self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self._count = 0


def in_bucket(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape with its elements in the order of DDP's bucket:
    that of the parameter's memory, for example channels last."""
    return tensor.permute(_order(parameter))


def in_shape(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient in DDP's bucket, in the parameter's shape."""
    order = _order(parameter)
    places = sorted(range(len(order)), key=order.__getitem__)
    return gradient.view([parameter.shape[d] for d in order]).permute(places)


def _order(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions in memory order, from the outermost one. DDP makes a contiguous layout
    of memory that has gaps or overlaps."""
    as_they_are = list(range(parameter.dim()))
    if parameter.is_contiguous():
        return as_they_are
    strides = parameter.stride()
    order = sorted(as_they_are, key=lambda d: -strides[d])
    return order if parameter.permute(order).is_contiguous() else as_they_are


class Layout:
    """Names parameters: by the given names, else p0, p1, ... in the order in which they first
    appear. That order is the same on all ranks, because DDP starts its buckets in order."""

    def __init__(self, names: Mapping[torch.Tensor, str] | None) -> None:
        self._names: dict[torch.Tensor, str] = {}
        self._reordered: dict[str, torch.Tensor] = {}  # parameters not in index order in buckets
        self._in_index_order: set[str] = set()  # residuals loaded before their parameter was known
        for parameter, name in (names or {}).items():
            self._add(parameter, name)
        self.step = StepBuckets(self._names)
        self._known: dict[int, tuple[list[object], Bucket]] = {}  # by the bucket's number
        self._changed = False  # whether a bucket of this step is new

    def _add(self, parameter: torch.Tensor, name: str) -> None:
        self._names[parameter] = name
        if _order(parameter) != list(range(parameter.dim())):
            self._reordered[name] = parameter

    def name_of(self, parameter: torch.Tensor) -> str:
        if parameter not in self._names:
            self._add(parameter, f"p{len(self._names)}")
        return self._names[parameter]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that have a name so far."""
        return list(self._names)

    def for_checkpoint(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Reorder a parameter's elements from the order of DDP's bucket to that of their indices,
        so that a checkpoint does not depend on memory formats. Elements of an unknown parameter are
        returned unchanged."""
        parameter = self._reordered.get(name)
        return flat if parameter is None else in_shape(parameter, flat).flatten()

    def from_checkpoint(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of for_checkpoint()."""
        parameter = self._reordered.get(name)
        return (
            flat if parameter is None else in_bucket(parameter, flat.view_as(parameter)).flatten()
        )

    def loaded(self, names: Iterable[str]) -> None:
        """Note that a checkpoint has these parameters. The residuals of an unknown one stay in
        index order until newly_known() returns its name."""
        self._in_index_order = set(names) - set(self._names.values())

    def newly_known(self) -> list[str]:
        """Return the parameters for which the caller must call from_checkpoint() now, once each."""
        if not self._in_index_order:
            return []
        found = sorted(self._in_index_order & self._reordered.keys())
        self._in_index_order -= set(self._names.values())
        return found

    def describe(self, bucket: dist.GradBucket) -> str:
        """Describe the bucket by its first and last parameter, for messages."""
        names = [self.name_of(parameter) for parameter in bucket.parameters()]
        inner = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "empty"
        return f"{self._label} ({inner})"

    @property
    def _label(self) -> str:
        return f"bucket{self.step.number}"

    def bucket(self, exchange: GradientExchange, bucket: dist.GradBucket) -> Bucket:
        """Return the exchange's bucket for DDP's. It is kept until its parameters change."""
        parameters, number = bucket.parameters(), self.step.number
        key = [bucket.buffer().dtype, *map(id, parameters)]
        known = self._known.get(number)
        if known is not None and known[0] == key:
            return known[1]
        parts = self._parts(bucket, parameters, exchange.rank)
        made = exchange.bucket(
            self._label, parts, bucket.buffer().dtype, priority=number,
            shape=tensors.shape_of(parameters),
        )  # fmt: skip
        self._known[number] = key, made
        self._changed = True
        return made

    def end_step(self) -> bool:
        """Return whether the step had the buckets of the step before. DDP rebuilds them once, after
        the first step."""
        changed, self._changed = self._changed, False
        return not changed

    def _parts(
        self, bucket: dist.GradBucket, parameters: list[torch.Tensor], rank: int
    ) -> list[tuple[str, int]]:
        buffer, at, parts = bucket.buffer(), 0, []
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            name, numel = self.name_of(parameter), parameter.numel()
            if parameter.is_complex():  # its gradient is pairs of real elements in DDP's bucket
                tensors.check(parameter, rank, lambda name=name: name)
            offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            if gradient.numel() != numel or (numel > 0 and offset != at):
                raise Error(
                    f"{self._label}, parameter '{name}': its gradient of "
                    f"{gradient.numel()} elements lies at element {offset}, expected {numel} at "
                    f"{at}; this version of torch lays its buckets out in another way"
                )
            parts.append((name, numel))
            at += numel
        if at != buffer.numel():
            raise Error(
                f"{self._label} has {buffer.numel()} elements, its parameters {at}; this "
                "version of torch lays its buckets out in another way"
            )
        return parts
