"""Broadcasts of objects and of training state from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_kind, wrong
from thinwire.horovod.exact import Label
from thinwire.horovod.handles import of_future, start
from thinwire.horovod.transfers import broadcast_async_, check_root
from thinwire.horovod.world import current, global_process_set, members_of, rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, prefix: str | None = None
) -> None:
    """Replace tensors by those of rank `root_rank`, in place, bit for bit.

    Args:
        params: model.state_dict(), model.named_parameters(), or a list of tensors; the same on all
            ranks, in the same order. Values that are not tensors are ignored.
        root_rank: the source rank.
        prefix: of the names in messages.
    """
    named = _named(params)
    check_kind("prefix", prefix, (str, type(None)), "text, or None")
    check_root(root_rank, current().everyone)
    handles = [
        broadcast_async_(tensor, root_rank, f"{prefix or ''}{name}")
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.wait()


def _named(params: object) -> list[tuple[str, Any]]:
    expected = "a state_dict(), named_parameters() or a list of tensors"
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise wrong("params", params, expected)
    if isinstance(params, Mapping):
        return [(str(name), value) for name, value in params.items()]
    named = []
    for number, item in enumerate(params):
        pair = item if isinstance(item, tuple) else (f"parameter {number}", item)
        if len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise wrong("params", item, expected)
        named.append((str(pair[0]), pair[1]))
    return named


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Replace the optimizer's state and hyperparameters by those of rank `root_rank`. With a
    DistributedOptimizer this includes the residuals of all ranks, if the root has just loaded
    them."""
    check_kind("optimizer", optimizer, Optimizer, "one of torch.optim")
    check_root(root_rank, current().everyone)
    mine = rank() == root_rank
    state = broadcast_object(optimizer.state_dict() if mine else None, root_rank)
    if not mine:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the object of rank `root_rank`; it must be picklable."""
    members = members_of(process_set)
    check_root(root_rank, members)
    label = Label("broadcast_object", name, f"from rank {root_rank}")
    data = _pickled(obj) if rank() == root_rank else None
    return start(
        members, "broadcast_object", name,
        lambda: of_future(members.exact.object_from(label, data, root_rank), pickle.loads),
    ).wait()  # fmt: skip


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, by rank; they must be picklable."""
    members = members_of(process_set)
    label = Label("allgather_object", name)
    data = _pickled(obj)
    return start(
        members, "allgather_object", name,
        lambda: of_future(
            members.exact.all_objects(label, data), lambda found: list(map(pickle.loads, found))
        ),
    ).wait()  # fmt: skip


def _pickled(obj: Any) -> bytes:
    """Pickle the object before anything is sent, so that no rank waits for one that cannot be
    pickled."""
    try:
        return pickle.dumps(obj)
    except Exception as error:  # the object's own methods may raise any type
        raise wrong("obj", obj, f"what can be pickled ({error})") from error


def barrier(process_set: Any = global_process_set) -> None:
    """Block until all ranks have called it."""
    members_of(process_set).exact.agreed(Label("barrier", None), lambda _: None).result()
