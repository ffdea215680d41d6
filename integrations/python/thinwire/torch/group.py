"""Membership in a torch process group: rank, size, and a key prefix in its rendezvous store."""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from thinwire.comm import Communicator, Store, poll
from thinwire.config import Config
from thinwire.errors import InvalidArgumentError, MismatchError
from thinwire.torch import private

_SLICE = datetime.timedelta(milliseconds=20)  # timeout of one poll of a store without check()


class HomeProcess:
    """The process that created this object. A forked child has a copy of everything and shares the
    connections, but has none of the threads, and locks that they held stay held."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def is_here(self) -> bool:
        """False in a forked child."""
        return self._process == os.getpid()

    def check(self, what: str) -> None:
        """InvalidArgumentError in a forked child; `what` names the object in the message."""
        if not self.is_here():
            raise InvalidArgumentError(
                f"{what} is that of process {self._process}, and process {os.getpid()} is forked "
                "from it, without its threads; leave the collectives to the parent, or start "
                "processes by 'spawn', with a process group of their own"
            )


class TorchStore:
    """torch's rendezvous store as a thinwire.comm.Store.

    It polls: waiting inside the store would hold its lock, while another thread of this process may
    have to write the key that a peer waits for."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        poll(self.has, key, timeout_s)
        return self._store.get(key)

    def remove(self, key: str) -> None:
        """Remove the key if it is set."""
        self._store.delete_key(key)

    def has(self, key: str) -> bool:
        """Return whether the key is set, without waiting for it."""
        if hasattr(self._store, "check"):
            return self._store.check([key])
        try:  # torch before 2.3 has no check()
            self._store.wait([key], _SLICE)
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True)
class Group:
    """One user of a process group. `key` is unique in the group's store and equal on all ranks."""

    rank: int  # within the group
    size: int
    key: str
    serial: int  # counts the users in this process
    store: dist.Store | Store | None
    timeout_s: float | None = None  # of torch's group; used if the settings have none
    host: str | None = None  # of torch's store; its interface is the one to listen on

    def connect(self, config: Config, plan: Mapping[str, str] | None = None) -> Communicator:
        """Block until all ranks have connected, or the timeout is over. MismatchError on every rank
        if the settings differ.

        plan: further settings, by name, that are the same on all ranks, and that the library does
        not know."""
        config = replace(
            config,
            timeout_s=config.timeout_s or self.timeout_s,
            rendezvous_host=config.rendezvous_host or self.host,
        )
        trace, flight = (self._own(file) for file in (config.trace, config.flight))
        config = replace(config, trace=trace, flight=flight)
        store = self.store
        if isinstance(store, dist.Store):
            store = TorchStore(dist.PrefixStore(f"thinwire/{self.key}", store))
        if plan is None or not isinstance(store, TorchStore):
            return Communicator(self.rank, self.size, store, self.key, config)
        with contextlib.suppress(RuntimeError):  # the store is gone; the library says so below
            store.set(f"plan/{self.rank}", json.dumps(dict(plan)).encode())
        try:
            communicator = Communicator(self.rank, self.size, store, self.key, config)
        except MismatchError:  # the plan may have caused it, and names what the user has set
            self._compare(plan, store, range(self.size))
            raise
        try:
            self._compare(plan, store, range(1))
        except MismatchError as error:
            communicator.fail(error)  # rank 0 and those that are like it do not know yet
            communicator.close()
            raise
        return communicator

    def _compare(self, plan: Mapping[str, str], store: TorchStore, ranks: Iterable[int]) -> None:
        """MismatchError for the first of these ranks that has told another plan."""
        for rank in ranks:
            theirs: dict[str, str] = dict(plan)
            with contextlib.suppress(RuntimeError):
                if store.has(f"plan/{rank}"):
                    theirs = json.loads(store.get(f"plan/{rank}", 0))
            for name in {**plan, **theirs}:
                mine, other = plan.get(name), theirs.get(name)
                if mine != other:
                    raise MismatchError(
                        f"rank {self.rank} was set up with {name}={mine}, but rank {rank} with "
                        f"{name}={other}; use the same options on every rank"
                    )

    def _own(self, file: str | None) -> str | None:
        """Return the file's name with this user's number; the library adds the rank."""
        if not file or not self.serial:
            return file
        path = Path(file)
        return str(path.with_suffix(f".{self.serial}{path.suffix}"))


# The number of users that each group, known by its ranks, has had in this process. It is never
# reset, so that a group which is destroyed and created again on the same store gets new keys.
_counters: collections.Counter[object] = collections.Counter()


