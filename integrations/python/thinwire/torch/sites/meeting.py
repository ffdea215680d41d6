"""Meeting: the connections among the members of one epoch, on which they exchange bytes.

Bytes are sent as float32 with the codec fp32, which copies memory without looking at it. So the
transport, its authentication by key and its failure detection are those of gradients."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.comm import Communicator
from thinwire.config import Config
from thinwire.torch import private, tensors
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.waiter import Pending
from thinwire.torch.group import Group, TorchStore
from thinwire.torch.sites.state import memory_of

MOST_IN_ONE_HOP = 8  # members
_LOOK_S = 0.05  # seconds between two checks for a lost member


class Epoch(NamedTuple):
    """The members that take part, from one change of members to the next."""

    number: int  # grows with every change, equal on all members
    group: Group  # this member's rank, and the store through which the members connect
    names: tuple[str, ...]  # of the members, by rank

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


def have_most(here: Iterable[str], last: Iterable[str]) -> bool:
    """Return whether the members `here` have the names of more than half of the members `last`,
    which is never true of two groups at a time (dynamic voting: Jajodia and Mutchler, ACM TODS
    15(2), 1990)."""
    wanted = Counter(last)
    return 2 * sum((wanted & Counter(here)).values()) > sum(wanted.values())


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the interface that leads to the host. It sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


_Result = TypeVar("_Result")


def unless_lost(
    call: Callable[[], _Result],
    lost: Callable[[], str | None],
    drop: Callable[[_Result], None] = lambda _: None,
) -> _Result:
    """Return call(), or raise PeerLostError as soon as a member is lost: torch's stores wait
    without end for a suspended server, and connections wait for a member until their deadline. The
    call runs on another thread; if it is abandoned, its late result is passed to `drop`."""
    done = threading.Event()
    lock = threading.Lock()
    found: list[tuple[Any, BaseException | None]] = []
    gone: list[str] = []

    def run() -> None:
        try:
            with private.in_torch():
                result, error = call(), None
        except BaseException as raised:  # raised again on the caller's thread
            result, error = None, raised
        with lock:
            found.append((result, error))
            late = bool(gone)
        done.set()
        if late and error is None:
            drop(result)

    threading.Thread(target=run, name="thinwire sites store", daemon=True).start()
    while not done.wait(_LOOK_S):
        who = lost()
        with lock:
            if who and not found:
                gone.append(who)
                raise errors.PeerLostError(f"{who} is lost while all connect")
    result, error = found[0]
    if isinstance(error, dist.DistError):
        raise errors.PeerLostError(
            f"the store through which the members connect has gone: {error}"
        ) from None
    if error is not None:
        raise error
    return result


class EpochStore(TorchStore):
    """The store through which the members of an epoch connect. A wait ends when one of them is
    lost, because it would never write the key."""

    def __init__(self, store: dist.Store, key: str, lost: Callable[[], str | None]) -> None:
        """lost: returns text about a lost member, or None."""
        super().__init__(dist.PrefixStore(f"thinwire/{key}", store))
        self.lost = lost

    def has(self, key: str) -> bool:
        if who := self.lost():
            raise errors.PeerLostError(f"{who} is lost while all connect")
        return super().has(key)


@dataclass(frozen=True)
class EpochGroup(Group):
    """The members of an epoch, whose store is an EpochStore."""

    def connect(self, config: Config, plan: Mapping[str, str] | None = None) -> Communicator:
        """Connect as Group does. PeerLostError as soon as a member is lost."""

        def drop(late: Communicator) -> None:
            with contextlib.suppress(errors.Error):
                late.fail(errors.PeerLostError("a member was lost while all connected"))
            late.close()

        connect = super().connect
        return unless_lost(lambda: connect(config, plan), self.store.lost, drop)


class _Place:
    """An epoch as a membership for Session."""

    def __init__(self, joined: Group) -> None:
        self.rank, self.size, self._joined = joined.rank, joined.size, joined

    def group(self) -> Group:
        return self._joined


class Gather:
    """Bytes of all members in flight. rows() blocks until they have arrived."""

    def __init__(
        self, mine: torch.Tensor, out: torch.Tensor, members: int, pending: Pending | None
    ) -> None:
        self._mine, self._out, self._members, self._pending = mine, out, members, pending

    def is_there(self) -> bool:
        """Return whether rows() is known not to block."""
        return self._pending is None or self._pending.future.done()

    def rows(self) -> list[memoryview]:
        """Return the bytes of each member, by rank, valid as long as this object. Raises the typed
        error of a failure."""
        if self._pending is not None:
            self._pending.wait()
        everything = memory_of(self._out)
        size = len(everything) // self._members
        return [everything[at : at + size] for at in range(0, len(everything), size)]


class Meeting:
    """The connections of an epoch. They are made at the first exchange, which blocks until all
    members have called it. After a failure a meeting stays failed. All members must make calls with
    the same name in the same order."""

    def __init__(self, epoch: Epoch, settings: Config) -> None:
        """settings: codec fp32, and the options of the connections."""
        self.epoch = epoch
        self._buckets: dict[tuple[str, int, str], Bucket] = {}
        self._session = None if epoch.size == 1 else Session(_Place(epoch.group), settings)
        if self._session is not None:
            self._session.close_with(self)

    def start(self, name: str, mine: Sequence[bytes]) -> Gather:
        """Start an all-gather. mine: pieces of bytes, whose total length is equal on all members
        and a multiple of 4."""
        flat = torch.frombuffer(bytearray().join(mine), dtype=torch.float32)
        return self._start(name, flat, self.epoch.size * flat.numel(), "all_gather")

    def end_turn(self) -> None:
        """Announce that the exchanges since the last call will be repeated in each turn. On links
        with latency their order is then predicted, which saves announcements. Names that are
        started twice in a turn are left out."""
        if self._session is not None:
            self._session.end_step(repeats=True)

    def scatter(self, name: str, mine: Sequence[bytes]) -> Gather:
        """Start an all-to-all. mine: a piece for each member, by rank; all pieces have the same
        length on all members, a multiple of 4."""
        flat = torch.frombuffer(bytearray().join(mine), dtype=torch.float32)
        return self._start(name, flat, flat.numel(), "all_to_all")

    def _start(self, name: str, flat: torch.Tensor, numel: int, collective: str) -> Gather:
        if self._session is None:
            return Gather(flat, flat, 1, None)
        out = tensors.empty(numel)
        bucket = self._bucket(name, flat.numel(), collective)
        pending = self._session.start(bucket, flat, result=out)
        return Gather(flat, out, self.epoch.size, pending)

    def tell(
        self, name: str, mine: bytes, meanwhile: Callable[[], None] = lambda: None
    ) -> list[bytes]:
        """Send a few bytes to all members, and return those of all, in one latency; with many
        members in two, because one hop would send `size` times as much. meanwhile: runs while the
        bytes are in flight."""
        if self._session is None:
            meanwhile()
            return [mine]
        if self.epoch.size > MOST_IN_ONE_HOP:
            gather = self.start(name, [mine.ljust(-(-len(mine) // 4) * 4, b"\0")])
            meanwhile()
            return [bytes(row[: len(mine)]) for row in gather.rows()]
        told = tensors.zeros(self.epoch.size, len(mine))  # a row per member, a number per byte
        told[self.epoch.rank] = torch.tensor(list(mine), dtype=torch.float32)
        bucket = self._bucket(name, told.numel(), "all_reduce")
        pending = self._session.start(bucket, told.view(-1))
        meanwhile()
        pending.wait()
        return [bytes(row) for row in told.to(torch.uint8).tolist()]

    def _bucket(self, name: str, numel: int, collective: str) -> Bucket:
        key = (name, numel, collective)
        if key not in self._buckets:
            label = f"sites/{name}/{numel}/{collective}"
            self._buckets[key] = Bucket(label, numel, "float32", op="sum", collective=collective)
        return self._buckets[key]

    def place(self) -> str:
        """Return text about this member's place: its host, its address for the others, its
        process."""
        address = "no address"
        with contextlib.suppress(OSError):
            address = address_towards(self.epoch.group.host or "127.0.0.1", 1)
        return f"{socket.gethostname()[:40]} ({address}, process {os.getpid()})"

    def wire_bytes(self) -> int:
        """Return the bytes that this member has sent so far. It waits for nothing: another member
        may start an exchange that is in flight here only after this one's next message."""
        return 0 if self._session is None else int(self._session.stats_so_far()["wire_bytes"])

    def fail(self, error: errors.Error) -> None:
        """Fail the meeting on every member with this reason."""
        if self._session is not None:
            self._session.abort(error)

    def close(self) -> None:
        """Close the connections, or, with work in flight, abort it. A second call does nothing."""
        if self._session is not None:
            with contextlib.suppress(errors.Error):
                self._session.close()
