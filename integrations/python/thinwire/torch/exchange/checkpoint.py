"""Residuals as plain tensors: reads them from a communicator, packs them into a dict, and converts
them for another world size."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.arguments import as_int
from thinwire.comm import Communicator
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.private import plain_name
from thinwire.torch.tensors import is_name

FORMAT = 2


class Memory(NamedTuple):
    """Residuals and momentum of one parameter: flat float32 tensors of its size, on the host."""

    first: torch.Tensor  # the first hop's residual, in units of a gradient
    second: torch.Tensor  # the second hop's residual, in units of the mean
    momentum: torch.Tensor | None = None  # with topk per rank, else the same on all ranks


Residuals = dict[str, Memory]  # by parameter


def read(communicator: Communicator, momentum: bool) -> Residuals:
    """Return a copy of this rank's residuals and momentum. Nothing may be in flight."""
    residuals = {
        name: Memory(
            *(tensors.empty(numel) for _ in range(2)), tensors.empty(numel) if momentum else None
        )
        for name, numel in communicator.residuals().items()
    }
    communicator.get_residuals(_arrays(residuals))
    return residuals


def write(communicator: Communicator, residuals: Residuals) -> None:
    """Replace the memory of these parameters, and set that of all others to zeros."""
    others = {}
    for name, numel in communicator.residuals().items():
        if name not in residuals:
            zeros = tensors.zeros(numel)
            others[name] = Memory(zeros, zeros)
    put(communicator, {**others, **residuals})


def put(communicator: Communicator, residuals: Residuals) -> None:
    """Replace the memory of these parameters, and leave the others unchanged."""
    communicator.set_residuals(_arrays(residuals))


def with_momentum(residuals: Residuals, momentum: Mapping[str, torch.Tensor]) -> Residuals:
    """Return the residuals with the momentum of these parameters replaced. `momentum` may have any
    shape, dtype and device."""
    kept = dict(residuals)
    for name, buffer in momentum.items():
        m = buffer.detach().to("cpu", torch.float32, copy=True).flatten().contiguous()
        zeros = torch.zeros_like(m)
        kept[name] = kept.get(name, Memory(zeros, zeros))._replace(momentum=m)
    return kept


def merged(memory: Memory, world: int) -> Memory:
    """Return a parameter's memory of a rank of `world`, all moved to the first hop, for use in
    another world size."""
    first = memory.first + world * memory.second
    return memory._replace(first=first, second=torch.zeros_like(first))


def _arrays(residuals: Residuals) -> list[tuple[str, str, int, int]]:
    """Return each tensor in the form that Communicator.get_residuals() takes."""
    return [
        (name, array, tensor.data_ptr(), tensor.numel())
        for name, memory in residuals.items()
        for array, tensor in memory._asdict().items()
        if tensor is not None
    ]


def pack(
    residuals: Residuals,
    codec: str | Mapping[str, str],
    world: int,
    rank: int,
    steps: int,
    sparse: Collection[str] = (),
) -> dict[str, Any]:
    """Return the dict for state_dict(). sparse: the parameters that are sent as topk; their
    momentum differs between ranks."""
    return {
        "format": FORMAT,
        "codec": codec,
        "world": world,
        "rank": rank,
        "steps": steps,
        "sparse": sorted(sparse),
        "residuals": {
            name: {key: value for key, value in memory._asdict().items() if value is not None}
            for name, memory in residuals.items()
        },
    }


def unpack(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], world: int, rank: int
) -> tuple[Residuals, int]:
    """Return the residuals that rank `rank` of `world` loads, and the number of steps made so far.
    saved: this rank's dict, the list of all ranks' dicts, or a gathered dict. InvalidArgumentError
    if it is none of these, or has no residuals for this rank."""
    saved = of_rank(saved, world, rank)
    if (saved["world"], saved["rank"]) != (world, rank):
        raise InvalidArgumentError(
            f"rank {rank} of {world} got the state dict of rank {saved['rank']} of "
            f"{saved['world']}; load every rank's own, or give every rank the list of all ranks'; "
            "where rank 0 alone writes, as by Accelerate's register_for_checkpointing, save and "
            "load GatheredState(state), and by torch.distributed.checkpoint DistributedState(state)"
        )
    residuals: Residuals = {}
    for name, kept in saved["residuals"].items():
        residuals[plain_name(name)] = Memory(
            **{kind: _flat(tensor) for kind, tensor in kept.items()}
        )
    return residuals, saved["steps"]


def check_momentum(residuals: Residuals, owned: bool) -> None:
    """InvalidArgumentError if the residuals have momentum, but the exchange does not own it."""
    for name, memory in residuals.items():
        if memory.momentum is not None and not owned:
            raise InvalidArgumentError(
                f"the state dict has a momentum for '{name}', expected none, since momentum=0 "
                "here; give the momentum that it was saved with"
            )


def of_rank(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], world: int, rank: int
) -> Mapping[str, Any]:
    """Return the state dict for rank `rank` of `world` from what unpack() takes. Its "rank" and
    "world" are not checked."""
    if not isinstance(saved, Mapping) or "gathered" in saved:
        saved = merge_state_dicts(saved, world, rank)
    _check_format(saved)
    return saved


