"""Momentum that moves from the optimizer into the exchange, which compresses it.

Error feedback on the bare gradient diverges at one bit; on the momentum it converges (1-bit Adam,
arXiv 2102.02888, section 4). topk below 1 % needs momentum correction for the elements that it has
not sent (DGC, arXiv 1712.01887, section 3). So the optimizer gets finished momentum in place of
gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_call, check_kind
from thinwire.errors import InvalidArgumentError

WEIGHT_DECAY = "thinwire_weight_decay"  # key of a param group whose weight decay has moved
_SAMPLE = 4096  # this many elements of a gradient are compared before a step

_paired: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class OwnedMomentum:
    """The momentum of an optimizer that belongs to an exchange.

    Its methods do nothing unless the exchange was created with momentum > 0, except that take()
    raises."""

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._optimizer: Optimizer | None = None
        self._moved: tuple[str, ...] = ()  # keys of param groups whose values must stay 0
        self._marks: dict[torch.Tensor, torch.Tensor] = {}
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}

    @property
    def paired(self) -> bool:
        """True if an optimizer's momentum belongs to the exchange."""
        return self._optimizer is not None

    def pair(self, optimizer: Optimizer, moved: tuple[str, ...] = ()) -> None:
        """Watch the gradients and param groups of this optimizer. moved: the keys of param groups
        that have moved; none for an optimizer that provides its momentum itself (1-bit Adam).
        InvalidArgumentError if it was paired before."""
        if optimizer in _paired:
            raise InvalidArgumentError(
                f"this {type(optimizer).__name__} is paired with an exchange of compress() "
                "already; make a new optimizer"
            )
        _paired.add(optimizer)
        self._optimizer, self._moved = optimizer, moved
        optimizer.register_step_pre_hook(self._before_step)

    def take(
        self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str | None]
    ) -> dict[str, torch.Tensor]:
        """Move momentum and weight decay out of an optimizer's param groups that still have them.
        Return its momentum buffers by name. See GradientExchange.take_momentum."""
        check_kind("optimizer", optimizer, Optimizer, "one of torch.optim")
        check_call("name_of", name_of)
        if not self._momentum:
            raise InvalidArgumentError("this state owns no momentum; make it with momentum=0.9")
        buffers = _take_over(optimizer, self._momentum, self._nesterov)
        if self._optimizer is None:
            self.pair(optimizer, ("momentum", "weight_decay"))
        named = {name_of(parameter): buffer for parameter, buffer in buffers.items()}
        return {name: buffer for name, buffer in named.items() if name is not None}

    def weight_decay_of(self, parameter: torch.Tensor) -> float:
        """Return the fraction of the parameter to add to its gradient before a submission."""
        if self._optimizer is None:
            return 0.0
        if parameter not in self._groups:  # groups may have been added to the optimizer
            groups = self._optimizer.param_groups
            self._groups = {p: group for group in groups for p in group["params"]}
        return self._groups.get(parameter, {}).get(WEIGHT_DECAY, 0.0)

    def check(self) -> None:
        """InvalidArgumentError if the exchange owns the momentum and no optimizer is paired, or if
        the optimizer has momentum or weight decay again. Call it before submitting gradients."""
        if self._optimizer is None:
            if self._momentum:
                raise InvalidArgumentError(
                    f"State(momentum={self._momentum}) is not paired with an optimizer; call "
                    "state.take_momentum(optimizer) before the first backward, or pass optimizer= "
                    "to compress()"
                )
            return
        for number, group in enumerate(self._optimizer.param_groups):
            for key in self._moved:
                if group.get(key, 0) != 0:
                    fix = (
                        "it belongs to the state; leave it at 0, and give a scheduler that cycles "
                        "it cycle_momentum=False"
                        if key == "momentum"
                        else f"set group['{WEIGHT_DECAY}'] instead"
                    )
                    raise InvalidArgumentError(
                        f"param group {number} has {key}={group[key]} again, expected 0 since "
                        f"take_momentum(optimizer); {fix}"
                    )

    def is_own(self, hook: object) -> bool:
        """Return whether this is the hook that pair() has registered."""
        return hook == self._before_step

    def mark(self, parameter: torch.Tensor, result: torch.Tensor) -> None:
        """Make the optimizer's next step raise if the result is changed before it. Call it after a
        wait."""
        if self._optimizer is not None:
            self._marks[parameter] = _mark_of(result)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        changed = [
            (_mark_of(parameter.grad) != mark).any()
            for parameter, mark in self._marks.items()
            if parameter.grad is not None
        ]
        if changed and torch.stack(changed).any():  # synchronizes with a GPU only once
            raise InvalidArgumentError(
                "gradients were changed between backward() and step(): they are momentum now, "
                "which clipping and unscaling would spoil. Under DDP clip by the options "
                "clip_value= or clip_norm=, which act before the exchange; leave GradScaler out"
            )


def has_moved(optimizer: Optimizer) -> bool:
    """Return whether momentum and weight decay of a param group belong to an exchange."""
    return any(WEIGHT_DECAY in group for group in optimizer.param_groups)


def _mark_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample of the tensor's elements, as bits, so that a NaN equals itself. A sample is
    enough: scaling changes every element, and clipping by value soon changes one of these."""
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)]
    return sample.to(torch.float32, copy=True).view(torch.int32)


def _check_group(number: int, group: dict[str, Any], momentum: float, nesterov: bool) -> None:
    def refuse(key: str, got: object, expected: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"param group {number} has {key}={got}, expected {expected} as the state has; make "
            "both the same"
        )

    if group.get("momentum", 0) not in (0, momentum):
        raise refuse("momentum", group["momentum"], momentum)
    if group.get("momentum", 0) and group.get("nesterov", False) != nesterov:
        raise refuse("nesterov", group["nesterov"], nesterov)
    if group.get("dampening", 0):
        raise refuse("dampening", group["dampening"], 0)
    if group.get("maximize", False) and group.get("weight_decay", 0):
        raise refuse("maximize with weight_decay", group["weight_decay"], 0)


def _take_over(
    optimizer: Optimizer, momentum: float, nesterov: bool
) -> dict[torch.Tensor, torch.Tensor]:
    """Move momentum and weight decay out of the param groups that still have them. Return the
    momentum buffers that the optimizer had, by parameter.

    InvalidArgumentError, with nothing changed, for an optimizer whose momentum is not SGD's."""
    if any("betas" in group or "lr_decay" in group for group in optimizer.param_groups):
        raise InvalidArgumentError(
            f"the momentum of {type(optimizer).__name__} can't be moved, expected torch.optim.SGD; "
            "Adam is for compress(ddp, codec='onebit', optimizer=adam, warm_up_steps=...)"
        )
    groups = [item for item in enumerate(optimizer.param_groups) if WEIGHT_DECAY not in item[1]]
    for number, group in groups:
        _check_group(number, group, momentum, nesterov)
    buffers = {}
    for _, group in groups:
        group[WEIGHT_DECAY] = group.get("weight_decay", 0.0)
        for key, value in (("momentum", 0), ("nesterov", False), ("weight_decay", 0)):
            if key in group:
                group[key] = value
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).pop("momentum_buffer", None)
            if buffer is not None:
                buffers[parameter] = buffer
    return buffers
