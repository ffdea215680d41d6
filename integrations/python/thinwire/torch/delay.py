"""One-step delay: a step's mean gradient is on its way while the next step computes with weights
that this rank has updated with its own gradient.

Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training", arXiv
2005.06728, sections 3 and 4: global weights W take the means, W(t) = optimizer(W(t-1), the mean
gradient of step t-1); each rank computes step t+1 with W(t) - lr * (its own gradient of step t).
The first steps, the warm-up, wait for the mean as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thinwire import errors
from thinwire.torch.session import Session
from thinwire.torch.stepper import Groups
from thinwire.torch.units import Phase, Unit

# Steps one unit's parameters with these means: (unit, means by parameter, groups).
Apply = Callable[[Unit, dict[torch.Tensor, torch.Tensor], Groups], None]


class OneStepDelay:
    """What DistributedOptimizer(delay=1) keeps between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, warm_up_steps: int, apply: Apply) -> None:
        """Raises InvalidArgumentError for an optimizer whose step is no multiple of lr."""
        if not isinstance(optimizer, torch.optim.SGD):
            raise errors.InvalidArgumentError(
                f"delay=1 got {type(optimizer).__name__}, expected torch.optim.SGD, since ranks "
                "step with lr times their own gradient in between; or leave delay=0"
            )
        if warm_up_steps < 0:
            raise errors.InvalidArgumentError(
                f"warm_up_steps is {warm_up_steps}, expected 0 or more"
            )
        self._warm_up_steps = warm_up_steps
        self._apply = apply
        self._global: dict[torch.Tensor, torch.Tensor] = {}  # W, while parameters are local
        self._groups: dict[Unit, Groups] = {}  # of the step whose mean is not in W yet
        self._means: dict[Unit, dict[torch.Tensor, torch.Tensor]] = {}  # that have come early

    def begun(self, steps: int) -> bool:
        """Whether step number `steps`, from 1, is delayed."""
        return steps > self._warm_up_steps

    def make_room(self, unit: Unit, session: Session) -> None:
        """Before the unit is submitted again: its last mean is put aside."""
        if unit in self._groups and unit not in self._means:
            unit.wait(session)
            self._means[unit] = {p: mean.clone() for p, mean in unit.means()}
            unit.phase = Phase.IDLE

    def step(self, units: Iterable[Unit], groups: Groups) -> None:
        """After backward, when all units are on their way."""
        for unit in units:
            self._catch_up(unit)
            self._groups[unit] = groups
        with torch.no_grad():
            for group in groups:
                for parameter in group["params"]:
                    self._step_locally(parameter, group)

    def finish(self, units: Iterable[Unit], session: Session) -> None:
        """Waits for the means that are on their way; parameters are W then, equal on all ranks."""
        for unit in units:
            self.make_room(unit, session)
            self._catch_up(unit)
        self._global.clear()

    def _catch_up(self, unit: Unit) -> None:
        """W takes the unit's last mean; its parameters are W then."""
        groups = self._groups.pop(unit, None)
        if groups is None:
            return
        with torch.no_grad():
            for parameter in unit.parameters:
                if parameter in self._global:
                    parameter.copy_(self._global[parameter])
        self._apply(unit, self._means.pop(unit), groups)

    def _step_locally(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None or not parameter.requires_grad:
            self._global.pop(parameter, None)
            return
        kept = self._global.get(parameter)
        self._global[parameter] = parameter.clone() if kept is None else kept.copy_(parameter)
        # Weight decay and maximize as torch.optim.SGD has them.
        scale = group["lr"] if group["maximize"] else -group["lr"]
        if group["weight_decay"]:
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(parameter.grad, alpha=float(scale))