def users_of(process_group: dist.ProcessGroup) -> dict[str, int]:
    """Return the number of users, by purpose, that this process has counted for the group."""
    mine = tuple(dist.get_process_group_ranks(process_group))
    return {key[1]: n for key, n in _counters.items() if key[0] == mine}


def count_alike(process_group: dist.ProcessGroup, counts: Iterable[Mapping[str, int]]) -> None:
    """Make all ranks continue the group's user counts from equal numbers. counts: users_of() of
    every rank; they differ if ranks are new or were in other groups."""
    ranks = tuple(dist.get_process_group_ranks(process_group))
    for of_one in counts:
        for purpose, count in of_one.items():
            _counters[ranks, purpose] = max(_counters[ranks, purpose], count)


def is_initialized() -> bool:
    """Return whether torch has a default process group."""
    return dist.is_available() and dist.is_initialized()


def check(process_group: object) -> None:
    """InvalidArgumentError unless it is None (the default group) or a torch process group. This
    rank need not be a member."""
    if process_group is None or not dist.is_available():
        return
    if isinstance(process_group, dist.ProcessGroup):
        return
    if process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            f"the process group is {process_group!r}, expected one of torch.distributed.new_group, "
            "or None for the default group"
        )


def rank_or_0(process_group: dist.ProcessGroup | None) -> int:
    """Return this rank within the group, for messages; 0 while torch has no process group."""
    check(process_group)
    return dist.get_rank(process_group) if is_initialized() else 0


# The process that first used each group.
_homes: weakref.WeakKeyDictionary[dist.ProcessGroup, HomeProcess] = weakref.WeakKeyDictionary()


def resolve(process_group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group, or the default group for None. InvalidArgumentError if there is none, if
    this rank is not a member, or in a child that was forked from a process that uses the group; the
    message says that `what` needs it."""
    if not is_initialized():
        raise InvalidArgumentError(
            f"{what} needs a process group: call torch.distributed.init_process_group first"
        )
    check(process_group)
    group = process_group or dist.group.WORLD
    try:
        mine = dist.get_rank(group)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{what} got a process group that was destroyed, expected one that exists; make {what} "
            "again, after torch.distributed.init_process_group or init()"
        ) from error
    if mine < 0:
        raise InvalidArgumentError(
            f"rank {dist.get_rank()}: {what} got a process group that this rank is no member of; "
            "make it on the group's ranks only"
        )
    _homes.setdefault(group, HomeProcess()).check(f"the process group of {what}")
    return group


def join(process_group: dist.ProcessGroup | None, purpose: str) -> Group:
    """Return a new user of the group; `purpose` names its kind. All ranks must join in the same
    order."""
    group = resolve(process_group, purpose)
    ranks = tuple(dist.get_process_group_ranks(group))
    number = _counters[ranks, purpose]
    _counters[ranks, purpose] += 1
    size = dist.get_world_size(group)
    store = private.store_of(group) if size > 1 else None
    return Group(
        dist.get_rank(group), size, f"{purpose}{number}", count_user(), store,
        timeout_s=private.timeout_of(group), host=_host_of(store),
    )  # fmt: skip


def _host_of(store: dist.Store | None) -> str | None:
    """Return the host of a TCPStore, also inside PrefixStores; None for any other store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def count_user() -> int:
    """Count one user of any group; return the number that this process has had before."""
    before = _counters["users"]
    _counters["users"] += 1
    return before


class Membership:
    """Joins a process group at the first use. So frameworks may create it at any time, on some
    ranks or on all, and may destroy and create groups before the first use.

    All ranks must use their memberships with the same purpose in the same order. Thread-safe."""

    def __init__(self, process_group: dist.ProcessGroup | None, purpose: str) -> None:
        """InvalidArgumentError for a group that cannot be joined."""
        check(process_group)
        self._process_group, self._purpose = process_group, purpose
        self._lock = threading.Lock()
        self._group: Group | None = None
        if process_group is not None or is_initialized():
            resolve(process_group, purpose)

    @property
    def rank(self) -> int:
        """This rank in the group, also before joining. InvalidArgumentError while there is none."""
        joined = self._group
        return joined.rank if joined else dist.get_rank(self._members())

    @property
    def size(self) -> int:
        """The number of ranks in the group, likewise."""
        joined = self._group
        return joined.size if joined else dist.get_world_size(self._members())

    def _members(self) -> dist.ProcessGroup:
        return resolve(self._process_group, self._purpose)

    def group(self) -> Group:
        """Join at the first call; return the group. InvalidArgumentError while torch has no process
        group; a later call may succeed."""
        with self._lock:
            if self._group is None:
                self._group = join(self._process_group, self._purpose)
            return self._group
