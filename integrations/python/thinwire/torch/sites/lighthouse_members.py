"""Members that come and go, over torchft's Lighthouse: join("http://host:29510").

This uses only torchft.coordination's client of torchft 0.2 (its page says that the interface may
change), and not its Manager, which discards steps after a failure. The Lighthouse lists the
members. It does not authenticate them, so the worst that a wrong Lighthouse can do is to keep
members apart: members prove to each other with the key file that they belong to the group.

The Lighthouse does not report dead members, so members of an epoch send each other heartbeats on
connections of their own ("lines"). It does not remember former members, either. So each member
tells the others its last epoch, and the newest of these must be followed by an epoch with more than
half of its members, which no two groups can have. Members that have said goodbye do not count, nor
those whose line has closed and whose machine refuses connections to their port: their process has
ended."""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from thinwire import errors
from thinwire.torch import private
from thinwire.torch.group import count_user
from thinwire.torch.sites.meeting import (
    Epoch,
    EpochGroup,
    EpochStore,
    address_towards,
    have_most,
    unless_lost,
)

_log = logging.getLogger("thinwire")

_CONNECT = datetime.timedelta(seconds=10)
_LINE_S = 2.0  # seconds to connect to another member
_GOODBYE = 0x80  # a smaller byte is a heartbeat: the low bits of the sender's epoch number
_MOST_LISTENERS = 256  # so that strangers cannot use up all file descriptors by connecting


