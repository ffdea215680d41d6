"""Units: the parameters that FSDP2 reduces together, and their places in the buffer.

FSDP2 pads dimension 0 of each gradient with zeros to a multiple of the number of ranks, and cuts it
into one chunk per rank; another dimension, which shard_placement_fn may choose, is such a multiple.
The buffer has the first chunks of all gradients, then the second ones, and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from thinwire.errors import InvalidArgumentError, warn
from thinwire.torch import private
from thinwire.torch.exchange.bucket import Part


class Piece(NamedTuple):
    """A parameter of a unit, or with tensor or expert parallelism this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    chunk: int  # elements per rank, with padding
    dim: int = 0  # the dimension that is sharded
    replicated: tuple[bool, ...] = ()  # along each of Unit.part_groups

    @property
    def numel(self) -> int:
        """Return the number of elements, without padding."""
        return math.prod(self.shape)

    def fits(self, numel: int) -> bool:
        """Return whether the chunks of all ranks may have this many elements in all."""
        return numel == self.numel if self.dim else numel >= self.numel

    def in_chunks(self, flat: torch.Tensor, shards: int) -> torch.Tensor:
        """Return the flat parameter as the chunks of all ranks, one after another, with zeros for
        the padding."""
        if self.dim:
            return torch.cat([c.flatten() for c in flat.view(self.shape).chunk(shards, self.dim)])
        return torch.nn.functional.pad(flat, (0, shards * self.chunk - flat.numel())).clone()

    def in_order(self, chunks: torch.Tensor, shards: int) -> torch.Tensor:
        """Return the chunks of all ranks as the flat parameter, without padding."""
        if self.dim:
            shape = list(self.shape)
            shape[self.dim] //= shards
            each = [chunk.view(shape) for chunk in chunks.chunk(shards)]
            return torch.cat(each, self.dim).flatten()
        return chunks[: self.numel].clone()


class Unit(NamedTuple):
    """The trained parameters that one fully_shard() call manages, in FSDP2's order."""

    name: str  # of the module
    module: FSDPModule  # the first one, if the call got a list
    pieces: tuple[Piece, ...]
    mesh: DeviceMesh  # replicas (HSDP only), shards, then expert and tensor parallelism if any
    hybrid: bool  # whether the mesh has HSDP's replicas
    dtype: torch.dtype  # of the first parameter
    gathered: tuple[Piece, ...] = ()  # including frozen parameters, with units_of(gathered=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that share the shards."""
        return self.mesh.get_group(int(self.hybrid))

    @property
    def world(self) -> int:
        """Return the number of ranks that share the shards."""
        return self.mesh.size(int(self.hybrid))

    @property
    def part_groups(self) -> list[dist.ProcessGroup]:
        """Return this rank's groups of expert and of tensor parallelism. Their ranks have different
        parts of a parameter, or the same values of one that is replicated."""
        return [self.mesh.get_group(d) for d in range(1 + int(self.hybrid), self.mesh.ndim)]

    @property
    def numel(self) -> int:
        """Return the number of elements of the reduce-scatter's input."""
        return self.world * sum(piece.chunk for piece in self.pieces)

    def parts_of_rank(self, rank: int) -> list[Part]:
        """Return the parts of one rank's share of the buffer."""
        return [
            Part(piece.name, piece.chunk, rank * piece.chunk, self.world * piece.chunk)
            for piece in self.pieces
        ]

    def parts(self) -> list[Part]:
        """Return the parts of the whole buffer."""
        return [part for rank in range(self.world) for part in self.parts_of_rank(rank)]


