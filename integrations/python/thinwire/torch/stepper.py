"""The way from gradients to a step, unit by unit: what DistributedOptimizer does between them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.comm import Work
from thinwire.torch.partial_step import step_partly
from thinwire.torch.session import Session
from thinwire.torch.units import Phase, Unit
from thinwire.torch.watched import Watched

Groups = list[dict[str, Any]]  # param groups, with the hyperparameters of a step


class Stepper:
    """Sends units, waits for their means, and steps their parameters, at once or one by one."""

    def __init__(self, optimizer: Optimizer, session: Session | Watched, find_unused: bool) -> None:
        """session: may be exchanged between steps."""
        self.session = session
        self.units: list[Unit] = []
        self.unit_of: dict[torch.Tensor, Unit] = {}
        self._optimizer = optimizer
        self._find_unused = find_unused
        self._due: dict[Unit, Groups] = {}  # steps that were asked for
        self._used: tuple[torch.Tensor, Work] | None = None  # on its way
        self._unused: set[torch.Tensor] = set()  # of the step under way, by no rank

    def take(self, units: list[Unit]) -> None:
        """Between steps."""
        self.units = units
        self.unit_of = {parameter: unit for unit in units for parameter in unit.parameters}

    @property
    def synchronized(self) -> bool:
        """Whether gradients are the means already."""
        return all(unit.phase is Phase.REDUCED for unit in self.units)

    @property
    def device(self) -> torch.device:
        return self.units[0].parameters[0].device

    def groups(self) -> Groups:
        """As they are now."""
        return [{**group} for group in self._optimizer.param_groups]

    def make_way(self, unit: Unit) -> None:
        """Before new gradients of the unit are sent."""
        if unit in self._due:
            self.apply(unit)  # no forward pass came by since the last step
        elif unit.phase is Phase.REDUCED:
            unit.phase = Phase.IDLE  # its step was left out, as a loss scaler does

    def flush(self) -> None:
        """What this rank never made ready goes as zeros, so that no rank waits for it."""
        if self._find_unused:
            used = torch.tensor([float(p.grad is not None) for p in self.unit_of])
            used = used.to(self.device)
            work = self.session.submit(used, "float32", "sum", "used parameters", None, -1)
            self._used = used, work
        for unit in self.units:
            if unit.phase is Phase.IDLE:
                unit.submit(self.session)
        self.session.end_step()

    def learn_unused(self) -> None:
        """Once a step: which parameters no rank has a gradient for."""
        if self._used is None:
            return
        (used, work), self._used = self._used, None
        self.session.complete(work)
        counts = zip(self.unit_of, used.tolist(), strict=True)
        self._unused = {parameter for parameter, count in counts if count == 0}

    def defer(self) -> None:
        """Every unit's step is due from here on, as the hyperparameters are now."""
        self._due = dict.fromkeys(self.units, self.groups())

    def due(self) -> list[Unit]:
        return list(self._due)

    def apply(self, unit: Unit) -> None:
        """The unit's step, if one is due: waits for its means."""
        groups = self._due.get(unit)
        if groups is None:
            return
        unit.wait(self.session)
        del self._due[unit]
        self.learn_unused()
        self.step_unit(unit, dict(unit.means()), groups)
        unit.phase = Phase.IDLE

    def step_unit(
        self, unit: Unit, means: dict[torch.Tensor, torch.Tensor], groups: Groups
    ) -> None:
        """The step of the unit's parameters with these means; gradients stay as they are."""
        kept = {p: p.grad for p in unit.parameters}
        inside = {p for p in unit.parameters if p.requires_grad and p not in self._unused}
        for parameter, mean in means.items():
            parameter.grad = mean if parameter in inside else None
        try:
            with torch.inference_mode(False):  # an evaluation may be what needs them
                step_partly(self._optimizer, inside, groups)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def take_means(self) -> None:
        """Gradients become the means."""
        for unit in self.units:
            unit.wait(self.session)
        self.learn_unused()
        with torch.no_grad():
            for unit in self.units:
                for parameter, mean in unit.means():
                    if parameter in self._unused or not parameter.requires_grad:
                        parameter.grad = None
                    elif parameter.grad is None:
                        parameter.grad = mean.clone()
                    else:
                        parameter.grad.copy_(mean)

    def step(self) -> None:
        """The step with the gradients as they are."""
        self._optimizer.step()
        for unit in self.units:
            unit.phase = Phase.IDLE
