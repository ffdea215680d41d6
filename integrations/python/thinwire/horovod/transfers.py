"""allgather, broadcast, alltoall, sparse_allreduce_async and reducescatter.

All but the last are not compressed, support any type, and use torch.distributed. reducescatter uses
thinwire's engine for the types that it can reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.arguments import check_kind, is_whole, wrong
from thinwire.horovod.compression import Compression, Compressor
from thinwire.horovod.exact import Label
from thinwire.horovod.handles import Handle, in_place, names_of, of_future, of_several, start
from thinwire.horovod.ops import Op, op_of
from thinwire.horovod.reductions import (
    How,
    by_engine,
    check_target,
    check_tensor,
    check_tensors,
    how,
    scaled,
    start_all_reduce,
    start_by_engine,
)
from thinwire.horovod.world import Members, global_process_set, members_of
from thinwire.torch import tensors as checks


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """Like allgather(), but return a handle at once."""
    check_tensor("tensor", tensor)
    label = Label("allgather", name, str(tensor.dtype))
    return _gather(tensor, label, members_of(process_set))


def _gather(tensor: torch.Tensor, label: Label, members: Members) -> Handle:
    """label: without shapes."""
    rows = tensor.detach().reshape(-1) if tensor.dim() == 0 else tensor.detach()
    label = label._replace(shapes=(tuple(rows.shape),))

    def make() -> Handle:
        future = members.exact.all_gather(label, rows.to("cpu", copy=True))
        return of_future(future, lambda found: found.to(tensor.device))

    return start(members, label.call, label.name, make)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Handle:
    """Like grouped_allgather(), but return at once, with a handle whose result is the list."""
    check_tensors(tensors)
    named = zip(tensors, names_of(name, len(tensors)), strict=True)
    return of_several([allgather_async(*each, process_set) for each in named])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: Any = global_process_set,
) -> Handle:
    """Start to average or sum sparse tensors, by a gather of all ranks' indices and values.

    Args:
        tensor: of layout torch.sparse_coo, the same shape and dtype on all ranks.
        name: equal on all ranks.
        op: Average (default) or Sum.
        process_set: the ranks that take part.

    Returns:
        A handle, which may be called in place of synchronize(handle). Its result is not coalesced:
        an index of several ranks appears several times.

    Raises:
        InvalidArgumentError: an argument is not valid. The handle raises MismatchError,
            TimeoutError or PeerLostError.
    """
    check_kind("tensor", tensor, torch.Tensor, "a torch.Tensor")
    if tensor.layout != torch.sparse_coo:
        raise wrong("tensor.layout", tensor.layout, "torch.sparse_coo; use allreduce_async()")
    kind, members = op_of(op), members_of(process_set)
    if kind not in (Op.AVERAGE, Op.SUM):
        raise wrong("op", op, "Average or Sum, as of a gather of indices and values")
    checks.check_name(name)
    mine = tensor.detach().coalesce()
    detail = f"{kind.name.lower()} {tensor.dtype} {tuple(tensor.shape)}"
    handles = [
        _gather(part, Label(f"sparse_allreduce of {what}", name, detail), members)
        for what, part in (("indices", mine.indices().t()), ("values", mine.values()))
    ]
    both = of_several(handles)

    def wait() -> torch.Tensor:
        indices, values = both.wait()
        if kind is Op.AVERAGE:
            whole = not (values.is_floating_point() or values.is_complex())
            values = torch.div(values, members.size, rounding_mode="trunc" if whole else None)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return Handle(both.done, wait)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Handle:
    """Like broadcast(), but return a handle at once."""
    check_tensor("tensor", tensor)
    members = members_of(process_set)
    check_root(root_rank, members)
    detail = f"from rank {root_rank} {tensor.dtype}"
    label = Label("broadcast", name, detail, (tuple(tensor.shape),))

    def make() -> Handle:
        host = tensor.detach().to("cpu", copy=True)
        future = members.exact.broadcast(label, host, root_rank)
        return of_future(future, lambda found: found.to(tensor.device))

    return start(members, "broadcast", name, make)


def check_root(root_rank: object, members: Members) -> None:
    """InvalidArgumentError unless it is the job's rank of a member."""
    if not is_whole(root_rank) or root_rank not in members.ranks:
        raise wrong("root_rank", root_rank, f"one of the ranks {members.ranks}")


