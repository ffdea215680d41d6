"""Limits of the error of encoding, and of sums of exchanges with error feedback, in fp64.
`thinwire doctor --canary` checks results against them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError

CODECS = (
    "fp32", "bf16", "int8", "int4", "int4:hadamard=1", "int4:rounding=stochastic", "onebit",
    "onebit:down=onebit", "topk", "adaptive", "ternary",
)  # fmt: skip
STEPS = 4

BLOCK = 256  # the codecs' default, and the block of the norms below
SLACK = 1.001  # for fp32's rounding in an encoder, which may move a value to the other code
TINY = 2.0**-100  # blocks whose elements are all smaller are sent as zeros


class Size(NamedTuple):
    """Limits of a tensor's magnitude: of each element, and of the L2 norm of each block of 256."""

    element: torch.Tensor
    norm: torch.Tensor

    def plus(self, other: Size, times: float = 1.0) -> Size:
        return Size(self.element + times * other.element, self.norm + times * other.norm)

    def times(self, factor: float) -> Size:
        return Size(factor * self.element, factor * self.norm)


def blocks(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return the last dimension as blocks, padded with zeros."""
    missing = -x.shape[-1] % block
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, block))


def spread(of_block: torch.Tensor, count: int, block: int = BLOCK) -> torch.Tensor:
    return of_block.repeat_interleave(block, -1)[..., :count]


def size_of(element: torch.Tensor | None, norm: torch.Tensor | None, count: int) -> Size:
    """Return both limits; derive a missing one from the other."""
    if element is None:
        return Size(spread(norm, count), norm)
    of_elements = blocks(element).norm(dim=-1)
    if norm is None:
        return Size(element, of_elements)
    return Size(torch.minimum(element, spread(norm, count)), torch.minimum(norm, of_elements))


def loss(spec: str, x: Size) -> Size:
    """Return limits of x - decode(encode(x)) for every x within these limits, by
    compress/FORMAT.md.

    With m the largest magnitude of a block and s its scale:
        fp32: 0.  bf16: half a unit of its 8 bits, |x| / 256.
        int8, int4: s / 2, where s <= m / qmax * (1 + 2^-7), because scales round up to bf16.
            rounding=stochastic: s. hadamard=1, in full blocks: the transform keeps L2 norms, and
            its m is at most the L1 norm / 16. Each of its 256 codes loses at most s / 2, with s
            from 0.8 m; clamped values, above 0.8 m, lose at most 0.2 m, which is a 16th of the
            squared norm.
        onebit: an element becomes ± the mean; ||x| - mean| is at most the larger of both, and the
            L2 norm does not grow.
        topk: elements that are not sent. ternary: likewise, and the rest of elements that are cut
            to the threshold.
        adaptive: the transform keeps L2 norms. A code is off by at most 26/32 of the block's root
            mean square, or is clamped, which loses less than its value: the squared norm is at most
            1 + (26/32)^2 times that of x.
    """
    info = codec_info(spec)
    parameters = {parameter.key: parameter.value for parameter in info.parameters}
    block, count = int(parameters.get("block", BLOCK)), x.element.numel()
    norm = x.norm if block == BLOCK else None
    if info.name == "fp32":
        return x.times(0.0)
    if info.name == "bf16":
        return x.times(2.0**-8 * SLACK).plus(tiny(x))
    if info.name in ("topk", "ternary"):
        return x
    if info.name == "adaptive":
        return size_of(None, x.norm * math.hypot(1.0, 26 / 32) * 1.01, count).plus(tiny(x))
    of_blocks = blocks(x.element, block)
    if info.name == "onebit":
        lengths = blocks(torch.ones_like(x.element), block).sum(-1)
        mean = spread(of_blocks.sum(-1) / lengths, count, block) * (1 + 2.0**-8) * SLACK
        return size_of(torch.maximum(x.element, mean), norm, count).plus(tiny(x))
    if info.name not in ("int8", "int4"):
        raise InvalidArgumentError(
            f"codec is {spec!r}, expected one whose loss is known here: {', '.join(CODECS)}"
        )
    codes = 127 if info.name == "int8" else 7
    of_a_step = 1.0 if parameters["rounding"] == "stochastic" else 0.5
    of_m = of_a_step / codes * (1 + 2.0**-7) * SLACK
    plain = size_of(spread(of_blocks.amax(-1) * of_m, count, block), None, count)
    if parameters.get("hadamard") == "1":
        m = torch.minimum(x.norm, of_blocks.sum(-1) / 16)
        rotated = torch.sqrt(BLOCK * (0.8 * m * of_m) ** 2 + x.norm**2 / 16)
        full = torch.arange(1, len(m) + 1) * BLOCK <= count
        norm = torch.where(full, rotated, plain.norm)
        element = torch.where(spread(full, count), spread(norm, count), plain.element)
        plain = Size(element, norm)
    return plain.plus(tiny(x))


def tiny(x: Size) -> Size:
    return Size(torch.full_like(x.element, TINY), torch.full_like(x.norm, 16 * TINY))


class Limits(NamedTuple):
    """Limits after one more step: of the sum of the results so far, of its part that is rounding,
    and of one step's result."""

    error: Size
    rounding: torch.Tensor


class Route(NamedTuple):
    """The codecs that encode a tensor: on the way to the owner, where a grid encodes it a second
    time, and from the owner; None: it is encoded once. feedback: whether residuals are kept."""

    up: str
    down: str | None
    two_level: bool
    feedback: bool


def limits(route: Route, x: Size, total: Size, ranks: int, scale: float) -> Iterable[Limits]:
    """Yield limits of the error of the sum of t results, for t = 1, 2, ...

    x: limits of any rank's input; total: of the exact sum. scale: 1, or 1 / ranks for a mean.

    With e a rank's residual, x + e is encoded, e' = loss(x + e) is kept, and x + e - e' enters the
    sum. So the sum of residuals is the error of t sums. The owner's result y has its own residual,
    f' = loss(y + f). Hence the error is at most scale * ranks * e + f for every t. For codecs that
    lose less than half of m this limit is constant; for the others it grows, and the canary's third
    comparison is sharper. Limits of elements of a row's sum are the sums of its ranks' limits, so
    the shape of the grid does not matter. Without feedback every step loses as much, and e and f
    grow with t."""
    kept = again = last = nothing = x.times(0.0)
    for step in range(1, STEPS + 1):
        kept = _next(route.up, x, kept, route.feedback)
        if route.two_level:
            again = _next(route.up, x.plus(kept, 2.0), again, route.feedback)
        e = kept.plus(again)
        if route.down is not None:
            y = total.plus(e, 2.0 * ranks).times(scale)
            last = _next(route.down, y, last, route.feedback)
        # The magnitude of decoded values is at most the norm of their block plus its residual.
        largest = x.plus(e, 2.0).norm * (scale * ranks) + last.norm
        rounding = spread(largest * (step * (ranks + 8) * 2.0**-24), x.element.numel()) + TINY
        error = nothing.plus(e, scale * ranks).plus(last)
        yield Limits(
            Size(error.element + rounding, error.norm + blocks(rounding).norm(dim=-1)), rounding
        )


def _next(spec: str, x: Size, kept: Size, feedback: bool) -> Size:
    return loss(spec, x.plus(kept)) if feedback else kept.plus(loss(spec, x))
