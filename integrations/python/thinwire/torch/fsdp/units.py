"""Units: the parameters that FSDP2 reduces together, and their places in the buffer.

FSDP2 pads dimension 0 of each gradient with zeros to a multiple of the number of ranks, and cuts it
into one chunk per rank. The buffer has the first chunks of all gradients, then the second ones, and
so on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
    """A parameter of a unit."""

    name: str
    numel: int
    chunk: int  # elements per rank, with padding


class Unit(NamedTuple):
    """The trained parameters that one fully_shard() call manages, in FSDP2's order."""

    name: str  # of the module
    module: FSDPModule
    pieces: tuple[Piece, ...]
    mesh: DeviceMesh
    dtype: torch.dtype  # of the first parameter
    gathered: tuple[Piece, ...] = ()  # including frozen parameters, with units_of(gathered=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that share the shards."""
        mesh = self.mesh
        return mesh.get_group(mesh.ndim - 1)

    @property
    def world(self) -> int:
        """Return the number of ranks that share the shards."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def hybrid(self) -> bool:
        """True on HSDP's mesh, whose first dimension is the replicas."""
        return self.mesh.ndim > 1

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
    InvalidArgumentError unless fully_shard() was called on the model or modules in it, and shards
    only dimension 0. gathered: also list all parameters that FSDP2 gathers, including frozen
    ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without backward, parameters are unsharded
    names = {p: private.plain_name(name) for name, p in model.named_parameters()}
    units = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            managed = list(_managed(module))
            trained = [p for p in managed if p.requires_grad]
            if trained:
                pieces = tuple(_piece(p, names[p]) for p in trained)
                whole = tuple(_piece(p, names[p]) for p in managed) if gathered else ()
                mesh = trained[0].device_mesh
                label = private.plain_name(name) or "model"
                units.append(Unit(label, module, pieces, mesh, trained[0].dtype, whole))
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
            "its gradient is not reduced here; call fully_shard() on the whole model first"
        )
    return units


def _managed(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Yield the parameters in FSDP2's order: those of children before those of their module."""
    found: dict[torch.nn.Parameter, None] = {}
    for part in _own_modules(module, {module}):
        found |= dict.fromkeys(part.parameters(recurse=False))
    return found


def _own_modules(module: torch.nn.Module, seen: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if child not in seen and not isinstance(child, FSDPModule):
            seen.add(child)
            yield from _own_modules(child, seen)
    yield module


def _piece(parameter: torch.nn.Parameter, name: str) -> Piece:
    if not isinstance(parameter, DTensor):
        raise _refusal(name, "FSDP2 does not manage it")
    *outer, inner = parameter.placements
    if len(outer) > 1 or inner != Shard(0) or not all(p.is_replicate() for p in outer):
        raise _refusal(name, f"it lies as {parameter.placements}")
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    return Piece(name, parameter.numel(), rows * math.prod(parameter.shape[1:]))


def _refusal(name: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"parameter '{name}': {got}, expected Shard(0) over one dimension of ranks, or HSDP's two; "
        "other layouts, such as those of tensor parallelism, can't be compressed here"
    )
