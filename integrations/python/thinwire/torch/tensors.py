"""The tensors that can be reduced, and the errors for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from thinwire.errors import InvalidArgumentError

_MAKE_DENSE = "use dense gradients (Embedding(sparse=False)) or .to_dense()"

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check(tensor: torch.Tensor, rank: int, name: Callable[[], str]) -> str:
    """The dtype's name. InvalidArgumentError unless it is dense, floating, and on the host or on a
    GPU."""

    def refuse(got: object, expected: str, mend: str) -> InvalidArgumentError:
        return _refusal(rank, name(), got, expected, mend)

    if not isinstance(tensor, torch.Tensor):
        raise refuse(type(tensor).__name__, "a torch.Tensor", "pass a tensor")
    if tensor.layout != torch.strided:
        raise refuse(f"layout {tensor.layout}", "a dense tensor", _MAKE_DENSE)
    if tensor.device.type not in ("cpu", "cuda"):
        raise refuse(f"device {tensor.device}", "device cpu or cuda", "move it with .cpu()")
    if tensor.dtype not in DTYPES:
        mend = "convert it, or reduce it with torch.distributed.all_reduce"
        raise refuse(f"dtype {tensor.dtype}", "float32, bfloat16 or float16", mend)
    return DTYPES[tensor.dtype]


def check_writable(tensor: torch.Tensor, rank: int, name: str) -> None:
    """InvalidArgumentError if elements share memory, so that results can't be written to them."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in dimensions):
        got = f"a tensor that was expanded, with strides {tensor.stride()}"
        raise _refusal(rank, name, got, "memory of its own for each element", "take .clone()")


def check_name(name: object) -> None:
    """InvalidArgumentError unless it is None or text that C can hold."""
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise InvalidArgumentError(f"name is {name!r}, expected text without NUL, or None")


def check_parameters(names: Mapping[torch.Tensor, str], rank: int) -> None:
    """check() of all parameters that are trained, by their names."""
    for parameter, name in names.items():
        if parameter.requires_grad:
            check(parameter, rank, lambda name=name: name)


def check_modules(model: torch.nn.Module, rank: int) -> None:
    """InvalidArgumentError if a module will make sparse gradients, which its dense parameters do
    not show."""
    for prefix, module in model.named_modules():
        embeds = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if embeds and module.sparse and module.weight.requires_grad:
            name = f"{prefix}.weight" if prefix else "weight"
            got = f"{type(module).__name__}(sparse=True)"
            raise _refusal(rank, name, got, "dense gradients", _MAKE_DENSE)


def _refusal(rank: int, name: str, got: object, expected: str, mend: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"rank {rank}, tensor '{name}': got {got}, expected {expected}; {mend}"
    )
