"""1-bit Adam: Adam whose momentum is exchanged compressed, once its variance is frozen.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", arXiv 2102.02888, section 4, algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_kind, check_whole, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch.closure import loss_of
from thinwire.torch.ddp.state import State

_BETAS = "two numbers from 0 to below 1"


def _listed(params: Iterable[Any]) -> list[Any]:
    expected = "parameters of the DDP model, or dicts of param groups"
    check_kind("params", params, Iterable, expected)
    listed = list(params)
    if not listed or not all(isinstance(one, (torch.Tensor, dict)) for one in listed):
        raise wrong("params", params, expected)
    return listed


def _check_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        check_kind(name, number, (int, float), "a number")


class OneBitAdam(Optimizer):
    """Adam with decoupled weight decay (torch.optim.AdamW) for a State that owns its momentum.

    params: of the DDP model. state: State(codec="onebit", momentum=betas[0]), which this optimizer
      pairs itself with. warmup_steps: steps with gradients in fp32; then the variance is frozen,
      and the state exchanges momentum in its own codec. The paper takes 15 to 20 % of a run.
    InvalidArgumentError if state.momentum is not betas[0], or a value is out of range."""

    def __init__(
        self,
        params: Iterable[Any],
        state: State,
        *,
        warmup_steps: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        params = _listed(params)
        check_kind("state", state, State, "the State of the model")
        check_whole("warmup_steps", warmup_steps, 1)  # without a variance nothing can be frozen
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        check_kind("betas", betas, Sequence, _BETAS)
        if len(betas) != 2:
            raise wrong("betas", betas, _BETAS)
        _check_numbers(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        if not (lr >= 0 and eps > 0 and 0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise InvalidArgumentError(
                f"lr={lr}, betas={betas}, eps={eps}: expected lr >= 0, eps > 0, betas in [0, 1)"
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._exchange = state
        self._warmup_steps = warmup_steps
        state.pair_adam(self, betas[0], warmup_steps)

    def momentum_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """As the state keeps it: sums of gradients, exp_avg / (1 - betas[0])."""
        for group in self.param_groups:
            if any(parameter is p for p in group["params"]):
                average = self.state.get(parameter, {}).get("exp_avg")
                return None if average is None else average / (1 - group["betas"][0])
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss, if there is one."""
        loss = loss_of(closure)
        frozen = self._exchange.warmed_up
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, frozen)
        return loss

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], frozen: bool
    ) -> None:
        (beta1, beta2), memory = group["betas"], self.state[parameter]
        if not memory:
            memory["step"] = 0
            memory["exp_avg"] = torch.zeros_like(parameter)
            memory["exp_avg_sq"] = torch.zeros_like(parameter)
        memory["step"] += 1
        average, square = memory["exp_avg"], memory["exp_avg_sq"]
        if frozen:  # the gradient is momentum by now
            average.copy_(gradient).mul_(1 - beta1)
        else:
            average.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        counted = min(memory["step"], self._warmup_steps)
        scale = (square / (1 - beta2**counted)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1 - beta1 ** memory["step"])
        parameter.addcdiv_(average, scale, value=-rate)