def broadcast_async_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Like broadcast_async(), but in place: synchronize() writes the result and returns the
    tensor."""
    check_target("tensor", tensor)
    return in_place(tensor, broadcast_async(tensor, *arguments, **options))


def broadcast_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Like broadcast(), but in place. Return the tensor."""
    return broadcast_async_(tensor, *arguments, **options).wait()


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Handle:
    """Like alltoall(), but return at once, with a handle whose result is always the pair."""
    check_tensor("tensor", tensor)
    members = members_of(process_set)
    counts = _splits_of(tensor, splits, members)
    label = Label("alltoall", name, str(tensor.dtype), (tuple(tensor.shape), tuple(counts)))
    where = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def finish(found: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        came = torch.tensor(found[1], dtype=torch.int32, device=where)
        return found[0].to(tensor.device), came

    def make() -> Handle:
        host = tensor.detach().to("cpu", copy=True)
        return of_future(members.exact.all_to_all(label, host, counts), finish)

    return start(members, "alltoall", name, make)


def _splits_of(tensor: torch.Tensor, splits: object, members: Members) -> list[int]:
    """Return the number of rows for each member. InvalidArgumentError if the tensor has another
    number of rows."""
    if tensor.dim() == 0:
        raise wrong("tensor", tensor, "one with a first dimension, whose rows go to the ranks")
    rows, size = len(tensor), members.size
    if splits is None:
        if rows % size:
            raise wrong("tensor", tensor.shape, f"a multiple of {size} rows, or splits=")
        return [rows // size] * size
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    whole = isinstance(counts, (list, tuple)) and all(is_whole(n) and n >= 0 for n in counts)
    if not whole or len(counts) != size or sum(counts) > rows:
        raise wrong("splits", splits, f"{size} whole numbers of rows, {rows} in all at most")
    return list(map(int, counts))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
) -> Handle:
    """Like reducescatter(), but return a handle at once."""
    check_tensor("tensor", tensor)
    asked = how(op, None, compression, prescale_factor, postscale_factor, process_set)
    if tensor.dim() == 0:
        raise wrong("tensor", tensor, "one with a first dimension, which the ranks share out")
    scatters = by_engine(tensor, asked.op) and tensor.numel() > 0
    make = _scatter if scatters else _reduce_and_cut
    return start(asked.members, "reducescatter", name, lambda: make(tensor, name, asked))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, *arguments: Any, **options: Any
) -> Handle:
    """Like grouped_reducescatter(), but return at once, with a handle whose result is the list."""
    check_tensors(tensors)
    named = zip(tensors, names_of(name, len(tensors)), strict=True)
    return of_several([reducescatter_async(*each, *arguments, **options) for each in named])


def counts_of(rows: int, size: int) -> list[int]:
    """Return the number of rows of each rank: equal, with one more on the first ranks if `rows`
    does not divide evenly."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _scatter(rows: torch.Tensor, name: str | None, asked: How) -> Handle:
    """Reduce-scatter with the engine, which needs parts of equal size: pad short parts with
    zeros."""
    counts = counts_of(rows.shape[0], asked.members.size)
    with torch.no_grad():
        whole = rows.new_zeros((len(counts), counts[0], *rows.shape[1:]))
        for part, values in zip(whole, rows.split(counts), strict=True):
            part[: len(values)] = scaled(values, asked.prescale)
    rank = asked.members.rank
    return start_by_engine(whole, True, name, asked, lambda mine: mine[: counts[rank]])


def _reduce_and_cut(rows: torch.Tensor, name: str | None, asked: How) -> Handle:
    handle = start_all_reduce(rows, None if name is None else f"reducescatter {name}", asked)
    counts = counts_of(rows.shape[0], asked.members.size)
    return Handle(handle.done, lambda: handle.wait().split(counts)[asked.members.rank])
