"""A warm-up: the first steps of a training run, which use another codec than the later ones.

The loss falls fastest in them, so compression errors cost most there (the warm-up of DGC, arXiv
1712.01887, section 3.3, and of 1-bit Adam, arXiv 2102.02888)."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.arguments import as_int
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.rules import Rules

EXACT = "fp32"  # the default codec of a warm-up
_CODECS = (EXACT, "bf16", "int8")  # their errors have no measurable effect on training


class WarmUp(NamedTuple):
    """The number of steps, their rules, and the rules and momentum after them."""

    steps: int
    first: Rules
    then: Rules
    momentum: float


def plan(
    steps: int | None, codec: str | None, then: Rules, momentum: float, *, automatic: bool
) -> WarmUp | None:
    """Return a warm-up of so many steps with `codec` (None: fp32), or None without steps. then,
    momentum: the rules and momentum after it. automatic: codec="auto" chooses them.
    InvalidArgumentError if nothing would change after it."""
    if steps is None:
        if codec is not None:
            raise InvalidArgumentError(
                f"warm_up_codec={codec!r} without warm_up_steps; pass the number of steps, or "
                "leave it out"
            )
        return None
    steps = as_int("warm_up_steps", steps, 1)
    if automatic:
        raise InvalidArgumentError(
            f"warm_up_steps={steps} with codec='auto', which measures its first steps with fp32 "
            "and may stay with it; take a codec that is chosen, or leave warm_up_steps out"
        )
    codec = EXACT if codec is None else codec
    if codec not in _CODECS:
        raise InvalidArgumentError(
            f"warm_up_codec is {codec!r}, expected one of {', '.join(_CODECS)}"
        )
    if not momentum and set(then.by_pattern.values()) == {codec}:
        raise InvalidArgumentError(
            f"warm_up_steps={steps} with codec {codec!r}, expected a codec that the gradients "
            f"change to after so many steps in {codec}; leave warm_up_steps out"
        )
    return WarmUp(steps, Rules(codec), then, momentum)
