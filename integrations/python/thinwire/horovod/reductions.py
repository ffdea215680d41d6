"""allreduce and grouped_allreduce in their variants: in place or not, blocking or asynchronous.

thinwire's engine averages and sums float32, bfloat16 and float16, in fp32, with any codec;
`Compression.none` is exact. All other reductions use torch.distributed, in the tensor's own
type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.arguments import check_kind
from thinwire.errors import InvalidArgumentError
from thinwire.horovod.compression import Compression, Compressor, check_compression
from thinwire.horovod.exact import Label
from thinwire.horovod.handles import (
    Handle,
    in_place,
    names_of,
    of_future,
    of_several,
    put,
    start,
)
from thinwire.horovod.joining import EngineCall, name_of
from thinwire.horovod.ops import Op, check_factor, op_of
from thinwire.horovod.world import Members, global_process_set, members_of, rank
from thinwire.torch import tensors


class How(NamedTuple):
    """The checked arguments that all reductions have."""

    op: Op
    codec: str
    prescale: float
    postscale: float
    members: Members


def how(
    op: Op | None,
    average: bool | None,
    compression: Compressor,
    prescale_factor: float,
    postscale_factor: float,
    process_set: object,
) -> How:
    """Check the arguments. Raises the errors that the calls document."""
    check_factor("prescale_factor", prescale_factor)
    check_factor("postscale_factor", postscale_factor)
    check_compression(compression)
    codec, members = compression.single_codec, members_of(process_set)
    return How(op_of(op, average), codec, prescale_factor, postscale_factor, members)


def check_tensor(name: str, tensor: object) -> None:
    """InvalidArgumentError unless it is a dense tensor."""
    check_kind(name, tensor, torch.Tensor, "a torch.Tensor")
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name} has layout {tensor.layout}, expected a dense tensor; use .to_dense()"
        )


def check_target(name: str, tensor: object) -> None:
    """InvalidArgumentError unless it is a dense tensor that results can be written to."""
    check_tensor(name, tensor)
    tensors.check_writable(tensor, rank(), name)


def check_tensors(got: object) -> None:
    """InvalidArgumentError unless it is a list of dense tensors."""
    check_kind("tensors", got, (list, tuple), "a list of tensors")
    for number, tensor in enumerate(got):
        check_tensor(f"tensors[{number}]", tensor)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return tensor * factor. Integers are multiplied in float64 and rounded towards zero."""
    if factor == 1.0:
        return tensor
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return ((tensor.double() if whole else tensor) * factor).to(tensor.dtype)


def by_engine(tensor: torch.Tensor, op: Op) -> bool:
    """Return whether thinwire's engine reduces it, and not torch.distributed."""
    return tensor.dtype in tensors.DTYPES and op in (Op.AVERAGE, Op.SUM)


def start_all_reduce(tensor: torch.Tensor, name: str | None, asked: How) -> Handle:
    """Return a handle whose result is a new tensor."""
    if tensor.is_complex() and asked.op not in (Op.AVERAGE, Op.SUM):
        raise InvalidArgumentError(
            f"op is {asked.op} and the tensor {tensor.dtype}, expected Average or Sum, since "
            "complex numbers have no order; reduce torch.view_as_real(tensor)"
        )
    make = _engine if by_engine(tensor, asked.op) else _exact
    return start(asked.members, "allreduce", name, lambda: make(tensor, name, asked))


def _engine(tensor: torch.Tensor, name: str | None, asked: How) -> Handle:
    with torch.no_grad():
        copy = tensor.clone(memory_format=torch.contiguous_format)
        mine = scaled(copy, asked.prescale)
    return start_by_engine(mine, False, name, asked, lambda found: found)


def start_by_engine(
    tensor: torch.Tensor,
    scatters: bool,
    name: str | None,
    asked: How,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Handle:
    """Return a handle of the result, postscaled after `finish`. The tensor is already prescaled,
    and this call may overwrite it."""
    members, on_gpu = asked.members, tensor.device.type == "cuda"
    shape, dtype = tuple(tensor.shape), tensor.dtype
    call = EngineCall(
        scatters, shape, name_of(dtype), on_gpu, asked.op.value, asked.codec, name
    )  # fmt: skip
    end = members.begin("engine", ("reducescatter" if scatters else "allreduce", name), call)
    work, result = call.start(tensor, members.group)

    def wait() -> torch.Tensor:
        try:
            work.wait()
        finally:
            end()
        return scaled(finish(result), asked.postscale)

    return Handle(work.is_completed, wait)


def _exact(tensor: torch.Tensor, name: str | None, asked: How) -> Handle:
    host = scaled(tensor.detach(), asked.prescale).to("cpu", copy=True)
    detail = f"{asked.op.name.lower()} {tensor.dtype}"
    label = Label("allreduce", name, detail, (tuple(tensor.shape),))
    future = asked.members.exact.all_reduce(label, host, asked.op)
    return of_future(future, lambda found: scaled(found, asked.postscale).to(tensor.device))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    compression: Compressor = Compression.none,
) -> Handle:
    """Like allreduce(), but return at once, with a handle for poll() and synchronize()."""
    check_tensor("tensor", tensor)
    asked = how(op, average, compression, prescale_factor, postscale_factor, process_set)
    return start_all_reduce(tensor, name, asked)


def allreduce_async_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Like allreduce_async(), but in place: synchronize() writes the result and returns the
    tensor."""
    check_target("tensor", tensor)
    return in_place(tensor, allreduce_async(tensor, *arguments, **options))


def allreduce_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Like allreduce(), but in place. Return the tensor."""
    return allreduce_async_(tensor, *arguments, **options).wait()


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    compression: Compressor = Compression.none,
) -> Handle:
    """Like grouped_allreduce(), but return at once, with a handle whose result is the list."""
    check_tensors(tensors)
    asked = how(op, average, compression, prescale_factor, postscale_factor, process_set)
    names = names_of(name, len(tensors))
    return of_several([start_all_reduce(*each, asked) for each in zip(tensors, names, strict=True)])


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], *arguments: Any, **options: Any
) -> Handle:
    """Like grouped_allreduce_async(), but in place."""
    check_tensors(tensors)
    for number, tensor in enumerate(tensors):
        check_target(f"tensors[{number}]", tensor)
    handle = grouped_allreduce_async(tensors, *arguments, **options)

    def wait() -> list[torch.Tensor]:
        return [put(*each) for each in zip(handle.wait(), tensors, strict=True)]

    return Handle(handle.done, wait)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *arguments: Any, **options: Any
) -> list[torch.Tensor]:
    """Like grouped_allreduce(), but in place. Return the tensors."""
    return grouped_allreduce_async_(tensors, *arguments, **options).wait()