def merge_state_dicts(saved: Sequence[Mapping[str, Any]], world: int, rank: int) -> dict[str, Any]:
    """Return the state dict of rank `rank` of `world`, from those of all ranks of a saved run.

    With the same world size it is the rank's own, unchanged. Otherwise the sum of residuals is
    kept: the first-hop residual of rank j of m is first + n * second, summed over the old ranks r
    of n with r % m == j. topk's momentum is summed the same way; other momentum is the same on all
    ranks.

    Args:
        saved: the state dicts of all ranks, in any order.
        world: the new world size.
        rank: the new rank.

    Raises:
        InvalidArgumentError: the dicts are not those of all ranks of one run.
    """
    world = as_int("world", world, 1)
    rank = as_int("rank", rank, 0, world - 1)
    by_rank = of_all_ranks(saved)
    old = len(by_rank)
    if old == world:
        return dict(by_rank[rank])
    sums: Residuals = {}
    for name in sorted({name for one in by_rank for name in one["residuals"]}):
        parts = [one["residuals"][name] for one in by_rank if name in one["residuals"]]
        _check_alike(name, parts)
        total = tensors.zeros(parts[0]["first"].numel())
        momentum = torch.zeros_like(total) if "momentum" in parts[0] else None
        for r in range(rank, old, world):
            if name in by_rank[r]["residuals"]:
                both = by_rank[r]["residuals"][name]
                total += _flat(both["first"]) + old * _flat(both["second"])
                if momentum is not None:
                    momentum += _flat(both["momentum"])
        if momentum is not None and name not in by_rank[0]["sparse"]:
            momentum = _flat(parts[0]["momentum"])
        sums[name] = Memory(total, torch.zeros_like(total), momentum)
    one = by_rank[0]
    return pack(sums, one["codec"], world, rank, one["steps"], one["sparse"])


def of_all_ranks(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the state dicts of a saved run by rank, from a list in any order or a gathered dict.
    InvalidArgumentError unless there is one of each rank."""
    if isinstance(saved, Mapping) and "gathered" in saved:
        saved = _gathered(saved)
    if not isinstance(saved, Iterable) or isinstance(saved, (str, bytes)):
        _check_format(saved)
    dicts = list(saved)
    for one in dicts:
        _check_format(one)
    ranks, worlds = [one["rank"] for one in dicts], [one["world"] for one in dicts]
    if not dicts or sorted(ranks) != list(range(len(dicts))) or set(worlds) != {len(dicts)}:
        raise InvalidArgumentError(
            "saved: expected one state dict of each rank of one run, got ranks "
            f"{ranks} of worlds {worlds}"
        )
    return sorted(dicts, key=lambda one: one["rank"])


def _check_alike(name: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for part in parts:
        if part["first"].shape != parts[0]["first"].shape or part.keys() != parts[0].keys():
            raise _damaged(
                f"'{name}' has {[(list(one), one['first'].numel()) for one in parts]} on the "
                "ranks that have it, expected the same of all"
            )


def _gathered(saved: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if not saved["gathered"]:
        raise InvalidArgumentError(
            "the gathered state dict is empty, expected one dict of each rank; rank 0 alone has "
            "what gathered_state_dict() gathers: save it there, and load that file on every rank"
        )
    return saved["gathered"]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32).reshape(-1).contiguous().clone()


# The keys of a state dict, and the types of their values.
_CONTENT = {"codec": (str, Mapping), "world": int, "rank": int, "steps": int, "sparse": list,
            "residuals": Mapping}  # fmt: skip


def _check_format(saved: Any) -> None:
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        none = "a dict without a format"
        got = saved.get("format", none) if isinstance(saved, Mapping) else type(saved).__name__
        raise InvalidArgumentError(
            f"expected a thinwire state dict of format {FORMAT}, got {got!r}; pass what "
            "State.state_dict() gave"
        )
    for key, kind in _CONTENT.items():
        if not isinstance(saved.get(key), kind):
            raise _damaged(f"{key} is {saved.get(key)!r}")
    if not 0 <= saved["rank"] < saved["world"] or saved["steps"] < 0:
        raise _damaged(f"it is of rank {saved['rank']} of {saved['world']}, step {saved['steps']}")
    replicas = saved.get("replicas", 1)  # only FSDP2's state dicts have it
    if not isinstance(replicas, int) or replicas < 1 or saved["world"] % replicas:
        raise _damaged(f"it is of {replicas!r} replicas among {saved['world']} ranks")
    for name, kept in saved["residuals"].items():
        _check_memory(name, kept)


def _check_memory(name: object, kept: object) -> None:
    """InvalidArgumentError unless `kept` has the form that pack() gives a Memory."""
    tensors = kept if isinstance(kept, Mapping) else {}
    if not is_name(name) or not all(
        isinstance(tensors.get(kind), torch.Tensor) for kind in ("first", "second")
    ):
        raise _damaged(f"the residuals for {name!r} are no tensors")
    for kind, tensor in tensors.items():
        if kind not in Memory._fields or not isinstance(tensor, torch.Tensor):
            raise _damaged(f"the residuals for {name!r} have {kind!r}: {reprlib.repr(tensor)}")
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
            raise _damaged(f"{kind!r} of '{name}' is {tensor.dtype}, {tensor.layout}")
        if tensor.shape != (tensors["first"].numel(),):
            raise _damaged(
                f"the residuals for '{name}' have shapes {tuple(tensor.shape)} ({kind}) and "
                f"{tuple(tensors['first'].shape)} (first), expected as many elements, flat"
            )


def _damaged(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the state dict is damaged: {what}; pass what State.state_dict() gave"
    )
