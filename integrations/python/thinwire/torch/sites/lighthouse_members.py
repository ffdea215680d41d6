"""Members that come and go, over torchft's Lighthouse: join("http://host:29510").

torchft.coordination's client is all that is used of torchft 0.2 (its page says that this interface
may change); its Manager is not, since it discards steps after a failure. The Lighthouse lists who
takes part. It authenticates nobody, so it can keep members apart, and no more: who takes part is
proved among the members, by the key file."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from thinwire import errors
from thinwire.torch.group import Group, count_user
from thinwire.torch.sites.meeting import Epoch, EpochStore

_CONNECT = datetime.timedelta(seconds=10)
_LINE_S = 2.0  # to reach another member's store


class _Lines:
    """A connection to the store of each member, on which nothing is sent: it closes when the
    member's process ends."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._lines: dict[str, socket.socket | None] = {}
        for member, address in addresses.items():
            host, _, port = address.rpartition(":")
            try:
                line = socket.create_connection((host, int(port)), _LINE_S)
                line.setblocking(False)
            except OSError:
                line = None
            self._lines[member] = line

    def lost(self) -> str | None:
        """Return a member that is lost, in words."""
        for member, line in self._lines.items():
            if line is None or _has_closed(line):
                return f"member '{member.rpartition(':')[0]}' of the Lighthouse"
        return None

    def close(self) -> None:
        for line in self._lines.values():
            if line is not None:
                line.close()


def _has_closed(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except BlockingIOError:  # it is open, and nothing has come
        return False
    except OSError:
        return True


class LighthouseMembers:
    """Returned by join()."""

    def __init__(
        self,
        address: str,
        name: str,
        key_file: str | None,
        *,
        host: str | None,
        timeout_s: float,
        beat_s: float,
    ) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise errors.UnavailableError(
                f"join('{address}') needs torchft ({error}); pip install torchft, or give join() a "
                "torch.distributed.TCPStore"
            ) from None
        self.key_file = key_file
        self.name, self._timeout_s, self._beat_s = name, timeout_s, beat_s
        self._id = f"{name}:{uuid.uuid4().hex[:8]}"
        self._host = host or _address_towards(address)
        self._store: dist.TCPStore | None = None  # from the first meeting on
        try:
            self._client: Any = LighthouseClient(address, _CONNECT)
        except RuntimeError as error:
            raise errors.UnavailableError(f"no Lighthouse at {address}: {error}") from None
        self._epoch: Epoch | None = None
        self._lines = _Lines({})
        self._quorum = 0
        self._attempt = 0
        self._asked = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None  # from the first meeting on

    def _take_part(self) -> None:
        """Ranks of a site that do not speak to others never come here, so that the Lighthouse does
        not wait for them."""
        # Each member has a store; the first one's is where an epoch's members find each other.
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._thread = threading.Thread(target=self._beat, name="thinwire sites", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closing.wait(self._beat_s):
            with contextlib.suppress(RuntimeError):  # the next quorum() tells of it
                self._client.heartbeat(self._id)

    def meet(self, why: errors.Error | None) -> Epoch:
        """The Lighthouse's next quorum. Blocks until it has one, TimeoutError after timeout_s."""
        if self._thread is None:
            self._take_part()
        end = time.monotonic() + self._timeout_s
        self._attempt += why is not None
        while True:
            listed, number = self._ask(end)
            self._asked = time.monotonic()
            attempt = max((one.data or {}).get("attempt", 0) for one in listed)
            if why is None and self._epoch is not None and (number, attempt) == (
                self._quorum, self._attempt
            ):  # fmt: skip
                return self._epoch
            self._quorum, self._attempt = number, attempt
            self._lines.close()
            self._lines = _Lines({one.replica_id: one.store_address for one in listed})
            lost = self._lines.lost()
            if lost is None:
                break
            # The Lighthouse lists a dead member until its heartbeat is missing.
            why = errors.PeerLostError(f"{lost} does not answer")
            self._attempt += 1
            time.sleep(self._beat_s)
        first = listed[0].store_address
        rank = [one.replica_id for one in listed].index(self._id)
        host, _, port = first.rpartition(":")
        try:
            store = self._store if rank == 0 else dist.TCPStore(
                host, int(port), is_master=False, timeout=_CONNECT
            )  # fmt: skip
        except dist.DistError:  # it has just died; the meeting fails by that, and the next one is
            store = self._store
        key = f"sites{number}.{attempt}"
        group = Group(
            rank, len(listed), key, count_user(), EpochStore(store, key, self._lines.lost),
            timeout_s=self._timeout_s, host=host,
        )  # fmt: skip
        names = tuple(one.replica_id.rpartition(":")[0] for one in listed)
        self._epoch = Epoch(number, group, names)
        return self._epoch

    def _ask(self, end: float) -> tuple[list[Any], int]:
        """Return the members of the Lighthouse's next quorum, by rank, and its number."""
        try:
            quorum = self._client.quorum(
                replica_id=self._id,
                timeout=datetime.timedelta(seconds=max(0.1, end - time.monotonic())),
                address=self._host,
                store_address=f"{self._host}:{self._store.port}",
                step=0,
                world_size=1,
                shrink_only=False,
                data={"attempt": self._attempt},
            )
        except (RuntimeError, TimeoutError) as error:
            raise errors.TimeoutError(
                f"member '{self.name}': the Lighthouse has no quorum within {self._timeout_s:g} s "
                f"({error}); look whether it runs, and at its --min_replicas"
            ) from None
        listed = sorted(quorum.participants, key=lambda one: one.replica_id)
        return listed, int(quorum.quorum_id)

    def wants_change(self) -> bool:
        """The Lighthouse tells of a newcomer only when all ask for a quorum, so they do so after a
        round each second at most."""
        return time.monotonic() - self._asked > 1.0

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Does nothing: the Lighthouse does not tell who is dead; the deadline of a round does."""

    def close(self) -> None:
        """Leave; the Lighthouse notices by the missing heartbeat. May be called twice."""
        self._closing.set()
        self._lines.close()
        if self._thread is not None:
            self._thread.join()


def _address_towards(address: str) -> str:
    """This machine's address on the interface that leads to the Lighthouse."""
    host, _, port = address.partition("://")[2].rstrip("/").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except (OSError, ValueError) as error:
            raise errors.InvalidArgumentError(
                f"address is {address!r}, expected http://host:port of a Lighthouse ({error})"
            ) from None
        return probe.getsockname()[0]
