"""Errors for optimizers, arguments and uses that a compressed plain module does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_kind, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.gradient_exchange import GradientExchange

Names = Mapping[torch.Tensor, str]


def check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "LBFGS couples all parameters and calls its closure many times; leave optimizer= out, "
            "which puts the means into .grad, or take an optimizer that steps each parameter for "
            "itself"
        )


def check_policy(optimizer: Optimizer, policy: str) -> None:
    """Under p3 the optimizer must be able to step a few parameters at a time."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if policy == "p3" and "ZeroRedundancyOptimizer" in kinds:
        raise InvalidArgumentError(
            "ZeroRedundancyOptimizer steps all parameters of its rank at once, and p3 steps each "
            "layer when its means are there; use policy='wfbp'"
        )


def check_trained(model: torch.nn.Module, names: Names) -> None:
    """The model must have parameters to train."""
    if not names:
        raise InvalidArgumentError(
            f"compress got a {type(model).__name__} without trained parameters, expected some; "
            "unfreeze those that will be trained before the call"
        )


def check_reduced(
    model: torch.nn.Module,
    names: Collection[torch.Tensor],
    fix: str = "close() that, and compress the model again",
) -> None:
    """All parameters that are trained now must have been trained when compress() was called."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in names:
            raise InvalidArgumentError(
                f"parameter '{name}' is trained now, and was frozen or another tensor when its "
                "model was compressed (load_state_dict(assign=True) makes other tensors), so its "
                f"gradient is not reduced; {fix}"
            )


def check_reduced_once(
    model: torch.nn.Module, names: Names, ddp: torch.nn.parallel.DistributedDataParallel
) -> None:
    """Raise InvalidArgumentError if DDP reduces gradients of a model that was compressed as a plain
    module."""
    for name, parameter in ddp.module.named_parameters():
        if parameter in names and name not in ddp.parameters_to_ignore:
            raise InvalidArgumentError(
                f"compress got a {type(model).__name__} that is a DistributedDataParallel's, whose "
                f"gradients, such as that of '{names[parameter]}', DDP reduces as well, "
                "uncompressed; call compress(ddp) on what DistributedDataParallel() returned, and "
                "not on its module, or leave DistributedDataParallel out"
            )


def check_parameters(optimizer: Optimizer, names: Names) -> None:
    """The optimizer must have exactly the trained parameters of the model."""
    check_own(optimizer, names, "pass the model that they belong to")
    check_all(
        optimizer,
        names,
        "step() gives the means to its own parameters alone; make one optimizer of all that are "
        "trained, in several groups if need be, and freeze the others, or leave optimizer= out, "
        "which puts the means into .grad for any number of optimizers",
    )


def check_own(optimizer: Optimizer, names: Iterable[torch.Tensor], fix: str) -> None:
    """All parameters that the optimizer trains must be in `names`."""
    ours = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    strangers = len(ours - set(names))
    if strangers:
        raise InvalidArgumentError(
            f"the optimizer has {strangers} parameter(s) that the model has not, expected "
            f"those of model.parameters(); {fix}"
        )


def check_all(optimizer: Optimizer, names: Names, why: str) -> None:
    """The optimizer must have all parameters of `names`."""
    theirs = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for parameter, name in names.items() if parameter not in theirs]
    if missing:
        raise InvalidArgumentError(
            f"the optimizer has no '{missing[0]}', one of {len(missing)} parameter(s) that the "
            f"model trains without it; {why}"
        )


def check_state_dict(state_dict: object) -> None:
    """It must have the form of an optimizer's state dict; torch itself checks only param_groups."""
    check_kind("state_dict", state_dict, Mapping, "what state_dict() gave")
    for key, kind in (("state", Mapping), ("param_groups", list)):
        check_kind(f"state_dict['{key}']", state_dict.get(key), kind, "what state_dict() gave")
    for number, group in enumerate(state_dict["param_groups"]):
        complete = isinstance(group, Mapping) and isinstance(group.get("params"), list)
        if not complete:
            raise wrong(f"state_dict['param_groups'][{number}]", group, "a dict with 'params'")


def check_gradients(
    optimizer: Optimizer, names: Names, model: torch.nn.Module | None = None
) -> None:
    """No parameter may have been unfrozen since compress(). model: names it in the error."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in names:
                if model is not None:
                    check_reduced(model, names)
                raise InvalidArgumentError(
                    "a parameter has a gradient that was frozen, or not there, when its model was "
                    "compressed; close() that, and compress the model again after unfreezing"
                )


def check_delay(delay: int, exchange: GradientExchange) -> None:
    """delay requires a fixed codec, and momentum that the optimizer owns."""
    if delay and exchange.automatic:
        raise InvalidArgumentError(
            "delay=1 goes with a codec that is chosen, got codec='auto'; see what `thinwire "
            "advise` recommends"
        )
    if delay and exchange.config.momentum:
        raise InvalidArgumentError(
            "delay=1 goes with momentum that the optimizer owns, got "
            f"momentum={exchange.config.momentum}; leave it to torch.optim.SGD"
        )
    if delay not in (0, 1):
        raise InvalidArgumentError(f"delay is {delay!r}, expected 0 or 1")


def check_delayed_hooks(hooked: bool) -> None:
    """A delayed step is made bucket by bucket, so that hooks would be called for each bucket."""
    if hooked:
        raise InvalidArgumentError(
            "the optimizer has step hooks, and with delay=1 they would be called for each bucket "
            "of a step; remove them (register_step_pre_hook, register_step_post_hook), or use "
            "delay=0"
        )


def check_can_synchronize(delayed: bool, exchange: GradientExchange) -> None:
    """synchronize() requires means that are gradients and may be changed before step()."""
    if exchange.momentum.paired:
        raise InvalidArgumentError(
            f"with momentum={exchange.config.momentum} the means are momentum, which clipping and "
            "unscaling would spoil; clip each rank's own gradients under no_sync(), or leave the "
            "momentum to the optimizer"
        )
    if delayed:
        raise InvalidArgumentError(
            "with delay=1 the means come after step(), so nothing can be done to them before; "
            "clip your own gradients under no_sync(), or use delay=0"
        )
