"""Residuals as plain tensors: out of a communicator, into a dict, and into another world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.errors import InvalidArgumentError

FORMAT = 1

# Parameter -> (first hop, second hop), flat float32 of the parameter's size.
Residuals = dict[str, tuple[torch.Tensor, torch.Tensor]]


def read(communicator: Communicator) -> Residuals:
    """Copies all residuals of this rank. Nothing may be in flight."""
    residuals: Residuals = {}
    for name, numel in communicator.residuals().items():
        first, second = torch.zeros(numel), torch.zeros(numel)
        communicator.get_residual(name, first.data_ptr(), second.data_ptr(), numel)
        residuals[name] = first, second
    return residuals


def write(communicator: Communicator, residuals: Residuals) -> None:
    """Replaces the residuals of these parameters, and empties those of all others."""
    for name, numel in communicator.residuals().items():
        if name not in residuals:
            zeros = torch.zeros(numel)
            communicator.set_residual(name, zeros.data_ptr(), zeros.data_ptr(), numel)
    for name, (first, second) in residuals.items():
        communicator.set_residual(name, first.data_ptr(), second.data_ptr(), first.numel())


def pack(residuals: Residuals, codec: str, world: int, rank: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "codec": codec,
        "world": world,
        "rank": rank,
        "residuals": {
            name: {"first": first, "second": second} for name, (first, second) in residuals.items()
        },
    }


def unpack(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], world: int, rank: int
) -> Residuals:
    """What rank `rank` of `world` loads. InvalidArgumentError if it is not there."""
    if not isinstance(saved, Mapping):
        saved = merge_state_dicts(saved, world, rank)
    _check_format(saved)
    if (saved["world"], saved["rank"]) != (world, rank):
        raise InvalidArgumentError(
            f"rank {rank} of {world} got the state dict of rank {saved['rank']} of "
            f"{saved['world']}; load every rank's own, or give every rank the list of all ranks'"
        )
    residuals: Residuals = {}
    for name, both in saved["residuals"].items():
        first, second = _flat(both["first"]), _flat(both["second"])
        if first.numel() != second.numel():
            raise InvalidArgumentError(
                f"the state dict's residuals for '{name}' have {first.numel()} and "
                f"{second.numel()} elements, expected as many in both"
            )
        residuals[name] = first, second
    return residuals


def merge_state_dicts(saved: Sequence[Mapping[str, Any]], world: int, rank: int) -> dict[str, Any]:
    """The state dict of rank `rank` of `world`, from those of all ranks of a saved run.

    In the same world it is the rank's own, unchanged. Else the sum of residuals is kept: rank j of
    m takes first + n * second, summed over the old ranks r of n with r % m == j, as its first-hop
    residual."""
    for one in saved:
        _check_format(one)
    by_rank = {one["rank"]: one for one in saved}
    old = saved[0]["world"] if saved else 0
    if sorted(by_rank) != list(range(old)) or any(one["world"] != old for one in saved):
        raise InvalidArgumentError(
            f"expected one state dict of each rank of one run, got ranks "
            f"{[one['rank'] for one in saved]} of worlds {[one['world'] for one in saved]}"
        )
    if old == world:
        return dict(by_rank[rank])
    sums: Residuals = {}
    for name in sorted({name for one in saved for name in one["residuals"]}):
        parts = [one["residuals"][name] for one in saved if name in one["residuals"]]
        total = torch.zeros(parts[0]["first"].numel())
        for r in range(rank, old, world):
            if name in by_rank[r]["residuals"]:
                both = by_rank[r]["residuals"][name]
                total += _flat(both["first"]) + old * _flat(both["second"])
        sums[name] = total, torch.zeros_like(total)
    return pack(sums, saved[0]["codec"], world, rank)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32).reshape(-1).contiguous().clone()


def _check_format(saved: Any) -> None:
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        got = saved.get("format") if isinstance(saved, Mapping) else type(saved).__name__
        raise InvalidArgumentError(
            f"expected a thinwire state dict of format {FORMAT}, got {got!r}; pass what "
            "State.state_dict() gave"
        )
