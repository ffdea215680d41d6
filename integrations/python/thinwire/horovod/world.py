"""init() and what it makes: the ranks, and the process sets that collectives go over."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire import launch
from thinwire.arguments import check_kind, check_whole, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.horovod.exact import ExactCollectives, Label
from thinwire.horovod.joining import Joining
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
    """A rank's words to the others; local_rank is None where no launcher says it."""

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


class Members:
    """The ranks of one process set that is in use, on one of them: its group, which is its own so
    that what the program does with torch.distributed goes its own way, and what is in flight."""

    def __init__(self, group: dist.ProcessGroup, joining: Joining | None = None) -> None:
        """All members call it: they connect here, and not in a first allreduce that is submitted
        on one rank while another still waits for a broadcast."""
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)  # among the members
        self.joining = joining  # None: other than global_process_set
        self.exact = ExactCollectives(group, joining)
        self.in_flight: set[str] = set()  # names
        all_reduce(torch.zeros(1, dtype=torch.float32), codec="fp32", group=group, strict=True)

    def begin(self, kind: str, key: tuple[str, str | None], part: Any) -> Callable[[], object]:
        """As Joining.begin(), where ranks may join."""
        return self.joining.begin(kind, key, part) if self.joining else lambda: None

    def close(self) -> None:
        self.exact.close()
        dist.destroy_process_group(self.group)


class ProcessSet:
    """Some of the ranks, which collectives with `process_set=` go over. init() or
    add_process_set() takes it into use, and then it has a process_set_id."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Args:
            ranks: of the job, each once; their order does not matter.

        Raises:
            InvalidArgumentError: it is no such list, or an MPI communicator.
        """
        expected = "a list of ranks, each once"
        check_kind("ranks", ranks, Iterable, expected)
        listed = list(ranks)
        whole = all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in listed)
        if not whole or len(set(listed)) < len(listed):
            raise wrong("ranks", ranks, expected)
        self.ranks: list[int] = sorted(listed)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """The number of its ranks; None while it is not in use."""
        return len(self.ranks) if self._in_use() else None

    def rank(self) -> int | None:
        """This process among its ranks; None while it is not in use, and outside it."""
        return self.ranks.index(rank()) if self._in_use() and self.included() else None

    def included(self) -> bool:
        """Return whether this process is in it."""
        return rank() in self.ranks

    def _in_use(self) -> bool:
        return is_initialized() and self.process_set_id in current().sets

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])  # init() says which ranks these are
global_process_set.process_set_id = 0


class World:
    """All ranks and the process sets in use, from init() to shutdown()."""

    def __init__(self) -> None:
        place = launch.find() if launch.launched() else None
        self._made_default = not dist.is_initialized()
        if self._made_default:
            _init_torch(place)
        group = dist.new_group(backend="gloo")
        local = (place.local_rank, place.local_size) if place else (None, None)
        seat = Seat(socket.gethostname(), *local)
        seats: list[Seat] = [seat] * dist.get_world_size(group)
        dist.all_gather_object(seats, seat, group=group)
        self.numbers = numbers_of(dist.get_rank(group), seats)
        self.everyone = Members(group, Joining(group))
        # By process_set_id; None where this rank is not in the set.
        self.sets: dict[int | None, Members | None] = {0: self.everyone}
        self.alone: dist.ProcessGroup | None = None  # of this rank, once there is a process set

    def add(self, process_set: ProcessSet) -> None:
        """All ranks of the job call it, with the same ranks."""
        ranks, size = process_set.ranks, self.numbers.size
        if process_set.process_set_id in self.sets or not ranks or ranks[-1] >= size:
            raise wrong("process_set", process_set, f"a new one, of some of {size} ranks")
        label = Label("add_process_set", None, str(ranks))
        group = self.everyone.exact.agreed(label, lambda _: self._new_group(ranks)).result()
        self.sets[number := next(_set_numbers)] = (
            Members(group) if self.numbers.rank in ranks else None
        )
        process_set.process_set_id = number

    def _new_group(self, ranks: list[int]) -> Any:
        # Torch 2.14 names a group by the number of those that its process has made before, so all
        # ranks must make as many: a rank outside the set must not make its own when it needs one.
        if self.alone is None:
            mine = [self.numbers.rank]
            self.alone = dist.new_group(mine, backend="gloo", use_local_synchronization=True)
        return dist.new_group(ranks, backend="gloo")

    def remove(self, process_set: ProcessSet) -> bool:
        """All ranks of the job call it, after the set's collectives are waited for."""
        number = process_set.process_set_id
        if not number or number not in self.sets:
            return False
        label = Label("remove_process_set", None, str(process_set.ranks))
        self.everyone.exact.agreed(label, lambda _: None).result()
        process_set.process_set_id = None
        members = self.sets.pop(number)
        if members is not None:
            members.close()
        return True

    def close(self) -> None:
        for members in reversed(self.sets.values()):
            if members is not None and members is not self.everyone:
                members.close()
        self.everyone.joining.close()
        self.everyone.exact.close()
        if self.alone is not None and not self._made_default:
            dist.destroy_process_group(self.alone)
        dist.destroy_process_group(None if self._made_default else self.everyone.group)


