"""The tensors that can be reduced, and the errors for the others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.errors import InvalidArgumentError

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check(tensor: torch.Tensor, rank: int, name: Callable[[], str]) -> str:
    """The dtype's name. InvalidArgumentError unless it is dense, floating, and on the host or on a
    GPU."""

    def refuse(got: object, expected: str, mend: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {rank}, tensor '{name()}': got {got}, expected {expected}; {mend}"
        )

    if not isinstance(tensor, torch.Tensor):
        raise refuse(type(tensor).__name__, "a torch.Tensor", "pass a tensor")
    if tensor.layout != torch.strided:
        mend = "use dense gradients (Embedding(sparse=False)) or .to_dense()"
        raise refuse(f"layout {tensor.layout}", "a dense tensor", mend)
    if tensor.device.type not in ("cpu", "cuda"):
        raise refuse(f"device {tensor.device}", "device cpu or cuda", "move it with .cpu()")
    if tensor.dtype not in DTYPES:
        mend = "convert it, or reduce it with torch.distributed.all_reduce"
        raise refuse(f"dtype {tensor.dtype}", "float32, bfloat16 or float16", mend)
    return DTYPES[tensor.dtype]
