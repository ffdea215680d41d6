"""Choice: predicts a step for every codec and policy, and picks one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError
from thinwire.simulate import CodecCost, Link, Profile, simulate

# From the most accurate to the least.
CODECS = ("fp32", "bf16", "int8", "int4", "adaptive", "onebit", "topk")
POLICIES = ("fifo", "wfbp", "p3")
# Those that may be recommended unless the user says otherwise. Of the others adaptive has lost more
# than a tenth of a point (docs/decisions.md#32-adaptives-floor-is-0), and the rest need momentum.
ACCURATE = CODECS[:4]
# Predictions this close are equal, and accuracy decides.
TIE = 1.03
# A step must gain this much before it is worth leaving DDP, whose hook has the policy "wfbp"; less
# is what two measurements of one machine differ by.
WORTH_S = 5e-4
PLAN_ABOVE_S = 1e-3  # with more latency the engine predicts a step's order, as Options::far
PLAIN = ("fp32", "wfbp")  # DDP without thinwire


@dataclass(frozen=True)
class Prediction:
    codec: str
    policy: str
    step_s: float


def codecs_on(device: torch.device, codecs: Sequence[str]) -> tuple[str, ...]:
    """Those of `codecs` that run where the gradients are."""
    return tuple(c for c in codecs if device.type == "cpu" or codec_info(c).has_kernels)


def predict(
    profiles: dict[str, Profile],
    link: Link,
    costs: dict[str, CodecCost],
    policies: Sequence[str],
    **options: Any,
) -> tuple[Prediction, ...]:
    """Predicts a step for every codec in `costs` and every policy. profiles: of rehearsals under
    "p3" and "wfbp". Both compute the same, so a difference between them is noise, and their mean
    is taken."""
    mean_s = sum(profile.compute_s for profile in profiles.values()) / len(profiles)
    even = {policy: profile.scaled_to(mean_s) for policy, profile in profiles.items()}
    rows = []
    for codec, cost in costs.items():
        for policy in policies:
            profile = even.get(policy) or even["wfbp"]
            planned = link.latency_s > PLAN_ABOVE_S
            step = simulate(profile, link, codec, policy, cost, planned=planned, **options)
            rows.append(Prediction(codec, policy, step.step_s))
    return tuple(rows)


def choose(rows: Sequence[Prediction], allowed: Sequence[str]) -> Prediction:
    """The most accurate codec whose best policy is as good as the fastest, with that policy: DDP's,
    unless another one gains more than TIE and WORTH_S."""
    mine = [row for row in rows if row.codec in allowed]
    if not mine:
        raise InvalidArgumentError(
            f"allowed is {tuple(allowed)}, expected some of {sorted({row.codec for row in rows})}"
        )
    limit = TIE * min(row.step_s for row in mine)
    order = list(dict.fromkeys(row.codec for row in rows))
    near = [row for row in mine if row.step_s <= limit]
    accurate = min(near, key=lambda row: order.index(row.codec)).codec
    rows_of_codec = [row for row in mine if row.codec == accurate]
    best = min(rows_of_codec, key=lambda row: row.step_s)
    limit = max(TIE * best.step_s, best.step_s + WORTH_S)
    of_ddp = [row for row in rows_of_codec if row.policy == PLAIN[1] and row.step_s <= limit]
    return of_ddp[0] if of_ddp else best