_set_numbers = itertools.count(1)  # never reused, so that a set of an ended World is not in use


@functools.cache
def _stores() -> dict[launch.Place, dist.Store]:
    """The stores in which this process has met others. They stay: a rank that calls init() after
    shutdown() before rank 0 has shut down would else meet in a store that ends."""
    return {}


_meetings = itertools.count(1)  # all ranks have as many


def _init_torch(place: launch.Place | None) -> None:
    """torch's default group: where a launcher says, or alone."""
    if place is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    if place not in _stores():
        launch.setup()
        _stores()[place], *_ = next(rendezvous("env://"))
    store = dist.PrefixStore(f"horovod {next(_meetings)}", _stores()[place])
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)


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


def members_of(process_set: Any) -> Members:
    """The members of a collective's process set; None means all ranks.

    InvalidArgumentError if it is not in use, or this rank is not in it."""
    if process_set is None:
        return current().everyone
    check_kind("process_set", process_set, ProcessSet, "a ProcessSet, or None for all ranks")
    sets, number = current().sets, process_set.process_set_id
    if number not in sets:
        raise wrong("process_set", process_set, "one that add_process_set() or init() was given")
    members = sets[number]
    if members is None:
        raise wrong("process_set", process_set, f"one with rank {rank()}, which calls it")
    return members


def group_for(process_set: Any) -> dist.ProcessGroup:
    """The group of a process set; on a rank outside it that of this rank alone."""
    if isinstance(process_set, ProcessSet):
        world = current()
        if world.sets.get(process_set.process_set_id, 0) is None and world.alone is not None:
            return world.alone
    return members_of(process_set).group


def init(comm: None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Finds the other ranks, by the variables of torchrun, srun, mpirun and others
    (thinwire.launch); without any of them this process is alone. All ranks call it; it does nothing
    the second time. torch's default process group is used if it is there, and else made.

    comm: Horovod's, for some of the ranks only, which is an InvalidArgumentError.
    process_sets: those to take into use at once, the same on all ranks; more may be added later,
      which Horovod's "dynamic" allows as well."""
    if comm is not None:
        raise wrong("comm", comm, "None: all ranks that the launcher started take part")
    given = [] if process_sets in (None, "dynamic") else process_sets
    listed = isinstance(given, (list, tuple))
    if not listed or not all(isinstance(each, ProcessSet) for each in given):
        raise wrong("process_sets", process_sets, 'a list of ProcessSet, "dynamic" or None')
    if not _worlds():
        _worlds().append(World())
        global_process_set.ranks = list(range(size()))
        for process_set in given:
            current().add(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Takes a process set into use, and returns it. All ranks of the job call it, in one order.

    process_set: one that is not in use, or a list of ranks. InvalidArgumentError for anything else;
      MismatchError, on every rank, if they give different ones."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    current().add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends the use of a process set; all ranks of the job call it. Returns False, and does nothing,
    for global_process_set and for one that is not in use."""
    check_kind("process_set", process_set, ProcessSet, "a ProcessSet")
    return current().remove(process_set)


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and returns when all ranks have said so, the rank that
    did so last. Until then it takes part with zeros in the allreduces, reducescatters and optimizer
    steps of the others, whose averages are still over all ranks. It does not step itself, so
    broadcast_parameters() from the returned rank may follow.

    device: the number of the GPU for zeros that stand for tensors on a GPU; -1: torch's current
      one.

    On the others, meanwhile, gathers, broadcasts, minima, maxima, products and barriers are a
    MismatchError. TimeoutError if they make no call within the deadline of the group's collectives;
    collectives of process sets do not wait for ranks that have joined, and end so as well."""
    check_whole("device", device, -1)
    joining = current().everyone.joining
    return joining.join(None if device < 0 else torch.device("cuda", device))


def shutdown() -> None:
    """Waits for what is in flight, and leaves the other ranks. All ranks call it, or none: at exit
    it happens by itself. init() may follow."""
    if _worlds():
        _worlds().pop().close()


def is_initialized() -> bool:
    """True if init() was called, and shutdown() not since."""
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
    """True if all hosts have as many processes."""
    return current().numbers.homogeneous