class _Line:
    """A connection to another member, which sends heartbeats on it. It closes when the member's
    process ends."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self.has_left = False  # True after a goodbye
        self.epoch: int | None = None  # the member's epoch in its last heartbeat
        self.heard = time.monotonic()
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._socket = socket.create_connection(self._address, _LINE_S)
            self._socket.setblocking(False)

    def read(self) -> None:
        while self._socket is not None:
            try:
                found = self._socket.recv(256)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            self.has_left = self.has_left or _GOODBYE in found
            if found:
                self.heard = time.monotonic()
                self.epoch = self.epoch if self.has_left else found[-1]
            else:
                self.close()

    def is_open(self) -> bool:
        return self._socket is not None

    def has_ended(self) -> bool:
        """Return whether the member has left or its process has ended. False if only the line has
        broken. Blocks for one round trip."""
        if self.has_left or self.is_open():
            return self.has_left
        try:
            socket.create_connection(self._address, _LINE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Signs:
    """Heartbeats to and from the members of an epoch, on a separate thread until close()."""

    def __init__(self, beat_s: float, dead_s: float) -> None:
        self._beat_s, self._dead_s = beat_s, dead_s
        self._server = socket.create_server(("", 0))
        self._server.setblocking(False)
        self.port = self._server.getsockname()[1]
        self._listeners: list[socket.socket] = []  # used only by the thread
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._epoch = 0
        self._looked = time.monotonic()
        self._fail: Callable[[errors.Error], None] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire sites", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s):
            with contextlib.suppress(OSError):
                while True:
                    listener = self._server.accept()[0]
                    if len(self._listeners) == _MOST_LISTENERS:
                        listener.close()
                        continue
                    listener.setblocking(False)
                    self._listeners.append(listener)
            self._send(self._epoch)
            with self._lock:
                self._read()
                silent, fail = self._silent(), self._fail
                if silent is None or fail is None:
                    continue
                self._fail = None
            error = errors.PeerLostError(
                f"{silent} has given no sign of life for {self._dead_s:g} s"
            )
            # On another thread: it waits while connections are made, and heartbeats must continue.
            threading.Thread(target=fail, args=(error,), name="thinwire sites", daemon=True).start()
        self._send(_GOODBYE)
        for listener in [*self._listeners, self._server]:
            listener.close()

    def _send(self, sign: int) -> None:
        kept = []
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                with contextlib.suppress(BlockingIOError):  # the receiver was suspended for a day
                    listener.send(bytes([sign]))
                kept.append(listener)
                continue
            listener.close()
        self._listeners = kept

    def _read(self) -> None:
        """Read the heartbeats. If this process was suspended, so that it reads late, the others are
        not silent."""
        now = time.monotonic()
        late = now - self._looked > self._dead_s / 2
        self._looked = now
        for line in self._lines.values():
            line.read()
            if late:
                line.heard = now

    def _silent(self) -> str | None:
        now = time.monotonic()
        for member, line in self._lines.items():
            if line.is_open() and now - line.heard > self._dead_s:
                return _words(member)
        return None

    def watch(self, addresses: Mapping[str, str], epoch: int = 0) -> None:
        """Watch these members, by their addresses, for the epoch with this number."""
        lines = {member: _Line(address) for member, address in addresses.items()}
        with self._lock:
            before, self._lines, self._fail = self._lines, lines, None
            self._epoch = epoch % _GOODBYE
        for line in before.values():
            line.close()

    def guard(self, fail: Callable[[errors.Error], None] | None) -> None:
        """Call `fail` once, on another thread, when a member sends no heartbeats. It is not called
        when a line closes, because then the connections of the meeting close, too."""
        with self._lock:
            self._fail = fail

    def lost(self) -> str | None:
        """Return text about a member that is lost to this epoch, or None. It is gone or silent, or
        in a later epoch because this member was suspended when the epoch was made."""
        with self._lock:
            self._read()
            for member, line in self._lines.items():
                ahead = 0 if line.epoch is None else (line.epoch - self._epoch) % _GOODBYE
                if not line.is_open() or 0 < ahead < _GOODBYE // 2:
                    return _words(member)
            return self._silent()

    def ended(self) -> set[str]:
        """Return the members that have left, and those whose processes have ended."""
        with self._lock:
            self._read()
            lines = dict(self._lines)
        return {member for member, line in lines.items() if line.has_ended()}

    def close(self) -> None:
        """Tell the others that this member leaves. A second call does nothing."""
        self._closing.set()
        self._thread.join()
        self.watch({})


def _words(member: str) -> str:
    return f"member '{_name(member)}' of the Lighthouse"


def _name(member: str) -> str:
    return member.rpartition(":")[0]


class LighthouseMembers:
    """The members that join() returns for a Lighthouse's address."""

    def __init__(
        self,
        address: str,
        name: str,
        key_file: str | None,
        *,
        host: str | None,
        timeout_s: float,
        beat_s: float,
        dead_s: float,
        allow_split: bool,
    ) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise errors.UnavailableError(
                f"join('{address}') needs torchft ({error}); pip install torchft, or give join() a "
                "torch.distributed.TCPStore"
            ) from None
        self.key_file = key_file
        self.name, self._timeout_s, self._beat_s, self._dead_s = name, timeout_s, beat_s, dead_s
        self._allow_split = allow_split
        self._id = f"{name}:{uuid.uuid4().hex[:8]}"
        self._host = host or _address_towards(address)
        self._store: dist.TCPStore | None = None  # created at the first meeting
        try:
            self._client: Any = LighthouseClient(address, _CONNECT)
        except RuntimeError as error:
            raise errors.UnavailableError(f"no Lighthouse at {address}: {error}") from None
        self._epoch: Epoch | None = None
        self._count = 0  # number of epochs, as far as their members knew
        self._last: list[str] = []  # the members of the last epoch whose processes have not ended
        self._signs: _Signs | None = None  # created at the first meeting
        self._quorum = 0
        self._attempt = 0
        self._asked = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None  # created at the first meeting

    def _take_part(self) -> None:
        """Register at the Lighthouse. Only a site's first rank calls this, so that the Lighthouse
        does not wait for the others."""
        # Each member has a store; an epoch's members connect through that of the first member.
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._signs = _Signs(self._beat_s, self._dead_s)
        self._thread = threading.Thread(target=self._beat, name="thinwire sites", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closing.wait(self._beat_s):
            # The next quorum() reports an error.
            with private.in_torch(), contextlib.suppress(RuntimeError):
                self._client.heartbeat(self._id)

    def meet(self, why: errors.Error | None) -> Epoch:
        """Return the next epoch: the Lighthouse's next quorum that has more than half of the last
        epoch's members that may live, unless all allow a split. Blocks until there is one;
        TimeoutError after timeout_s."""
        if self._thread is None:
            self._take_part()
        end = time.monotonic() + self._timeout_s
        if why is not None:
            self._attempt += 1
            self._signs.guard(None)
        waits = ""
        while True:
            listed, number = self._ask(end, why)
            self._asked = time.monotonic()
            attempt = max((one.data or {}).get("attempt", 0) for one in listed)
            if why is None and self._epoch is not None and (number, attempt) == (
                self._quorum, self._attempt
            ):  # fmt: skip
                return self._epoch
            if reason := self._cannot_follow(listed):
                if reason != waits:
                    waits = reason
                    _log.warning("member '%s' waits: %s", self.name, waits)
                self._check_time(end, waits)
                continue
            self._quorum, self._attempt = number, attempt
            self._count = 1 + max((one.data or {}).get("epochs", 0) for one in listed)
            self._last = [one.replica_id for one in listed]
            self._signs.watch(
                {one.replica_id: one.address for one in listed if one.replica_id != self._id},
                self._count,
            )
            lost = self._signs.lost()
            if lost is None:
                break
            # The Lighthouse lists a dead member until its heartbeat is missing.
            why = errors.PeerLostError(f"{lost} does not answer")
            self._attempt += 1
            self._check_time(end, f"{why}; see to it that members reach one another, or end it")
        first = listed[0].store_address
        rank = [one.replica_id for one in listed].index(self._id)
        host, _, port = first.rpartition(":")
        store = self._store
        if rank != 0:
            # A lost member fails the meeting, and is not in the next one.
            with contextlib.suppress(errors.PeerLostError):
                store = unless_lost(
                    lambda: dist.TCPStore(host, int(port), is_master=False, timeout=_CONNECT),
                    self._signs.lost,
                )
        key = f"sites{number}.{attempt}"
        group = EpochGroup(
            rank, len(listed), key, count_user(), EpochStore(store, key, self._signs.lost),
            timeout_s=self._timeout_s, host=host,
        )  # fmt: skip
        names = tuple(_name(one.replica_id) for one in listed)
        self._epoch = Epoch(number, group, names)
        return self._epoch

    def _ask(self, end: float, why: errors.Error | None) -> tuple[list[Any], int]:
        """Return the members of the Lighthouse's next quorum, by rank, and its number. why: the
        reason for a new quorum, for the message of the TimeoutError."""
        ended = self._signs.ended()
        self._last = [member for member in self._last if member not in ended]
        told = {
            "attempt": self._attempt, "epochs": self._count, "last": self._last,
            "allow_split": self._allow_split,
        }  # fmt: skip
        said = False
        while True:
            try:
                quorum = self._client.quorum(
                    replica_id=self._id,
                    timeout=datetime.timedelta(seconds=max(0.1, end - time.monotonic())),
                    address=f"{self._host}:{self._signs.port}",
                    store_address=f"{self._host}:{self._store.port}",
                    step=0,
                    world_size=1,
                    shrink_only=False,
                    data=told,
                )
                break
            except (RuntimeError, TimeoutError) as error:  # the Lighthouse may be restarted
                waits = f"the Lighthouse has no quorum ({error})"
                if why is not None:
                    waits = f"{why}, and {waits}"
            if not said:
                said = True
                _log.warning("member '%s' waits: %s", self.name, waits)
            self._check_time(end, f"{waits}; look whether it runs, and at its --min_replicas")
        listed = sorted(quorum.participants, key=lambda one: one.replica_id)
        return listed, int(quorum.quorum_id)

    def _cannot_follow(self, listed: list[Any]) -> str | None:
        """Return the reason why these members must not make the next epoch, or None."""
        told = [one.data or {} for one in listed]
        if all(each.get("allow_split", False) for each in told):
            return None
        count = max(each.get("epochs", 0) for each in told)
        lasts = [each.get("last", []) for each in told if each.get("epochs", 0) == count]
        last = [_name(member) for member in lasts[0] if all(member in each for each in lasts)]
        here = [_name(one.replica_id) for one in listed]
        if not last or have_most(here, last):
            return None
        return (
            f"members {sorted(here)} are here, expected more than half of the last epoch's "
            f"{sorted(last)}, since the others may go on without these; continue them, start new "
            "ones under their names, or, if they train nowhere, pass allow_split=True to join() on "
            "all members"
        )

    def _check_time(self, end: float, waits: str) -> None:
        """TimeoutError if there is no time left for another quorum."""
        if self._closing.is_set():
            raise errors.Error(f"member '{self.name}' has left; create another by join()")
        if time.monotonic() > end:
            raise errors.TimeoutError(
                f"member '{self.name}': no epoch within {self._timeout_s:g} s; {waits}"
            )
        time.sleep(self._beat_s)

    def wants_change(self) -> bool:
        """Return whether a second has passed since the last quorum: the Lighthouse reports new
        members only when all ask for a quorum."""
        return time.monotonic() - self._asked > 1.0

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Call `fail` once, on another thread, if a member of the epoch sends no heartbeats."""
        self._signs.guard(fail)

    def close(self) -> None:
        """Leave, so that the others' majority does not include this member. The Lighthouse notices
        by the missing heartbeat. A second call does nothing."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._signs is not None:
            self._signs.close()


def _address_towards(address: str) -> str:
    """Return this machine's address on the interface that leads to the Lighthouse."""
    host, _, port = address.partition("://")[2].rstrip("/").rpartition(":")
    try:
        return address_towards(host, int(port))
    except (OSError, ValueError) as error:
        raise errors.InvalidArgumentError(
            f"address is {address!r}, expected http://host:port of a Lighthouse ({error})"
        ) from None