def units_of(model: torch.nn.Module, *, gathered: bool = False) -> list[Unit]:
    """Return the units of a model. Warns of trained parameters that are in no unit.
    InvalidArgumentError unless fully_shard() was called on the model or modules in it. gathered:
    also list all parameters that FSDP2 gathers, including frozen ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without backward, parameters are unsharded
    names: dict[torch.Tensor, str] = {
        p: private.plain_name(name) for name, p in model.named_parameters()
    }
    units: list[Unit] = []
    seen: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and module not in seen:
            together = private.sharded_together(module)
            seen.update(together)
            managed = _managed(together)
            trained = [p for p in managed if p.requires_grad]
            if trained:
                pieces = tuple(_piece(p, names[p]) for p in trained)
                whole = tuple(_piece(p, names[p]) for p in managed) if gathered else ()
                label = private.plain_name(name) or "model"
                mesh = _common_mesh(label, {names[p]: p for p in trained})
                hybrid = trained[0].placements[0].is_replicate()
                units.append(Unit(label, module, pieces, mesh, hybrid, trained[0].dtype, whole))
    if not units:
        raise InvalidArgumentError(
            f"got a {type(model).__name__} without trained parameters under FSDP2, expected a "
            "model that torch.distributed.fsdp.fully_shard was called on; call it first"
        )
    reduced = {piece.name for unit in units for piece in unit.pieces}
    left = [name for p, name in names.items() if p.requires_grad and name not in reduced]
    if left:
        warn(
            f"parameter '{left[0]}', one of {len(left)}, is trained outside of fully_shard(), so "
            "its gradient is not reduced here; unless ignored_params has it, call fully_shard() on "
            "the whole model first"
        )
    return units


def _managed(together: Sequence[torch.nn.Module]) -> list[DTensor]:
    """Return the parameters in FSDP2's order: those of children before those of their module. It
    leaves ignored_params as they were."""
    found: dict[torch.nn.Parameter, None] = {}
    seen = set(together)
    for module in together:
        for part in _own_modules(module, seen):
            found |= dict.fromkeys(part.parameters(recurse=False))
    return [each for each in found if isinstance(each, DTensor)]


def _own_modules(module: torch.nn.Module, seen: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if child not in seen and not isinstance(child, FSDPModule):
            seen.add(child)
            yield from _own_modules(child, seen)
    yield module


def _piece(parameter: DTensor, name: str) -> Piece:
    """InvalidArgumentError unless its placements are those of HSDP's replicas, if there are any, of
    FSDP2's shards, and of expert and tensor parallelism, if there are any."""
    mesh, placements = parameter.device_mesh, parameter.placements
    at = int(placements[0].is_replicate())
    # FSDP2's shards of a tensor-parallel part are of another type than Shard, with the same `dim`.
    shards, parts = placements[at : at + 1], placements[at + 1 :]
    dim = getattr(shards[0], "dim", None) if shards else None
    if dim is None:
        raise _refusal(name, f"it lies as {placements}")
    shape = list(parameter.shape)
    for dimension, part in enumerate(parts, at + 1):
        if isinstance(part, Shard):
            shape[part.dim] = _part_of(shape[part.dim], mesh, dimension)
        elif not part.is_replicate():
            raise _refusal(name, f"it lies as {placements}")
    rows = -(-shape[dim] // mesh.size(at))
    chunk = rows * math.prod(shape[:dim] + shape[dim + 1 :])
    return Piece(name, tuple(shape), chunk, dim, tuple(part.is_replicate() for part in parts))


def _part_of(size: int, mesh: DeviceMesh, dimension: int) -> int:
    """Return this rank's share of `size` where DTensor shards it over a dimension of the mesh: the
    last ranks may have less than the others."""
    most = -(-size // mesh.size(dimension))
    return min(most, max(0, size - most * mesh.get_local_rank(dimension)))


def _common_mesh(unit: str, parameters: Mapping[str, DTensor]) -> DeviceMesh:
    """Return the mesh of the parameters of a unit. InvalidArgumentError if they differ: tensor
    parallelism that has only some of them does not tell whether its ranks have the same values of
    the others."""
    first, *others = parameters
    mesh = parameters[first].device_mesh
    for name in others:
        other = parameters[name].device_mesh
        if other != mesh:
            raise InvalidArgumentError(
                f"'{unit}': parameter '{name}' lies on {other}, expected {mesh} as '{first}'; name "
                "its module in the plan of parallelize_module() too, or call fully_shard() on it"
            )
    return mesh


def _refusal(name: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"parameter '{name}': {got}, expected shards over one dimension of ranks, or HSDP's two, "
        "and shards or copies over those of expert and tensor parallelism"
    )
