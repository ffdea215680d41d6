"""The residuals of gradients and the references of gathered parameters of a model under FSDP2: the
ranks' common decision whether to keep them, and their place in a checkpoint, which can be loaded
with any number of shards and replicas.

Each takes 4 bytes per element of the whole, unsharded model on every rank. A user who shards a
model because it does not fit must not get such an allocation by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.errors import InvalidArgumentError, MismatchError
from thinwire.torch import tensors
from thinwire.torch.exchange import checkpoint
from thinwire.torch.fsdp.units import Piece

# Prefix of a parameter's name: the residuals of this rank's shard in the all-reduces over replicas.
_OF_REPLICAS = "replicas:"
# Prefix of a parameter's name: this rank's chunk of the reference of compressed gathers.
_REFERENCE = "reference:"

_Saved = Mapping[str, Any]
_Residuals = Mapping[str, Mapping[str, torch.Tensor]]


class Place(NamedTuple):
    """A rank's place among the ranks that train a model, replicas times shards of them, or of each
    part of the model with tensor or expert parallelism."""

    shards: int
    shard: int
    replicas: int = 1
    replica: int = 0
    parts: int = 1
    part: int = 0

    @property
    def world(self) -> int:
        return self.shards * self.replicas

    @property
    def rank(self) -> int:
        return self.replica * self.shards + self.shard


class Layout:
    """The layout of a rank's state dict: the residuals of its two exchanges and its references."""

    def __init__(self, place: Place, pieces: Mapping[str, Piece]) -> None:
        """pieces: all trained or gathered parameters, by name."""
        self.place, self._pieces = place, pieces

    def has(self, key: str) -> bool:
        """Return whether this key of a state dict's residuals is of one of these parameters."""
        return key.removeprefix(_OF_REPLICAS).removeprefix(_REFERENCE) in self._pieces

    def join(
        self,
        of_shards: _Saved,
        of_replicas: _Saved | None,
        references: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        """Return the state dict of this rank, made from that of its reduce-scatters, that of its
        all-reduces over replicas, if these are compressed, and its chunks of the references."""
        residuals = self._resized(of_shards["residuals"], padded=False)
        if of_replicas is not None:
            for name, memory in of_replicas["residuals"].items():
                residuals[_OF_REPLICAS + name] = {
                    kind: tensor[self._chunk(name)].clone() for kind, tensor in memory.items()
                }
        for name, chunk in references.items():
            residuals[_REFERENCE + name] = {"first": chunk, "second": torch.zeros_like(chunk)}
        at = {"world": self.place.world, "rank": self.place.rank, "replicas": self.place.replicas}
        if self.place.parts > 1:
            at |= {"parts": self.place.parts, "part": self.place.part}
        return {**of_shards, **at, "residuals": residuals}

    def split(
        self, saved: _Saved | Sequence[_Saved], replicas_have_one: bool
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state dicts of the two exchanges and the references, from this rank's dict, a
        gathered dict, or the list of all ranks' dicts. replicas_have_one: whether the second
        exchange exists; otherwise the first gets all residuals."""
        mine = self._of_this_rank(self._of_this_part(saved))
        if not replicas_have_one:
            mine = self._folded(mine)
        of_shards, of_replicas, references = _parted(mine["residuals"])
        references = {name: kept for name, kept in references.items() if name in self._pieces}
        self._check_sizes(of_shards, of_replicas, references)
        place = self.place
        return (
            {**mine, "world": place.shards, "rank": place.shard,
             "residuals": self._resized(of_shards, padded=True)},
            {**mine, "world": place.replicas, "rank": place.replica,
             "residuals": self._at_their_place(of_replicas)},
            {name: memory["first"] for name, memory in references.items()},
        )  # fmt: skip

    def _of_this_part(self, saved: _Saved | Sequence[_Saved]) -> _Saved | Sequence[_Saved]:
        """Return those that were saved of this rank's part of the model. InvalidArgumentError if
        the model was saved in another number of parts."""
        ranks = saved.get("gathered", [saved]) if isinstance(saved, Mapping) else saved
        if not isinstance(ranks, Iterable):
            return saved
        ranks = list(ranks)
        found = [_part_of(one) for one in ranks]
        mine = self.place.part, self.place.parts
        if any(parts != mine[1] for _, parts in found) or (found and mine not in found):
            raise InvalidArgumentError(
                f"the state dict is of part {found[0][0]} of {found[0][1]}, expected part {mine[0]}"
                f" of {mine[1]} of tensor or expert parallelism; load every rank's own, or give "
                "every rank the list of all ranks', saved with as many parts"
            )
        if isinstance(saved, Mapping):
            return saved
        return [one for one, part in zip(ranks, found, strict=True) if part == mine]

    def _of_this_rank(self, saved: _Saved | Sequence[_Saved]) -> _Saved:
        world, rank, replicas = self.place.world, self.place.rank, self.place.replicas
        if isinstance(saved, Mapping) and "gathered" not in saved:
            mine = checkpoint.of_rank(saved, world, rank)
            got = (mine["world"], mine["rank"], _replicas_of(mine))
            if got != (world, rank, replicas):
                raise InvalidArgumentError(
                    f"rank {rank} of {world}, with {replicas} replicas, got the state dict of rank "
                    f"{got[1]} of {got[0]}, with {got[2]}; load every rank's own, or give every "
                    "rank the list of all ranks'"
                )
            return mine
        dicts = checkpoint.of_all_ranks(saved)
        if all((one["world"], _replicas_of(one)) == (world, replicas) for one in dicts):
            return dicts[rank]
        references = self._chunks_of([_parted(one["residuals"])[2] for one in dicts], dicts[0])
        folded = [self._folded(_without_references(one)) for one in dicts]
        merged = checkpoint.merge_state_dicts(folded, world, rank)
        return {**merged, "residuals": {**merged["residuals"], **references}}

    def _chunks_of(
        self, ranks: Sequence[_Residuals], first: _Saved
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's chunks of references that were saved with another number of shards, as
        entries of its state dict. All replicas have the same ones. A reference that a rank lacks,
        or that has another size, is left out: the next gather of its parameters is exact."""
        shards = first["world"] // _replicas_of(first)
        found = {}
        for name, piece in self._pieces.items():
            chunks = [rank[name]["first"] for rank in ranks[:shards] if name in rank]
            whole = torch.cat(chunks) if len(chunks) == shards else tensors.empty(0)
            if not piece.fits(whole.numel()):
                continue
            padded = piece.in_chunks(piece.in_order(whole, shards), self.place.shards)
            chunk = padded[self._chunk(name)].clone()
            found[_REFERENCE + name] = {"first": chunk, "second": torch.zeros_like(chunk)}
        return found

    def _folded(self, saved: _Saved) -> dict[str, Any]:
        """Return a rank's dict in which the residuals of the replicas are added to those of the
        shards, in units of a rank's gradient. The all-reduce over replicas sums means over shards,
        which have their own residuals unless they were exact."""
        replicas = _replicas_of(saved)
        shards = saved["world"] // replicas
        of_shards, of_replicas, references = _parted(saved["residuals"])
        residuals = {name: dict(memory) for name, memory in of_shards.items()}
        for name, memory in of_replicas.items():
            if name not in self._pieces:
                raise InvalidArgumentError(
                    f"the state dict has a residual for '{name}', which is no parameter of this "
                    "model; load it into the model that it was saved from"
                )
            piece = self._pieces[name]
            zeros = tensors.zeros(piece.numel)
            kept = residuals.setdefault(name, {"first": zeros, "second": zeros})
            owed = tensors.zeros(shards * memory["first"].numel())
            if kept["first"].numel() != piece.numel or not piece.fits(owed.numel()):
                raise _other_size(name, kept["first"].numel(), piece.numel)
            chunk, at = memory["first"].numel(), saved["rank"] % shards
            mine = slice(at * chunk, (at + 1) * chunk)
            owed[mine] = shards * (memory["first"] + replicas * memory["second"])
            kept["first"] = kept["first"] + piece.in_order(owed, shards)
        residuals |= {_REFERENCE + name: dict(memory) for name, memory in references.items()}
        return {**saved, "replicas": 1, "residuals": residuals}

    def _chunk(self, name: str) -> slice:
        chunk = self._pieces[name].chunk
        return slice(self.place.shard * chunk, (self.place.shard + 1) * chunk)

    def _resized(self, residuals: _Residuals, padded: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return the residuals of parameters with a dimension cut into chunks and padded (padded),
        as in the buffer, or in the parameters' own order."""
        resized = {}
        for name, memory in residuals.items():
            piece = self._pieces[name]
            change = piece.in_chunks if padded else piece.in_order
            resized[name] = {
                kind: change(tensor, self.place.shards) for kind, tensor in memory.items()
            }
        return resized

    def _at_their_place(self, residuals: _Residuals) -> dict[str, dict[str, torch.Tensor]]:
        placed: dict[str, dict[str, torch.Tensor]] = {}
        for name, memory in residuals.items():
            placed[name] = {}
            for kind, tensor in memory.items():
                whole = tensors.zeros(self.place.shards * self._pieces[name].chunk)
                whole[self._chunk(name)] = tensor
                placed[name][kind] = whole
        return placed

    def _check_sizes(
        self, of_shards: _Residuals, of_replicas: _Residuals, references: _Residuals
    ) -> None:
        sizes = {name: piece.numel for name, piece in self._pieces.items()}
        chunks = {name: piece.chunk for name, piece in self._pieces.items()}
        for residuals, numels in (
            (of_shards, sizes), (of_replicas, chunks), (references, chunks)
        ):  # fmt: skip
            for name, memory in residuals.items():
                got, expected = memory["first"].numel(), numels.get(name, "no such parameter")
                if got != expected:
                    raise _other_size(name, got, expected)


def _other_size(name: str, got: int, expected: int | str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the state dict's residual for '{name}' has {got} elements, expected {expected}; load it "
        "into the model that it was saved from"
    )


def _replicas_of(saved: _Saved) -> int:
    return saved.get("replicas", 1)


def _part_of(saved: object) -> tuple[int, int]:
    """Return which part of the model the state dict of a rank is of, and the number of parts."""
    if not isinstance(saved, Mapping):
        return 0, 1
    return saved.get("part", 0), saved.get("parts", 1)


def _parted(residuals: _Residuals) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a rank's residuals into those of the shards' exchange, those of the replicas' exchange,
    and the references, each by parameter."""
    of_shards, of_replicas, references = {}, {}, {}
    for name, memory in residuals.items():
        if name.startswith(_OF_REPLICAS):
            of_replicas[name.removeprefix(_OF_REPLICAS)] = memory
        elif name.startswith(_REFERENCE):
            references[name.removeprefix(_REFERENCE)] = memory
        else:
            of_shards[name] = memory
    return of_shards, of_replicas, references


def _without_references(saved: _Saved) -> dict[str, Any]:
    kept = {n: m for n, m in saved["residuals"].items() if not n.startswith(_REFERENCE)}
    return {**saved, "residuals": kept}


# "auto" keeps residuals or references that take at most 1 / SHARE of the available memory.
SHARE = 8

Wanted = bool | str | None  # True: always; False: never; "auto" or None: if they fit


class Decision(NamedTuple):
    """The decision whether residuals or references are kept on every rank, and its reasons."""

    option: str  # the argument of compress()
    what: str  # "residuals of error feedback"
    wanted: bool | str
    kept: bool
    bytes: int  # on each rank, if they are kept
    available: int  # bytes of memory on the rank that has the least

    @property
    def too_large(self) -> str:
        """Return the reason why "auto" keeps none."""
        return (
            f"{self.what} take {self.bytes:,} bytes on every rank, more than "
            f"1/{SHARE} of the {self.available:,} bytes of memory that are available there"
        )

    def describe(self) -> str:
        """Return a line for Compression.describe()."""
        name = self.what.split()[0]
        if self.kept:
            return f"{name}: {self.bytes:,} bytes on every rank ({self.option}={self.wanted!r})\n"
        why = self.too_large if self.wanted == "auto" else f"they would take {self.bytes:,} bytes"
        return f"{name}: none ({self.option}={self.wanted!r}): {why}\n"


def check_feedback(wanted: Wanted) -> bool | str:
    """Return True, False or "auto" for `wanted`. InvalidArgumentError unless it is one of
    Wanted."""
    if wanted is None:
        return "auto"
    if isinstance(wanted, bool) or (isinstance(wanted, str) and wanted == "auto"):
        return wanted
    raise wrong("feedback", wanted, "'auto', True or False")


def decide(
    option: str,
    what: str,
    wanted: bool | str,
    needed: int,
    groups: Sequence[dist.ProcessGroup],
    on_gpu: bool,
    taken: int = 0,
) -> Decision:
    """Decide for all ranks that train the model. All of them call it.

    Args:
        option, what: as in Decision.
        wanted: "auto", or a value that counts as True or False. MismatchError on every rank if it
            differs between ranks.
        needed: the bytes that are needed on this rank.
        groups: the group of the shards, and that of the replicas if there are any.
        on_gpu: whether the bytes are on the current GPU, and not in the host's memory.
        taken: bytes of the available memory that are reserved for other uses on each rank.
    """
    memory = memory_of_gpu() if on_gpu else memory_of_host()
    ranks = [(wanted, needed, *memory)]
    for group in groups:
        gathered: list[list[tuple[bool | str, int, str, int]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, ranks, group=group)
        ranks = [one for part in gathered for one in part]
    for other, *_ in ranks:
        if other != wanted:
            raise MismatchError(
                f"rank {dist.get_rank()}: {option} is {wanted!r}, and {other!r} on another rank; "
                "pass the same value to compress() on every rank"
            )
    sharers = Counter(where for _, _, where, _ in ranks)
    available = max(0, min(free // sharers[where] for _, _, where, free in ranks) - taken)
    needed = max(one[1] for one in ranks)
    fits = SHARE * needed <= available
    kept = fits if wanted == "auto" else bool(wanted)
    return Decision(option, what, wanted, kept, needed, available)


def memory_of_host() -> tuple[str, int]:
    """Return an identifier of the machine, whose memory its ranks share, and its available
    bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return _machine(), 1024 * int(kilobytes)


def memory_of_gpu() -> tuple[str, int]:
    """Return an identifier of the current GPU, and its free bytes."""
    unique = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return f"{_machine()} {unique}", torch.cuda.mem_get_info()[0]


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
