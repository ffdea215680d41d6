"""init(), the ranks, and the process sets of collectives."""

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
from thinwire.arguments import as_int, check_kind, is_whole, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.horovod.exact import ExactCollectives, Label
from thinwire.horovod.joining import Joining
from thinwire.torch.collectives import all_reduce


class Numbers(NamedTuple):
    """Rank numbers and sizes. cross: among the ranks with the same local rank, one on each
    host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool  # all hosts have the same number of ranks


class Seat(NamedTuple):
    """The data that ranks exchange in init(). local_rank is None if the launcher does not set
    it."""

    host: str
    local_rank: int | None
    local_size: int | None


def numbers_of(rank: int, seats: Sequence[Seat]) -> Numbers:
    """Return this rank's numbers. seats: of all ranks, by rank. Without a launcher, ranks with the
    same host name are on the same host."""
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
    """One rank's view of a process set in use: its process group, which is not the program's, so
    that the program's own torch.distributed calls do not interfere, and its calls in flight."""

    def __init__(self, group: dist.ProcessGroup, joining: Joining | None = None) -> None:
        """All members call it, and connect here. Connecting in the first allreduce could deadlock,
        if another rank still waits for a broadcast then."""
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)  # among the members
        self.joining = joining  # None for other sets than global_process_set
        self.exact = ExactCollectives(group, joining)
        self.in_flight: set[str] = set()  # names in use
        all_reduce(torch.zeros(1, dtype=torch.float32), codec="fp32", group=group, strict=True)

    def begin(self, kind: str, key: tuple[str, str | None], part: Any) -> Callable[[], object]:
        """Call Joining.begin(), if ranks may join."""
        return self.joining.begin(kind, key, part) if self.joining else lambda: None

    def close(self) -> None:
        self.exact.close()
        dist.destroy_process_group(self.group)


class ProcessSet:
    """A subset of the ranks, for the `process_set` argument of collectives. Register it with init()
    or add_process_set(), which set its process_set_id."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Args:
            ranks: ranks of the job, each once; their order does not matter.

        Raises:
            InvalidArgumentError: it is not such a list, or it is an MPI communicator.
        """
        expected = "a list of ranks, each once"
        check_kind("ranks", ranks, Iterable, expected)
        listed = list(ranks)
        whole = all(is_whole(r) and r >= 0 for r in listed)
        if not whole or len(set(listed)) < len(listed):
            raise wrong("ranks", ranks, expected)
        self.ranks: list[int] = sorted(map(int, listed))
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return the number of its ranks; None while it is not in use."""
        return len(self.ranks) if self._in_use() else None

    def rank(self) -> int | None:
        """Return this process's rank in the set; None while the set is not in use, or outside
        it."""
        return self.ranks.index(rank()) if self._in_use() and self.included() else None

    def included(self) -> bool:
        """Return whether this process is in it."""
        return rank() in self.ranks

    def _in_use(self) -> bool:
        return is_initialized() and self.process_set_id in current().sets

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])  # init() sets its ranks
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
        # By process_set_id; the value is None if this rank is not in the set.
        self.sets: dict[int | None, Members | None] = {0: self.everyone}
        self.alone: dist.ProcessGroup | None = None  # of this rank only; made with the first set

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
        # Torch 2.14 names a group by the number of groups that its process has created before, so
        # all ranks must create the same number: ranks inside the set create `alone`, too.
        if self.alone is None:
            mine = [self.numbers.rank]
            self.alone = dist.new_group(mine, backend="gloo", use_local_synchronization=True)
        return dist.new_group(ranks, backend="gloo")

    def remove(self, process_set: ProcessSet) -> bool:
        """All ranks of the job call it, after waiting for the set's collectives."""
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
    """Return the rendezvous stores that this process has used. They are kept: otherwise a rank that
    calls init() after shutdown(), before rank 0 has shut down, would use a store that ends."""
    return {}


_meetings = itertools.count(1)  # counts calls of init(), alike on all ranks


def _init_torch(place: launch.Place | None) -> None:
    """Initialize torch's default group at the launcher's address, or with this rank alone."""
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
    """Return the list of worlds, none or one: Horovod's functions are global to the process."""
    return []


def current() -> World:
    """Return the World. InvalidArgumentError before init() and after shutdown()."""
    if not _worlds():
        raise InvalidArgumentError(
            "thinwire.horovod is not initialized; call thinwire.horovod.init() first"
        )
    return _worlds()[0]


def members_of(process_set: Any) -> Members:
    """Return the members of a collective's process set; None means all ranks.

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
    """Return the group of a process set; on a rank outside it, a group of only this rank."""
    if isinstance(process_set, ProcessSet):
        world = current()
        if world.sets.get(process_set.process_set_id, 0) is None and world.alone is not None:
            return world.alone
    return members_of(process_set).group


def init(comm: None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other ranks, by the variables of torchrun, srun, mpirun and others
    (thinwire.launch); without a launcher this process is the only rank. All ranks call it; a second
    call does nothing. torch's default process group is used if it is initialized, and initialized
    otherwise.

    Args:
        comm: Horovod's argument for a subset of the ranks; must be None.
        process_sets: process sets to register now, the same on all ranks. More may be added later,
            also without Horovod's "dynamic".

    Raises:
        InvalidArgumentError: an argument is not valid.
    """
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
    """Register a process set. All ranks of the job call it, in the same order.

    Args:
        process_set: one that is not in use, or a list of ranks.

    Returns:
        The process set.

    Raises:
        InvalidArgumentError: the argument is not valid.
        MismatchError: on every rank: the ranks' arguments differ.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    current().add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. All ranks of the job call it. Returns False, and does nothing, for
    global_process_set and for a set that is not in use."""
    check_kind("process_set", process_set, ProcessSet, "a ProcessSet")
    return current().remove(process_set)


def join(device: int = -1) -> int:
    """Call when this rank has no more data. It blocks until all ranks have joined. Until then this
    rank takes part with zeros in the allreduces, reducescatters and optimizer steps of the others,
    whose averages still divide by all ranks. It does not step its own optimizer, so call
    broadcast_parameters() from the returned rank afterwards.

    Meanwhile, gathers, broadcasts, minima, maxima, products and barriers of the others are a
    MismatchError. A joined rank takes no part in collectives of process sets; those of a set that
    includes it end with a TimeoutError.

    Args:
        device: the number of the GPU for zeros in place of tensors on a GPU; -1: torch's current
            GPU.

    Returns:
        The rank that joined last.

    Raises:
        TimeoutError: the others make no call within the deadline of the group's collectives.
    """
    device = as_int("device", device, -1)
    joining = current().everyone.joining
    return joining.join(None if device < 0 else torch.device("cuda", device))


def shutdown() -> None:
    """Wait for pending calls, and disconnect. Either all ranks call it, or none; it also happens at
    exit. init() may be called again."""
    if _worlds():
        _worlds().pop().close()


def is_initialized() -> bool:
    """Return whether init() was called, and shutdown() was not called since."""
    return bool(_worlds())


def rank() -> int:
    """Return this process's rank among all."""
    return current().numbers.rank


def size() -> int:
    """Return the number of processes."""
    return current().numbers.size


def local_rank() -> int:
    """Return this process's rank among those on its host."""
    return current().numbers.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current().numbers.local_size


def cross_rank() -> int:
    """Return this process's rank among those with the same local rank: the number of its host."""
    return current().numbers.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return current().numbers.cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    return current().numbers.homogeneous
