"""Agreement of all ranks of a process group on a few numbers or an object, by torch's own
collectives. Every rank makes each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")
_Group = dist.ProcessGroup | None  # None: the default group


def mean_of_ranks(values: Sequence[float], group: _Group) -> list[float]:
    world = dist.get_world_size(group)
    return [total / world for total in _reduce(values, dist.ReduceOp.SUM, group)]


def worst_of_ranks(values: Sequence[float], group: _Group) -> list[float]:
    """The largest of each value."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def from_rank_0(value: _T | None, group: _Group) -> _T:
    """The value that the group's first rank gave; picklable."""
    box = [value]
    dist.broadcast_object_list(box, dist.get_process_group_ranks(group)[0], group=group)
    return box[0]


def _reduce(values: Sequence[float], op: dist.ReduceOp, group: _Group) -> list[float]:
    device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=op, group=group)
    return shared.tolist()
