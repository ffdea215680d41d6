"""MultiMeshCompression: the gradients of a model under FSDP2 whose modules are sharded over
different ranks.

With expert parallelism each rank has some of the experts, so the shards of an expert lie on fewer
ranks than those of the other parameters. Each such set of ranks has connections and residuals of
its own, in a ShardedCompression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from thinwire import config
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.compression import Compression
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec, Rules
from thinwire.torch.fsdp.units import Unit

if TYPE_CHECKING:
    from thinwire.torch.fsdp.compression import ShardedCompression

_SUMS = ("all_reduces", "raw_bytes", "wire_bytes", "planned_chunks", "exact_reductions")


def codecs_of(
    meshes: Sequence[Sequence[Unit]], codec: Codec | None, gather: str | None
) -> list[Codec | None]:
    """Return the argument `codec` for the parameters of each of several meshes: rules without those
    of other parameters. InvalidArgumentError for options that several meshes do not have."""
    if gather is not None:
        _refuse(meshes, "gather", gather, "None, so that FSDP2 gathers")
    if not isinstance(codec, Mapping):
        if config.resolve(codec=codec).codec == "auto":
            _refuse(meshes, "codec", "auto", "a codec that is chosen, such as int4")
        return [codec] * len(meshes)
    rules = Rules(codec)
    names = [[piece.name for unit in units for piece in unit.pieces] for units in meshes]
    rules.check_names([name for each in names for name in each])
    used = [{rules.rule_of(name) for name in each} for each in names]
    return [{p: spec for p, spec in codec.items() if p in patterns} for patterns in used]


def _refuse(meshes: Sequence[Sequence[Unit]], option: str, got: str, expected: str) -> NoReturn:
    first, second = meshes[0][0], meshes[1][0]
    raise InvalidArgumentError(
        f"FSDP2 got {option}={got!r} with '{first.name}' sharded over the ranks {_ranks(first)}, "
        f"and '{second.name}' over {_ranks(second)}, expected {expected}"
    )


def _ranks(unit: Unit) -> list[int]:
    return dist.get_process_group_ranks(unit.group)


def _total(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of the counters of several exchanges, with all else as in the first."""
    first = each[0]
    sums = {name: sum(one[name] for one in each) for name in _SUMS if name in first}
    wire = sums["wire_bytes"]
    return {
        **first,
        **sums,
        "steps": max(one["steps"] for one in each),
        "ratio": sums["raw_bytes"] / wire if wire else 1.0,
        "seconds": {
            stage: sum(one["seconds"][stage] for one in each) for stage in first["seconds"]
        },
        "parameters": [row for one in each for row in one["parameters"]],
    }


class MultiMeshCompression(Compression):
    """The object that compress() returns for a model under FSDP2 with several meshes: statistics
    and checkpoints as of ShardedCompression."""

    def __init__(self, meshes: Sequence[ShardedCompression]) -> None:
        """Created by compress(). meshes: in the order of the model's modules."""
        self._meshes = list(meshes)

    def stats(self) -> dict[str, Any]:
        """Return the counters of ShardedCompression.stats(), summed over the meshes, with transport
        and topology of the first, and meshes: a list with the counters of each."""
        each = [mesh.stats() for mesh in self._meshes]
        found = {**_total(each), "meshes": each}
        if of_replicas := [one["replicas"] for one in each if "replicas" in one]:
            found["replicas"] = _total(of_replicas)
        return found

    def describe(self) -> str:
        """Return the texts of ShardedCompression.describe(), one after another."""
        return "".join(mesh.describe() for mesh in self._meshes)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, as ShardedCompression.state_dict(). "meshes" has the other
        entries of each mesh's dict."""
        each = [mesh.state_dict() for mesh in self._meshes]
        residuals = {name: memory for one in each for name, memory in one["residuals"].items()}
        meshes = [{key: one[key] for key in one if key != "residuals"} for one in each]
        return {**each[0], "residuals": residuals, "meshes": meshes}

    def gathered_state_dict(self) -> dict[str, Any]:
        """Not supported: a rank has the residuals of its experts only."""
        raise InvalidArgumentError(
            f"gathered_state_dict: the model is sharded over {len(self._meshes)} different sets of "
            "ranks, expected one; save() a file of each rank"
        )

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved residuals, as ShardedCompression.load_state_dict(), also with another number
        of shards, but with as many ranks of expert and tensor parallelism as before."""
        alone = isinstance(saved, Mapping)
        by_mesh = self._by_mesh([saved] if isinstance(saved, Mapping) else saved)
        prepared = [
            mesh.prepare(ranks[0] if alone else ranks)
            for mesh, ranks in zip(self._meshes, by_mesh, strict=True)
        ]
        for mesh, its_own in zip(self._meshes, prepared, strict=True):
            mesh.take(its_own)

    def _by_mesh(self, ranks: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the state dicts of these ranks for each mesh. The first gets what no mesh has, for
        the error."""
        found: list[list[dict[str, Any]]] = [[] for _ in self._meshes]
        for one in ranks:
            heads = one.get("meshes", ()) if isinstance(one, Mapping) else ()
            if len(heads) != len(self._meshes):
                raise InvalidArgumentError(
                    f"load_state_dict: got a state dict of {len(heads) or 1} sets of ranks, "
                    f"expected {len(self._meshes)}; load it into the model that it was saved from"
                )
            residuals: list[dict[str, Any]] = [{} for _ in self._meshes]
            for name, memory in one["residuals"].items():
                owners = [i for i, mesh in enumerate(self._meshes) if mesh.layout.has(name)]
                residuals[owners[0] if owners else 0][name] = memory
            for mine, head, kept in zip(found, heads, residuals, strict=True):
                mine.append({**head, "residuals": kept})
        return found

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        """Not supported, as in ShardedCompression.recover()."""
        return self._meshes[0].recover(process_group)

    def close(self) -> None:
        """Close the connections of all meshes, as ShardedCompression.close()."""
        for mesh in self._meshes:
            mesh.close()
