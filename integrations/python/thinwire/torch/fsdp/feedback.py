"""Feedback: whether a model under FSDP2 keeps residuals, which all of its ranks decide alike.

Residuals take 4 bytes for each element of the whole, unsharded model on every rank. Who shards a
model because it does not fit must not find such an allocation by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.errors import MismatchError

# "auto" keeps residuals that take at most one part in so many of the memory that is available.
SHARE = 8

Wanted = bool | str | None  # True: always; False: never; "auto", which None stands for


class Feedback(NamedTuple):
    """The decision, and the numbers that it was made of."""

    wanted: bool | str
    kept: bool
    bytes: int  # of residuals on each rank, if they are kept
    available: int  # bytes of memory, on the rank that has the least

    @property
    def too_large(self) -> str:
        """Why "auto" keeps none."""
        return (
            f"residuals of error feedback take {self.bytes:,} bytes on every rank, more than "
            f"1/{SHARE} of the {self.available:,} bytes of memory that are available there"
        )

    def describe(self) -> str:
        """A line for Compression.describe()."""
        if self.kept:
            return f"residuals: {self.bytes:,} bytes on every rank (feedback={self.wanted!r})\n"
        why = self.too_large if self.wanted == "auto" else f"they would take {self.bytes:,} bytes"
        return f"residuals: none (feedback={self.wanted!r}): {why}\n"


def check(wanted: Wanted) -> bool | str:
    """The value that `wanted` stands for; InvalidArgumentError unless it is one of Wanted."""
    if wanted is None:
        return "auto"
    if isinstance(wanted, bool) or (isinstance(wanted, str) and wanted == "auto"):
        return wanted
    raise wrong("feedback", wanted, "'auto', True or False")


def decide(
    wanted: bool | str, needed: int, groups: Sequence[dist.ProcessGroup], on_gpu: bool
) -> Feedback:
    """Decide for all ranks that train the model; each of them calls it.

    Args:
        wanted: from check(). MismatchError on every rank if they differ in it.
        needed: bytes that residuals take on this rank.
        groups: of the shards, and of the replicas if there are any.
        on_gpu: the residuals lie on the current GPU, not in the host's memory.
    """
    memory = _of_gpu() if on_gpu else _of_host()
    ranks = [(wanted, needed, *memory)]
    for group in groups:
        gathered: list[list[tuple[bool | str, int, str, int]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, ranks, group=group)
        ranks = [one for part in gathered for one in part]
    for other, *_ in ranks:
        if other != wanted:
            raise MismatchError(
                f"rank {dist.get_rank()}: feedback is {wanted!r}, and {other!r} on another rank; "
                "pass the same value to compress() on every rank"
            )
    sharers = Counter(where for _, _, where, _ in ranks)
    available = min(free // sharers[where] for _, _, where, free in ranks)
    needed = max(one[1] for one in ranks)
    fits = SHARE * needed <= available
    return Feedback(wanted, fits if wanted == "auto" else bool(wanted), needed, available)


def _of_host() -> tuple[str, int]:
    """The machine, whose memory the ranks on it share, and the bytes available of it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return _machine(), 1024 * int(kilobytes)


def _of_gpu() -> tuple[str, int]:
    """The current GPU, and the bytes that are free on it."""
    unique = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return f"{_machine()} {unique}", torch.cuda.mem_get_info()[0]


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
