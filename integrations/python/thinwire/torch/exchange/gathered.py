"""The state dicts of all ranks in one dict, for frameworks in which rank 0 writes the
checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.errors import InvalidArgumentError, MismatchError
from thinwire.torch import agree, tensors
from thinwire.torch.exchange import state_file
from thinwire.torch.exchange.checkpoint import FORMAT
from thinwire.torch.group import resolve


def gather(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return all ranks' state dicts under "gathered", by rank; on other ranks than 0 the list is
    empty.

    All ranks call it with their own dict in `mine`. It gathers one tensor of every rank at a time,
    so it needs little memory in addition to the result. MismatchError if the ranks' models
    differ."""
    members = resolve(group, "gathered_state_dict")
    with agree.agreeing("the gathered state", members, "gathered_state_dict()", together=True):
        return _gather(mine, members)


def _gather(mine: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    heads: list[dict[str, Any] | None] = [None] * dist.get_world_size(group)
    head = {key: value for key, value in mine.items() if key != "residuals"}
    head["residuals"] = _sizes(mine["residuals"])
    dist.all_gather_object(heads, head, group=group)
    sizes = _agreed_sizes([head["residuals"] for head in heads])
    gathered = [{**head, "residuals": {}} for head in heads]
    for (name, kind), numel in sorted(sizes.items()):
        tensor = mine["residuals"].get(name, {}).get(kind, tensors.zeros(numel))
        for rank, values in enumerate(agree.gather_to_rank_0(tensor, group)):
            if kind in heads[rank]["residuals"].get(name, {}):
                gathered[rank]["residuals"].setdefault(name, {})[kind] = values
    return {"format": FORMAT, "gathered": gathered if dist.get_rank(group) == 0 else []}


def _sizes(residuals: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, int]]:
    return {
        name: {kind: tensor.numel() for kind, tensor in memory.items()}
        for name, memory in residuals.items()
    }


def _agreed_sizes(heads: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[tuple[str, str], int]:
    """Return the number of elements by (parameter, kind) for all ranks."""
    sizes: dict[tuple[str, str], int] = {}
    for rank, head in enumerate(heads):
        for name, memory in head.items():
            for kind, numel in memory.items():
                if sizes.setdefault((name, kind), numel) != numel:
                    raise MismatchError(
                        f"gathered_state_dict: rank {rank} has {numel} elements of '{name}', "
                        f"expected {sizes[name, kind]} as on the ranks before; make the same "
                        "model on every rank"
                    )
    return sizes


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def gathered_state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Any) -> None: ...


class GatheredState:
    """Wraps an owner of residuals (a Compression, NamedResiduals) for frameworks that save the
    state_dict() of rank 0 only and load it on all ranks, such as Accelerate:
    register_for_checkpointing(GatheredState(state)). All ranks call both methods."""

    def __init__(self, of: _HasState) -> None:
        if not isinstance(of, _HasState) or isinstance(of, type):
            raise wrong("of", of, "what has gathered_state_dict(): a State, NamedResiduals")
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        """Return gathered_state_dict(): the state of all ranks on rank 0, nothing on the others."""
        return self._of.gathered_state_dict()

    def load_state_dict(self, saved: Any) -> None:
        """Load what rank 0's state_dict() returned, in any world size."""
        self._of.load_state_dict(saved)


class DistributedState:
    """Wraps a Compression for torch.distributed.checkpoint: save and load
    {"thinwire": DistributedState(compression)} with the model, on every rank, in any world size.

    Each rank writes and reads its own part. torch asks for the keys before the checkpoint's world
    size is known, so there are keys for MAX_RANKS ranks, most of them empty."""

    MAX_RANKS = 1024

    def __init__(self, of: _HasState) -> None:
        if not isinstance(of, _HasState) or isinstance(of, type):
            raise wrong("of", of, "what has gathered_state_dict(): a Compression, NamedResiduals")
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the checkpoint: bytes of state files by rank.

        Raises:
            InvalidArgumentError: there are more than MAX_RANKS ranks, or FSDP2 shards the model
                over sets of ranks that do not number the ranks alike.
        """
        mine = self._of.state_dict()
        numbers = [_number(head) for head in _heads(mine)]
        if len(set(numbers)) > 1:
            raise InvalidArgumentError(
                f"DistributedState: this rank has the numbers {numbers} in the sets of ranks that "
                "share shards, expected the same in each, as in the dimensions of one mesh; save() "
                "a file of each rank"
            )
        world, rank = mine["world"] * mine.get("parts", 1), numbers[0]
        if world > self.MAX_RANKS:
            raise InvalidArgumentError(
                f"DistributedState: got {world} ranks, expected at most {self.MAX_RANKS}; save() a "
                "file of each rank"
            )
        parts = {f"rank{other}": b"" for other in range(rank, self.MAX_RANKS, world)}
        parts[f"rank{rank}"] = state_file.to_bytes(mine)
        return {"shared": state_file.to_bytes(_shared(mine)), **parts}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what torch.distributed.checkpoint has read for this rank, of any world size.

        Raises:
            InvalidArgumentError: it does not fit this model; nothing was changed.
        """
        if not isinstance(saved, Mapping) or not isinstance(saved.get("shared"), bytes):
            raise wrong("saved", saved, "what DistributedState.state_dict() gave")
        shared = state_file.from_bytes(saved["shared"], "the checkpoint's shared part")
        parts = {
            int(key.removeprefix("rank")): state_file.from_bytes(content, f"the part of {key}")
            for key, content in saved.items()
            if key.startswith("rank") and content
        }
        ranks = []
        for number in range(shared["world"] * shared.get("parts", 1)):
            nothing = shared["residuals"] if number == 0 else {}
            ranks.append(parts.get(number, {**_numbered(shared, number), "residuals": nothing}))
        self._of.load_state_dict(ranks)


def _shared(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the part that is equal on all ranks: the momentum of parameters that
    are not sent as topk."""
    kept = {}
    for name, memory in mine["residuals"].items():
        if "momentum" in memory and name not in mine["sparse"]:
            zeros = torch.zeros_like(memory["first"])
            kept[name] = {"first": zeros, "second": zeros, "momentum": memory["momentum"]}
    return {**_numbered(mine, 0), "residuals": kept}


def _heads(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dicts in a state dict that have a rank's place: one for each set of ranks."""
    return state.get("meshes", [state])


def _number(head: Mapping[str, Any]) -> int:
    """Return a rank's number among all ranks. Those with the same part of the model, if tensor or
    expert parallelism has divided it, are as far apart as there are parts, in any world size."""
    return head["rank"] * head.get("parts", 1) + head.get("part", 0)


def _numbered(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a state dict with the places of the rank of this number."""
    parts = state.get("parts", 1)
    found = {**state, "rank": number // parts}
    if parts > 1:
        found["part"] = number % parts
    if "meshes" in state:
        found["meshes"] = [_numbered(head, number) for head in state["meshes"]]
    return found
