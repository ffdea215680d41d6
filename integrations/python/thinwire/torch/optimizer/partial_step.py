"""step_partly: an optimizer's step for some of its parameters only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire import errors


def step_partly(
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Any],
    parameters: set[torch.Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """Steps only these, by `step`, with the hyperparameters of `groups`.

    InvalidArgumentError for an optimizer that keeps state for a whole param group, since that
    couples its parameters."""
    chosen = []
    for group in groups:
        mine = [p for p in group["params"] if p in parameters]
        if mine:
            chosen.append({**group, "params": mine})
    before = [{**group} for group in chosen]
    everything = optimizer.param_groups
    optimizer.param_groups = chosen
    try:
        step()
    finally:
        optimizer.param_groups = everything
    for group, was in zip(chosen, before, strict=True):
        for key, value in was.items():
            if key != "params" and group[key] is not value:
                raise errors.InvalidArgumentError(
                    f"{type(optimizer).__name__} keeps '{key}' for a whole param group, "
                    "which couples parameters; use policy='wfbp'"
                )
