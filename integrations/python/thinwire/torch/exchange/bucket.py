"""Bucket: the description of a flat buffer that is reduced in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.arguments import check_whole
from thinwire.comm import Segment, Segments, Work


class Part(NamedTuple):
    """A stretch of a bucket: `numel` elements of parameter `name`, which has `total` elements, from
    its element `offset` on. total None: the bucket holds the whole parameter."""

    name: str
    numel: int
    offset: int = 0
    total: int | None = None


class Bucket:
    """Created once by GradientExchange.bucket(), and submitted in every step with a flat buffer.

    It keeps in the library's form all that does not change from step to step, so that a submission
    allocates and hashes as little as possible."""

    __slots__ = (
        "collective", "dtype", "name", "numel", "op", "parts", "priority", "segments", "shape",
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
        """name: equal on all ranks; None: no error feedback, and ranks match calls by their order.
        dtype: a key of thinwire.comm.DTYPES. op: "mean" or "sum". parts: what the buffer holds, one
        part after the other; none: the tensor is no parameter's gradient. codecs: the number of
        each part's codec among those of the exchange. priority: lower goes first under p3. shape:
        compared between ranks; None: it is not. collective: a key of comm.COLLECTIVES."""
        self.name, self.numel, self.dtype, self.op = name, numel, dtype, op
        self.parts, self.priority, self.shape = tuple(parts), priority, shape
        self.collective = collective
        self.segments: Segments | None = None
        if self.parts:
            self.segments = Segments(
                [
                    Segment(part.name, part.offset, part.numel, part.total or part.numel, codec)
                    for part, codec in zip(self.parts, codecs, strict=True)
                ]
            )

    def mark_absent(self, index: int, absent: bool) -> None:
        """Before a submission: this rank has no gradient for part `index`. Its elements must be
        zeros then, and what compression has kept of the part waits for a step that has one.
        InvalidArgumentError if there is no such part."""
        check_whole("index", index, 0, len(self.parts) - 1)
        self.segments.mark_absent(index, absent)


class Submission(NamedTuple):
    """A bucket in flight. It keeps the buffer alive."""

    bucket: Bucket
    buffer: torch.Tensor
    work: Work
