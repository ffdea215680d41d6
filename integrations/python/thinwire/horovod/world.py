"""init() and what it makes: the ranks, their process group, and what is in flight on it."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire import launch
from thinwire.arguments import wrong
from thinwire.errors import InvalidArgumentError
from thinwire.horovod.exact import ExactCollectives
from thinwire.torch.collectives import all_reduce


class Numbers(NamedTuple):
    """cross: among the ranks with the same local rank, one on each host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool  # every host has as many ranks


class Seat(NamedTuple):
    """What a rank tells the others; local_rank is None where no launcher says it."""

    host: str
    local_rank: int | None
    local_size: int | None


def numbers_of(rank: int, seats: Sequence[Seat]) -> Numbers:
    """seats: of all ranks, by rank. Without a launcher ranks of one host name share a host."""
    if any(seat.local_rank is None for seat in seats):
        hosts = [seat.host for seat in seats]
        seats = [Seat(h, hosts[:r].count(h), hosts.count(h)) for r, h in enumerate(hosts)]
    mine = seats[rank]
    peers = [r for r, seat in enumerate(seats) if seat.local_rank == mine.local_rank]
    alike = len({seat.local_size for seat in seats}) == 1
    return Numbers(
        rank, len(seats), mine.local_rank, mine.local_size, peers.index(rank), len(peers), alike
    )


class World:
    """All ranks, from init() to shutdown(). It has a process group of its own, so that what the
    program does with torch.distributed goes its own way."""

    def __init__(self) -> None:
        place = launch.find() if launch.launched() else None
        self._made_default = not dist.is_initialized()
        if self._made_default:
            _init_torch(place)
        self.group = dist.new_group(backend="gloo")
        self.in_flight: set[str] = set()  # names
        local = (place.local_rank, place.local_size) if place else (None, None)
        seat = Seat(socket.gethostname(), *local)
        seats: list[Seat] = [seat] * dist.get_world_size(self.group)
        dist.all_gather_object(seats, seat, group=self.group)
        self.numbers = numbers_of(dist.get_rank(self.group), seats)
        # Ranks connect here, where all of them are, and not in a first allreduce that is submitted
        # on one rank while another still waits for a broadcast.
        all_reduce(torch.zeros(1), codec="fp32", group=self.group, strict=True)
        self.exact = ExactCollectives(self.group)

    def close(self) -> None:
        self.exact.close()
        dist.destroy_process_group(None if self._made_default else self.group)


def _init_torch(place: launch.Place | None) -> None:
    """torch's default group: where a launcher says, or alone."""
    if place is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        launch.setup()
        dist.init_process_group("gloo")


@functools.cache
def _worlds() -> list[World]:
    """None or one: Horovod's functions are those of the process."""
    return []


def current() -> World:
    """InvalidArgumentError before init() and after shutdown()."""
    if not _worlds():
        raise InvalidArgumentError(
            "thinwire.horovod is not initialized; call thinwire.horovod.init() first"
        )
    return _worlds()[0]


def init(comm: None = None, process_sets: None = None) -> None:
    """Finds the other ranks, by the variables of torchrun, srun, mpirun and others
    (thinwire.launch); without any of them this process is alone. All ranks call it; it does nothing
    the second time. torch's default process group is used if it is there, and else made.

    comm, process_sets: Horovod's, for some of the ranks only, which is an InvalidArgumentError."""
    for name, got in (("comm", comm), ("process_sets", process_sets)):
        if got is not None:
            raise wrong(name, got, "None: all ranks that the launcher started take part")
    if not _worlds():
        _worlds().append(World())


def shutdown() -> None:
    """Waits for what is in flight, and leaves the other ranks. All ranks call it, or none: at exit
    it happens by itself. init() may follow."""
    if _worlds():
        _worlds().pop().close()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return bool(_worlds())


def rank() -> int:
    """This process among all."""
    return current().numbers.rank


def size() -> int:
    """The number of processes."""
    return current().numbers.size


def local_rank() -> int:
    """This process among those of its host."""
    return current().numbers.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return current().numbers.local_size


def cross_rank() -> int:
    """This process among those of the same local rank, which is the number of its host."""
    return current().numbers.cross_rank


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return current().numbers.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes."""
    return current().numbers.homogeneous
