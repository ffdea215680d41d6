"""1-bit Adam: Adam whose momentum is exchanged compressed after its variance is frozen.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", arXiv 2102.02888, section 4, algorithm 1. The optimizer is torch's: step() is torch's during
the warm-up, and the paper's afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.errors import InvalidArgumentError
from thinwire.torch import private
from thinwire.torch.optimizer.wrapped_optimizer import loss_of


class OneBitAdam:
    """Drives a torch.optim.Adam or AdamW whose momentum belongs to an exchange."""

    def __init__(self, optimizer: Optimizer, warm_up_steps: int | None) -> None:
        """InvalidArgumentError for an optimizer whose step the paper does not cover."""
        if warm_up_steps is None:
            raise InvalidArgumentError(
                f"{type(optimizer).__name__} needs warm_up_steps: its gradients go in fp32 for so "
                "many steps, until its variance is frozen; give 15 to 20 % of the run's steps"
            )
        self.optimizer, self.warm_up_steps = optimizer, int(warm_up_steps)
        betas = {group["betas"] for group in optimizer.param_groups}
        if len(betas) > 1:
            raise InvalidArgumentError(
                f"the optimizer's param groups have betas {sorted(betas)}, expected one pair; make "
                "them the same, since the exchange has one momentum"
            )
        self.beta = betas.pop()[0]
        for number, group in enumerate(optimizer.param_groups):
            _check_group(optimizer, number, group)

    def install(self, frozen: Callable[[], bool]) -> None:
        """Replace the optimizer's step(). frozen: returns whether the last backward pass gave
        momentum in place of gradients."""
        own_step = self.optimizer.step
        later = Optimizer.profile_hook_step(self._step_frozen)

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = loss_of(closure)
            if frozen():
                later(self.optimizer)
            else:
                own_step()
            return loss

        private.replace_step(self.optimizer, step)

    def momentum_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the momentum in the exchange's units, sums of gradients:
        exp_avg / (1 - betas[0])."""
        average = self.optimizer.state.get(parameter, {}).get("exp_avg")
        return None if average is None else average / (1 - self.beta)

    @torch.no_grad()
    def _step_frozen(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]
    ) -> None:
        (beta1, beta2), memory = group["betas"], self.optimizer.state[parameter]
        if not memory:  # it had no gradient during the warm-up
            memory["step"] = torch.zeros((), dtype=torch.float32)
            memory["exp_avg"] = torch.zeros_like(parameter)
            memory["exp_avg_sq"] = torch.zeros_like(parameter)
        memory["step"] += 1
        memory["exp_avg"].copy_(momentum).mul_(1 - beta1)
        step = float(memory["step"])
        counted = min(step, self.warm_up_steps)
        scale = (memory["exp_avg_sq"] / (1 - beta2**counted)).sqrt_().add_(group["eps"])
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(memory["exp_avg"], scale, value=-lr / (1 - beta1**step))


def is_adam(optimizer: object) -> bool:
    """Return whether the optimizer keeps two averages, as Adam does."""
    return isinstance(optimizer, Optimizer) and all("betas" in g for g in optimizer.param_groups)


def _check_group(optimizer: Optimizer, number: int, group: dict[str, Any]) -> None:
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise InvalidArgumentError(
            f"codec onebit got a {type(optimizer).__name__}, expected torch.optim.SGD, Adam or "
            "AdamW; take one of these, or int4, which leaves the momentum to the optimizer"
        )
    if group["weight_decay"] and not decoupled:
        raise InvalidArgumentError(
            f"param group {number} has weight_decay={group['weight_decay']} in Adam, expected 0: "
            "it would enter the frozen variance; take torch.optim.AdamW"
        )
    for key in ("amsgrad", "maximize"):
        if group.get(key):
            raise InvalidArgumentError(
                f"param group {number} has {key}=True, expected False: 1-bit Adam has none"
            )
