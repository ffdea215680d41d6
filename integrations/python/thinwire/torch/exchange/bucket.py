"""Bucket: the description of a flat buffer that is reduced in every step. FlatBucket: a bucket with
its own buffer, into which tensors are copied. Parameters: the bucket of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from thinwire import comm
from thinwire.arguments import as_int, check_flag, check_kind, plain, wrong
from thinwire.comm import Communicator, Segment, Segments
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.rules import Rules

MERGE_BYTES = 1 << 20  # a bucket of at least this takes no more large tensors
_SMALL = MERGE_BYTES // 8  # a smaller tensor always joins its neighbour's bucket

Named = tuple[str, torch.Tensor]
_Flat = TypeVar("_Flat", bound="FlatBucket")


class Part(NamedTuple):
    """A part of a bucket: elements [offset, offset + numel) of parameter `name`, which has `total`
    elements. total None: the part is the whole parameter."""

    name: str
    numel: int
    offset: int = 0
    total: int | None = None


class Bucket:
    """A description that GradientExchange.bucket() creates once, and that is submitted with a flat
    buffer in every step.

    It keeps everything that does not change between steps in the library's form, so that a
    submission allocates and hashes as little as possible."""

    __slots__ = (
        "_handle", "_owner", "_rules", "collective", "dtype", "name", "numel", "op", "parts",
        "priority", "segments", "shape",
    )  # fmt: skip

    def __init__(
        self,
        name: str | None,
        numel: int,
        dtype: str,
        *,
        op: str = "mean",
        parts: Sequence[Part] = (),
        codecs: Sequence[int] = (),
        priority: int = 0,
        shape: str | None = None,
        collective: str = "all_reduce",
    ) -> None:
        """Describe a buffer.

        Args:
            name: equal on all ranks; None: no error feedback, and ranks match calls by order.
            numel: elements of the buffer.
            dtype: a key of thinwire.comm.DTYPES.
            op: "mean" or "sum".
            parts: of the buffer, without gaps; none: the tensor is not a parameter's gradient.
            codecs: the number of each part's codec among those of the exchange.
            priority: lower goes first under p3.
            shape: text that is compared between ranks; None: it is not compared.
            collective: a key of comm.COLLECTIVES.
        """
        self.name, self.numel, self.dtype, self.op = name, numel, dtype, op
        self.parts, self.priority, self.shape = tuple(parts), priority, shape
        self.collective = collective
        self._owner: Communicator | None = None
        self._handle: comm.Bucket | None = None  # the registered bucket of the communicator
        self._rules: Rules | None = None  # the rules of its codecs, if follow() has set them
        self.segments: Segments | None = None
        if self.parts:
            self.segments = Segments(
                [
                    Segment(part.name, part.offset, part.numel, part.total or part.numel, codec)
                    for part, codec in zip(self.parts, codecs, strict=True)
                ]
            )

    def mark_absent(self, index: int, absent: bool) -> None:
        """Mark whether this rank has no gradient for part `index` in the next submission. Then its
        elements must be zeros, and its residual waits for a step with a gradient.
        InvalidArgumentError if there is no such part."""
        index = as_int("index", index, 0, len(self.parts) - 1)
        check_flag("absent", absent)
        self.segments.mark_absent(index, absent)


def handle_of(bucket: Bucket, communicator: Communicator) -> comm.Bucket:
    """Return the communicator's bucket, which is registered at its first use there."""
    if bucket._handle is None or bucket._owner is not communicator:
        bucket._handle = communicator.bucket(
            bucket.numel, bucket.dtype, bucket.op, bucket.name, bucket.segments, bucket.priority,
            collective=bucket.collective, shape=bucket.shape,
        )  # fmt: skip
        bucket._owner = communicator
    return bucket._handle


def follow(bucket: Bucket, rules: Rules) -> None:
    """Set each part's codec to the one that these rules have for it. Call it between steps.
    InvalidArgumentError if they have none."""
    if bucket._rules is rules or bucket.segments is None:
        return
    numbers = {name: rules.index_of(name) for name in {part.name for part in bucket.parts}}
    if bucket.segments.set_codecs([numbers[part.name] for part in bucket.parts]):
        bucket._handle = None
    bucket._rules = rules


class InFlight:
    """One use of a bucket, until it is waited for. It keeps the tensor for the result alive."""

    __slots__ = ("bucket", "tensor", "work")

    def __init__(
        self, bucket: Bucket, tensor: torch.Tensor, work: comm.Work | comm.Bucket | None
    ) -> None:
        """work: None if nothing was sent."""
        self.bucket, self.tensor, self.work = bucket, tensor, work


