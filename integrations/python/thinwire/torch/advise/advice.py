"""Advice: predicted steps and a recommendation, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.simulate import Link
from thinwire.torch.advise.rehearsal import rehearse
from thinwire.torch.forecast.choice import (
    ACCURATE,
    CODECS,
    PLAIN,
    POLICIES,
    TIE,
    Prediction,
    choose,
    codecs_on,
    predict,
)  # fmt: skip
from thinwire.torch.forecast.probe import probe


@dataclass(frozen=True)
class Advice:
    """Equal on all ranks."""

    rows: tuple[Prediction, ...]
    best: Prediction
    compute_s: float  # of a step without any exchange
    link: Link

    @property
    def compress(self) -> bool:
        """Whether a codec is recommended; False: do not compress."""
        return self.best.codec != PLAIN[0]

    @property
    def plain(self) -> Prediction:
        """The prediction for DDP without thinwire, or the first row if there is none."""
        for row in self.rows:
            if (row.codec, row.policy) == PLAIN:
                return row
        return self.rows[0]

    def _how_plain(self, gain: float) -> str:
        policy, none = self.best.policy, f"no codec gains {100 * (TIE - 1):.0f} %"
        if policy == PLAIN[1]:
            return f"stay with plain DDP, since {none}"
        return f"policy='{policy}', codec='fp32' is {gain:.2f} x plain {PLAIN[1]}, and {none}"

    def table(self) -> str:
        """The predictions and the recommendation as text."""
        policies = list(dict.fromkeys(row.policy for row in self.rows))
        lines = ["predicted ms a step" + "".join(f"{policy:>10}" for policy in policies)]
        times = {(row.codec, row.policy): row.step_s for row in self.rows}
        for codec in dict.fromkeys(row.codec for row in self.rows):
            cells = [f"{1000 * times[codec, policy]:10.1f}" for policy in policies]
            lines.append(f"{codec:<19}" + "".join(cells))
        lines.append(
            f"computing alone: {1000 * self.compute_s:.1f} ms; {self.link.ranks} ranks, "
            f"{8e-9 * self.link.bytes_per_s:.2f} Gb/s, latency {1000 * self.link.latency_s:.2f} ms"
        )
        gain = self.plain.step_s / self.best.step_s
        if not self.compress:
            lines.append(f"do not compress: {self._how_plain(gain)}")
        else:
            lines.append(
                f"recommended: codec='{self.best.codec}', policy='{self.best.policy}', "
                f"{gain:.2f} x plain fp32"
            )
        return "\n".join(lines)


def advise(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[], Any],
    *,
    codecs: Sequence[str] = CODECS,
    policies: Sequence[str] = POLICIES,
    allowed: Sequence[str] = ACCURATE,
    steps: int = 8,
    process_group: dist.ProcessGroup | None = None,
    lanes: int | None = None,
    chunk_bytes: int | None = None,
    min_bytes: int | None = None,
) -> Advice:
    """Predicts how long a training step takes with each codec and policy. All ranks call it.

    model, optimizer: as DistributedOptimizer takes them, not wrapped; afterwards they are as they
      were. A BatchNorm's running means are restored as well.
    run: makes one forward and backward pass, its batch included.
    codecs: from the most accurate to the least; those that do not run on the model's device are
      left out. allowed: those that may be recommended.
    steps: the number that are timed, twice. lanes, chunk_bytes, min_bytes: as DistributedOptimizer
      takes them.

    Costs 2 * (steps + 3) steps' computing and two or three seconds on the link. Raises a typed
    error of a failed exchange, and InvalidArgumentError for an unknown codec."""
    profiles = {
        policy: rehearse(model, optimizer, run, policy, steps, process_group)
        for policy in ("p3", "wfbp")
    }
    device = next(model.parameters()).device
    measured = probe(codecs_on(device, codecs), device, process_group)
    options = {"lanes": lanes, "chunk_bytes": chunk_bytes, "min_bytes": min_bytes}
    rows = predict(profiles, measured.link, measured.costs, policies, **options)
    return Advice(rows, choose(rows, allowed), profiles["wfbp"].compute_s, measured.link)
