"""Converts MXNet's and torch's descriptions of a store's optimizer and codec into the library's
specs."""

from __future__ import annotations

import os
from typing import Any

import torch

from thinwire.arguments import is_text, plain
from thinwire.errors import InvalidArgumentError

# Names of an optimizer's numbers: MXNet's or torch's, and the library's.
_NUMBERS = {
    "learning_rate": "lr", "lr": "lr", "momentum": "momentum", "nesterov": "nesterov",
    "wd": "weight_decay", "weight_decay": "weight_decay", "beta1": "beta1", "beta2": "beta2",
    "epsilon": "eps", "eps": "eps", "lr_decay": "lr_decay", "rescale_grad": "rescale",
}  # fmt: skip
# Numbers of torch's optimizers that must have these values; other numbers do not change results.
_FIXED = {"dampening": 0, "amsgrad": False, "maximize": False, "initial_accumulator_value": 0}
_TORCH_OPTIMIZERS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.SparseAdam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
}


def optimizer_spec(optimizer: str | torch.optim.Optimizer, **numbers: float) -> str:
    """Return the library's spec for set_optimizer()'s arguments: "sgd:lr=0.1,momentum=0.9"."""
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer, taken = _of_torch(optimizer)
        numbers = taken | numbers
    if not isinstance(optimizer, str):
        raise InvalidArgumentError(f"the optimizer is {optimizer!r}, expected a name such as 'sgd'")
    name = optimizer.lower()
    if name == "nag":
        name, numbers = "sgd", {"nesterov": True} | numbers
    words = {}
    for number, value in ((number, plain(value)) for number, value in numbers.items()):
        if number not in _NUMBERS or not isinstance(value, (int, float)):
            expected = ", ".join(_NUMBERS)
            raise InvalidArgumentError(
                f"{name}: {number}={value!r}, expected a number for one of {expected}"
            )
        words[_NUMBERS[number]] = int(value) if isinstance(value, bool) else repr(value)
    text = ",".join(f"{word}={value}" for word, value in words.items())
    return f"{name}:{text}" if text else name


def _of_torch(optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, float]]:
    """Return the name and numbers of a torch optimizer that servers can apply."""
    name = _TORCH_OPTIMIZERS.get(type(optimizer))
    if name is None or len(optimizer.param_groups) != 1:
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups is no optimizer "
            "that servers apply, expected SGD, Adam, AdamW, Adagrad or SparseAdam of torch.optim "
            "with one group"
        )
    numbers: dict[str, float] = {}
    for number, value in optimizer.param_groups[0].items():
        if number == "betas":
            numbers["beta1"], numbers["beta2"] = value
        elif value != _FIXED.get(number, value):
            raise InvalidArgumentError(
                f"{type(optimizer).__name__}: {number}={value!r}, expected {_FIXED[number]!r} "
                "where servers apply it"
            )
        elif number == "decoupled_weight_decay":
            name = "adamw" if value else name
        elif number in _NUMBERS:
            numbers[number] = value if isinstance(value, bool) else float(value)
    return name, numbers


def codec_spec(compression: str | dict[str, Any]) -> bytes:
    """Return the library's spec for set_gradient_compression()'s argument: "int4:down=fp32"."""
    words = compression if isinstance(compression, dict) else {"type": compression}
    kind = words.get("type")
    if kind == "1bit":
        raise InvalidArgumentError(
            "MXNet's '1bit' sends plus or minus 1, whatever the gradients are, and no codec does; "
            "expected {'type': '2bit', 'threshold': 0.5}, or a codec such as 'int4'"
        )
    if set(words) <= {"type", "threshold"} and kind == "2bit":
        threshold = plain(words.get("threshold", 0.5))
        if isinstance(threshold, (int, float)) and not isinstance(threshold, bool):
            return f"ternary:threshold={threshold},down=fp32".encode()
    elif set(words) == {"type"}:
        return checked_text("compression", kind)
    raise InvalidArgumentError(
        f"compression is {compression!r}, expected a codec such as 'int4', or "
        "{'type': '2bit', 'threshold': 0.5}"
    )


def checked_text(what: str, value: object) -> bytes:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not is_text(value) or not value:
        raise InvalidArgumentError(
            f"{what} is {value!r}, expected text without NUL that can be UTF-8"
        )
    return value.encode()