class FlatBucket:
    """Tensors that are reduced together: a large one, or several small neighbours."""

    def __init__(self, bucket: Bucket, held: Sequence[torch.Tensor]) -> None:
        """held: the tensors of the bucket's parts, all of the same dtype and device."""
        self.bucket = bucket
        self.names = [part.name for part in bucket.parts]
        self.tensors = list(held)
        first, numels = self.tensors[0], [part.numel for part in bucket.parts]
        self._buffer = torch.zeros(sum(numels), dtype=first.dtype, device=first.device)
        self._views = [
            part.view(tensor.shape)
            for part, tensor in zip(self._buffer.split(numels), self.tensors, strict=True)
        ]

    def fill(
        self,
        values: Sequence[torch.Tensor | None],
        rank: int,
        weight_decay_of: Callable[[torch.Tensor], float],
    ) -> torch.Tensor:
        """Return the buffer with these values, one for each tensor, plus the given fraction of each
        tensor (its weight decay). A missing value counts as zeros, and its residual waits for a
        step with a value."""
        with torch.no_grad():
            parts = zip(self.names, self.tensors, self._views, values, strict=True)
            for index, (name, tensor, view, value) in enumerate(parts):
                self.bucket.mark_absent(index, value is None)
                if value is None:
                    view.zero_()
                    continue
                tensors.check(value, rank, lambda name=name: name)
                view.copy_(value)
                if decay := weight_decay_of(tensor):
                    view.add_(tensor, alpha=decay)
        return self._buffer

    def means(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, its mean or sum) after the wait; valid until the next fill()."""
        return zip(self.tensors, self._views, strict=True)


def lay_out(
    kind: Callable[[Bucket, Sequence[torch.Tensor]], _Flat],
    make: Callable[..., Bucket],
    named: Iterable[Named],
) -> list[_Flat]:
    """Return buckets for tensors in forward order: neighbours with the same dtype and device are
    merged up to MERGE_BYTES. make: GradientExchange.bucket; a bucket's priority is its number."""
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
    flat = []
    for number, group in enumerate(groups):
        held = [tensor for _, tensor in group]
        parts = [(name, tensor.numel()) for name, tensor in group]
        shape = tensors.shape_of(held)
        bucket = make(group[0][0], parts, held[0].dtype, priority=number, shape=shape)
        flat.append(kind(bucket, held))
    return flat


def parts_of(parts: Iterable[Any]) -> list[Part]:
    expected = "(parameter name, elements) or Part, one after the other"
    check_kind("parts", parts, Iterable, expected)
    listed = []
    for part in parts:
        if not isinstance(part, tuple) or not 2 <= len(part) <= 4:
            raise wrong("parts", parts, expected)
        one = Part(*part)
        tensors.check_name(one.name)
        numel = as_int(f"the number of elements of part '{one.name}'", one.numel, 0)
        offset = as_int(f"the offset of part '{one.name}'", one.offset, 0)
        total = one.total
        if total is not None:
            total = as_int(f"the total of part '{one.name}'", total, offset + numel)
        listed.append(Part(one.name, numel, offset, total))
    return listed


class Parameters:
    """The size in elements and the last bucket of each parameter."""

    def __init__(self, sizes: Mapping[str, int] | None) -> None:
        """sizes: elements of all parameters, by name; None: they become known with their
        buckets."""
        self._all_known = sizes is not None
        self._sizes: dict[str, int] = dict(sizes or {})
        self._buckets: dict[str, Bucket] = {}

    def add(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            self._sizes[part.name] = part.total or part.numel
            self._buckets[part.name] = bucket

    def add_size(self, name: str, numel: int) -> None:
        self._sizes[name] = numel

    def check(self, residuals: Residuals) -> None:
        """InvalidArgumentError if residuals belong to no parameter, or to one of another size."""
        for name in residuals:
            if name in self._sizes:
                check_size(name, self._sizes[name], residuals)
            elif self._all_known:
                raise InvalidArgumentError(
                    f"the state dict has a residual for '{name}', which is no parameter of this "
                    "model; load it into the model that it was saved from"
                )

    def table(self, communicator: Communicator | None, rules: Rules) -> list[dict[str, Any]]:
        """Return stats()["parameters"]; empty while there is no communicator."""
        if communicator is None:
            return []
        rows = []
        for name, bucket in sorted(self._buckets.items()):
            halves = bucket.collective != "all_reduce"  # these compress tensors of every size
            raw = not halves and communicator.goes_raw(bucket.numel, bucket.dtype)
            codec = "raw" if raw else communicator.codec(rules.index_of(name))
            rule = rules.rule_of(name)
            numel = self._sizes[name]
            rows.append({"name": name, "numel": numel, "rule": rule, "codec": codec})
        return rows


def check_sizes(sizes: object) -> None:
    """InvalidArgumentError unless it is a dict of element counts by name."""
    right = isinstance(sizes, Mapping) and all(
        isinstance(name, str) and isinstance(plain(numel), int) for name, numel in sizes.items()
    )
    if not right:
        raise InvalidArgumentError(
            f"parameters is {sizes!r}, expected a dict of element counts by name"
        )


def check_size(name: str, numel: int, residuals: Residuals) -> None:
    """InvalidArgumentError if there is a residual of `name` with another number of elements."""
    if name in residuals and residuals[name].first.numel() != numel:
        raise InvalidArgumentError(
            f"the state dict's residual for '{name}' has {residuals[name].first.numel()} elements, "
            f"expected {numel}; load it into the model that it was saved from"
        )
