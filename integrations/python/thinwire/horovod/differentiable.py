"""The collectives that return a new tensor; autograd differentiates through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.errors import InvalidArgumentError
from thinwire.horovod import reductions, transfers
from thinwire.horovod.compression import Compression, Compressor
from thinwire.horovod.handles import names_of
from thinwire.horovod.ops import Average, Op, Sum
from thinwire.horovod.world import global_process_set, members_of, rank


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        handle = reductions.grouped_allreduce_async(tensors, name=name, **options)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handle = reductions.grouped_allreduce_async(gradients, **ctx.options)
        return None, None, *handle.wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: dict[str, Any]) -> Any:
        ctx.shape, ctx.process_set = tensor.shape, options["process_set"]
        return transfers.allgather_async(tensor, **options).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        mean = _mean(gradient, ctx.process_set)
        mine = torch.tensor([ctx.shape[0] if ctx.shape else 1])
        counts = transfers.allgather_async(mine, process_set=ctx.process_set).wait().tolist()
        return mean.split(counts)[members_of(ctx.process_set).rank].view(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, options: dict[str, Any]) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, options["process_set"]
        return transfers.broadcast_async(tensor, root_rank, **options).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        mean = _mean(gradient, ctx.process_set)
        return mean if rank() == ctx.root_rank else torch.zeros_like(mean), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: dict[str, Any]) -> Any:
        ctx.shape, ctx.process_set = tensor.shape, options["process_set"]
        result, ctx.came = transfers.alltoall_async(tensor, **options).wait()
        ctx.mark_non_differentiable(ctx.came)
        return result, ctx.came

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Send each row's gradient back. Rows that were not sent have no gradient."""
        handle = transfers.alltoall_async(gradient, ctx.came, process_set=ctx.process_set)
        mine = gradient.new_zeros(ctx.shape)
        back, _ = handle.wait()
        mine[: len(back)] = back
        return mine, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: dict[str, Any]) -> Any:
        ctx.shape, ctx.options = tensor.shape, options
        return transfers.reducescatter_async(tensor, **options).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        process_set = ctx.options["process_set"]
        whole = transfers.allgather_async(gradient, process_set=process_set).wait().view(ctx.shape)
        size = members_of(process_set).size
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        # As in Horovod: with respect to the mean of all ranks' losses, as with an allreduce.
        return whole * (factor * size if ctx.options["op"] is Sum else factor), None


def _mean(gradient: torch.Tensor, process_set: Any) -> torch.Tensor:
    """Return Horovod's gradient of a gather or broadcast: with respect to the mean of the
    losses."""
    return reductions.allreduce_async(gradient, op=Average, process_set=process_set).wait()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Reduce the tensors of all ranks into a new one, bit-identical on all ranks.

    Args:
        tensor: any shape, strides and dtype; the same shape and dtype on all ranks.
        average: Horovod's older argument for op=Average (True) or Sum (False).
        name: equal on all ranks, which may make calls with named float tensors in different orders.
            With a lossy compression, calls with the same name share a residual. None: calls match
            by their order.
        compression: for averages and sums of float32, bfloat16 and float16; others are exact.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: a factor on the tensor.
        postscale_factor: a factor on the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: an argument is not valid.
        MismatchError: the ranks' calls differ.
        TimeoutError: a rank did not make the call in time.
        PeerLostError: a rank is lost.
    """
    (result,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors together, as allreduce(). name: of the group of tensors."""
    reductions.check_tensors(tensors)
    asked = reductions.how(op, average, compression, prescale_factor, postscale_factor, process_set)
    options = {
        "op": asked.op, "compression": compression, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor, "process_set": process_set,
    }  # fmt: skip
    if not _wants_gradient(*tensors):
        return reductions.grouped_allreduce_async(tensors, name=name, **options).wait()
    if asked.op not in (Op.AVERAGE, Op.SUM):
        raise InvalidArgumentError(
            f"op is {asked.op} and a tensor requires a gradient, expected Average or Sum; pass "
            "tensor.detach()"
        )
    return list(_AllReduce.apply(options, name, *tensors))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks in the first dimension, in which their sizes may differ;
    scalars become a vector. Not compressed.

    Raises:
        MismatchError: on every rank: dtypes or other dimensions differ.
        Error: the other errors of allreduce().
    """
    options = {"name": name, "process_set": process_set}
    if not _wants_gradient(tensor):
        return transfers.allgather_async(tensor, **options).wait()
    return _AllGather.apply(tensor, options)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors together, as allgather(). name: of the group of tensors."""
    reductions.check_tensors(tensors)
    if not _wants_gradient(*tensors):
        return transfers.grouped_allgather_async(tensors, name, process_set).wait()
    named = zip(tensors, names_of(name, len(tensors)), strict=True)
    return [allgather(*each, process_set) for each in named]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Return the tensor of rank `root_rank`; all ranks pass one of the same shape and dtype. Not
    compressed. Raises the errors of allgather()."""
    options = {"name": name, "process_set": process_set}
    if not _wants_gradient(tensor):
        return transfers.broadcast_async(tensor, root_rank, **options).wait()
    return _Broadcast.apply(tensor, root_rank, options)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of each rank's tensor to every rank. Not compressed. Raises the errors of
    allgather().

    Args:
        tensor: its rows go to the ranks, in rank order.
        splits: the number of rows for each rank, in rank order; None: the same number for each.
        name: equal on all ranks.
        process_set: the ranks that take part.

    Returns:
        The received rows, in the order of the ranks that sent them; with splits also the number of
        rows from each rank, as int32.
    """
    options = {"splits": splits, "name": name, "process_set": process_set}
    if _wants_gradient(tensor):
        found = _AllToAll.apply(tensor, options)
    else:
        found = transfers.alltoall_async(tensor, **options).wait()
    return found[0] if splits is None else found


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of what allreduce() would return. All ranks get the same number of
    rows of the first dimension; the first ranks get one more if it does not divide evenly. The
    arguments and errors are those of allreduce()."""
    asked = reductions.how(op, None, compression, prescale_factor, postscale_factor, process_set)
    options = {
        "name": name, "compression": compression, "op": asked.op,
        "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": process_set,
    }  # fmt: skip
    if not _wants_gradient(tensor):
        return transfers.reducescatter_async(tensor, **options).wait()
    return _ReduceScatter.apply(tensor, options)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors together, as reducescatter(). name: of the group of tensors."""
    reductions.check_tensors(tensors)
    if not _wants_gradient(*tensors):
        return transfers.grouped_reducescatter_async(
            tensors, name, op, process_set, prescale_factor, postscale_factor, compression
        ).wait()
    scaling = prescale_factor, postscale_factor
    named = zip(tensors, names_of(name, len(tensors)), strict=True)
    return [reducescatter(*each, compression, op, process_set, *scaling) for each in named]


def _wants_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
