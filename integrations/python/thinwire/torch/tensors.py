"""Checks of tensors, parameters and models: which can be reduced, and the errors for the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from thinwire.errors import InvalidArgumentError
from thinwire.torch.private import plain_name

_MAKE_DENSE = "use dense gradients (Embedding(sparse=False)) or .to_dense()"

_UNMADE = (UninitializedParameter, UninitializedBuffer)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def zeros(*size: int) -> torch.Tensor:
    """Return zeros in float32 on the host. Memory that the library reads or writes must not depend
    on torch.set_default_dtype() and torch.set_default_device()."""
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def empty(numel: int) -> torch.Tensor:
    """Return an uninitialized float32 tensor on the host, for the reason given in zeros()."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def check(tensor: torch.Tensor, rank: int, name: Callable[[], str]) -> str:
    """Return the dtype's name. InvalidArgumentError unless the tensor is a plain, dense tensor of
    float32, bfloat16 or float16 on the host or a GPU."""

    def refuse(got: object, expected: str, mend: str) -> InvalidArgumentError:
        return _refusal(rank, name(), got, expected, mend)

    if not isinstance(tensor, torch.Tensor):
        raise _no_tensor(rank, name(), tensor)
    check_made(tensor, rank, name)
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, torchao's: other tensors own the memory
        raise refuse(
            f"a {type(tensor).__name__}, which is made of other tensors", "a plain tensor",
            "pass its to_local(); compress() takes a model with tensor parallelism after "
            "fully_shard(), and sites need whole parameters, as under DistributedDataParallel",
        )  # fmt: skip
    if tensor.layout != torch.strided:
        raise refuse(f"layout {tensor.layout}", "a dense tensor", _MAKE_DENSE)
    if tensor.device.type not in ("cpu", "cuda"):
        fix = "give it values, by to_empty()" if tensor.is_meta else "move it with .cpu()"
        raise refuse(f"device {tensor.device}", "device cpu or cuda", fix)
    if tensor.dtype not in DTYPES:
        raise refuse(f"dtype {tensor.dtype}", "float32, bfloat16 or float16", _mend_of(tensor))
    return DTYPES[tensor.dtype]


def check_made(tensor: torch.Tensor, rank: int, name: Callable[[], str]) -> None:
    """InvalidArgumentError if the tensor belongs to a lazy module that has seen no input yet."""
    if isinstance(tensor, _UNMADE):
        got = "a tensor of a lazy module, which has no shape yet"
        fix = "run one forward pass, of inputs that have the same shape on every rank, before"
        raise _refusal(rank, name(), got, "one that has elements", fix)


def check_replica(model: torch.nn.Module, rank: int) -> None:
    """InvalidArgumentError unless the model's parameters and buffers can be copied between
    ranks."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        check_made(tensor, rank, lambda name=name: name)
        if tensor.layout != torch.strided or tensor.is_meta:
            got = f"layout {tensor.layout} on {tensor.device}"
            fix = "make it dense, give it values by to_empty(), or keep it out of the model"
            raise _refusal(rank, name, got, "a dense tensor with values", fix)


def _mend_of(tensor: torch.Tensor) -> str:
    """Return the advice for a tensor of another dtype."""
    if tensor.is_complex():
        return "pass torch.view_as_real(tensor), which shares its memory"
    if tensor.is_floating_point():
        return (
            "convert it with .float(), or reduce it with torch.distributed.all_reduce, which keeps "
            "its precision"
        )
    return (
        "reduce it with torch.distributed.all_reduce, which is exact, as counts and masks must be"
    )


def shape_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the shapes as text, which strict=True compares: "10x100", or "10x100,5" for two."""
    return ",".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)


def check_writable(tensor: torch.Tensor, rank: int, name: str) -> None:
    """InvalidArgumentError if elements share memory, so that results cannot be written to them."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in dimensions):
        got = f"a tensor that was expanded, with strides {tensor.stride()}"
        raise _refusal(rank, name, got, "memory of its own for each element", "take .clone()")


def check_reducible(tensor: torch.Tensor, rank: int, name: str | None) -> str:
    """Return the dtype's name. InvalidArgumentError unless all_reduce can reduce it in place."""
    dtype = check(tensor, rank, lambda: name or "all_reduce")
    check_writable(tensor, rank, name or "all_reduce")
    return dtype


def is_name(name: object) -> bool:
    """Return whether it is text that a C string can hold."""
    return isinstance(name, str) and "\0" not in name


def check_name(name: object) -> None:
    """InvalidArgumentError unless it is None or text that a C string can hold."""
    if name is not None and not is_name(name):
        raise InvalidArgumentError(f"name is {name!r}, expected text without NUL, or None")


def check_named(named: object, rank: int) -> None:
    """InvalidArgumentError unless it is a dict of tensors by name, without those of lazy modules.
    Dtypes are not checked."""
    if not isinstance(named, Mapping):
        raise InvalidArgumentError(
            f"rank {rank}: got a {type(named).__name__}, expected a dict of tensors by name, such "
            "as dict(model.named_parameters())"
        )
    for name, tensor in named.items():
        if not is_name(name):
            raise InvalidArgumentError(
                f"rank {rank}: {name!r} is no name, expected text without NUL"
            )
        if not isinstance(tensor, torch.Tensor):
            raise _no_tensor(rank, name, tensor)
        check_made(tensor, rank, lambda name=name: name)


def check_parameters(names: Mapping[torch.Tensor, str], rank: int) -> None:
    """InvalidArgumentError unless `names` is a dict of parameters and their names, and all trained
    parameters pass check()."""
    if not isinstance(names, Mapping):
        raise InvalidArgumentError(
            f"rank {rank}: names is a {type(names).__name__}, expected a dict {{parameter: name}}; "
            "compress(ddp, codec=...) makes it from the model"
        )
    for parameter, name in names.items():
        if not is_name(name) or not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(
                f"rank {rank}: names has {type(parameter).__name__}: {name!r}, expected a "
                "parameter and its name, text without NUL"
            )
        check_made(parameter, rank, lambda name=name: name)
        if parameter.requires_grad:
            check(parameter, rank, lambda name=name: name)


def check_modules(model: torch.nn.Module, rank: int) -> None:
    """InvalidArgumentError if a module makes sparse gradients, which its dense parameters do not
    show."""
    for prefix, module in model.named_modules():
        embeds = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if embeds and module.sparse and module.weight.requires_grad:
            name = f"{prefix}.weight" if prefix else "weight"
            got = f"{type(module).__name__}(sparse=True)"
            raise _refusal(rank, name, got, "dense gradients", _MAKE_DENSE)


def structure_of(model: torch.nn.Module) -> dict[str, set[str]]:
    """Return the names of parameters by the words of rules.STRUCTURES."""
    named = {plain_name(name): p for name, p in model.named_parameters()}
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, embeddings)}
    return {
        "1d": {name for name, p in named.items() if p.ndim <= 1},
        "embedding": {name for name, p in named.items() if id(p) in weights},
    }


def _no_tensor(rank: int, name: str, got: object) -> InvalidArgumentError:
    return _refusal(rank, name, type(got).__name__, "a torch.Tensor", "pass a tensor")


def _refusal(rank: int, name: str, got: object, expected: str, mend: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"rank {rank}, tensor '{name}': got {got}, expected {expected}; {mend}"
    )
