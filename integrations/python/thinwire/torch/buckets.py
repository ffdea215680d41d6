"""Which parameters lie where in DDP's flat buckets.

Residuals follow parameters, since DDP rebuilds its buckets after the first iteration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from thinwire.comm import Segment, Segments
from thinwire.errors import Error, InvalidArgumentError
from thinwire.torch.checkpoint import Residuals
from thinwire.torch.policy import Policy
from thinwire.torch.tensors import DTYPES


class Buckets:
    """Names parameters: by the given names, else p0, p1, ... as they first appear, which is the
    same order on all ranks because DDP starts its buckets in order."""

    def __init__(self, names: Mapping[torch.Tensor, str] | None, policy: Policy) -> None:
        self._given = names is not None
        self._names: dict[torch.Tensor, str] = dict(names or {})
        self._policy = policy
        self._places: dict[str, tuple[int, str, int]] = {}
        self._layouts: dict[int, tuple[list[int], Segments]] = {}
        self._changed = False  # a layout, in this step

    def take(self, policy: Policy) -> None:
        """Another policy from now on."""
        self._policy = policy
        self._layouts.clear()

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(parameter, f"p{len(self._names)}")

    def parameters(self) -> list[torch.Tensor]:
        return list(self._names)

    def describe(self, name: str, bucket: dist.GradBucket) -> str:
        """For messages: the bucket with its first and last parameter."""
        names = [self.name_of(parameter) for parameter in bucket.parameters()]
        inner = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "empty"
        return f"{name} ({inner})"

    def layout(self, bucket: dist.GradBucket, restored: Residuals) -> Segments:
        """The bucket's segments, remembered until its parameters change."""
        parameters = bucket.parameters()
        ids = [id(parameter) for parameter in parameters]
        known = self._layouts.get(bucket.index())
        if known is not None and known[0] == ids:
            return known[1]
        segments = Segments(self._segments(bucket, parameters, restored))
        self._layouts[bucket.index()] = ids, segments
        self._changed = True
        return segments

    def end_step(self) -> bool:
        """Whether its buckets were those of the step before. DDP makes others once, after the first
        step."""
        changed, self._changed = self._changed, False
        return not changed

    def _segments(
        self, bucket: dist.GradBucket, parameters: list[torch.Tensor], restored: Residuals
    ) -> list[Segment]:
        buffer, at, segments = bucket.buffer(), 0, []
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            name, numel = self.name_of(parameter), parameter.numel()
            offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            if gradient.numel() != numel or (numel > 0 and offset != at):
                raise Error(
                    f"bucket{bucket.index()}, parameter '{name}': its gradient of "
                    f"{gradient.numel()} elements lies at element {offset}, expected {numel} at "
                    f"{at}; this version of torch lays its buckets out in another way"
                )
            _check_size(name, numel, restored)
            segments.append(Segment(name, 0, numel, numel, self._policy.index_of(name)))
            self._places[name] = numel, DTYPES[buffer.dtype], buffer.numel()
            at += numel
        if at != buffer.numel():
            raise Error(
                f"bucket{bucket.index()} has {buffer.numel()} elements, its parameters {at}; this "
                "version of torch lays its buckets out in another way"
            )
        return segments

    def places(self) -> Mapping[str, tuple[int, str, int]]:
        """Parameter -> (its elements, dtype and elements of the bucket that it was seen in)."""
        return self._places

    def check(self, residuals: Residuals) -> None:
        """InvalidArgumentError if residuals belong to no parameter, or to one of another size."""
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        for name in residuals:
            if name in sizes:
                _check_size(name, sizes[name], residuals)
            elif self._given:
                raise InvalidArgumentError(
                    f"the state dict has a residual for '{name}', which is no parameter of this "
                    "model; load it into the model that it was saved from"
                )


def _check_size(name: str, numel: int, residuals: Residuals) -> None:
    if name in residuals and residuals[name].first.numel() != numel:
        raise InvalidArgumentError(
            f"the state dict's residual for '{name}' has {residuals[name].first.numel()} elements, "
            f"expected {numel}; load it into the model that it was saved from"
        )
