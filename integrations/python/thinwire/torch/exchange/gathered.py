"""The state dicts of all ranks in one, for frameworks whose checkpoints are written by rank 0
alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.errors import MismatchError
from thinwire.torch import agree
from thinwire.torch.exchange.checkpoint import FORMAT


def gather(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """All ranks' state dicts under "gathered", by rank; on ranks other than 0 that list is empty.

    mine: this rank's. All ranks call it. One tensor of every rank is under way at a time, so what
    it needs beside the result is little. MismatchError if the ranks' models differ."""
    heads: list[dict[str, Any] | None] = [None] * dist.get_world_size(group)
    head = {key: value for key, value in mine.items() if key != "residuals"}
    head["residuals"] = _sizes(mine["residuals"])
    dist.all_gather_object(heads, head, group=group)
    sizes = _agreed_sizes([head["residuals"] for head in heads])
    gathered = [{**head, "residuals": {}} for head in heads]
    for (name, kind), numel in sorted(sizes.items()):
        tensor = mine["residuals"].get(name, {}).get(kind, torch.zeros(numel))
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
    """Elements by parameter and kind, of all ranks."""
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
    def gathered_state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Any) -> None: ...


class GatheredState:
    """What keeps residuals (State, GradientExchange, DistributedOptimizer, NamedResiduals) in the
    form of frameworks that save the state_dict() of rank 0 alone and load it on all ranks, such as
    Accelerate's register_for_checkpointing(GatheredState(state)). All ranks call both methods."""

    def __init__(self, of: _HasState) -> None:
        if not isinstance(of, _HasState) or isinstance(of, type):
            raise wrong("of", of, "what has gathered_state_dict(): a State, NamedResiduals")
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        """gathered_state_dict(): what all ranks keep on rank 0, nothing on the others."""
        return self._of.gathered_state_dict()

    def load_state_dict(self, saved: Any) -> None:
        """Takes what rank 0's state_dict() gave, in any world size."""
        self._of.load_state_dict(saved)
