"""Members that come and go, over a torch store (TCPStore, FileStore): join().

A member writes its name once, and sends heartbeats: a counter in the store that it increments while
it lives. Each member watches all counters with its own clock, and a member whose counter does not
grow counts as dead. An epoch is a list of members that is written once, by compare_set, under the
epoch's number: by the lowest live member that wants one, when all live members want it. The store
decides nothing. A process that can write to it can only keep members apart: members prove to each
other with the key file that they belong to the group.

An epoch follows the last one that has begun, and has at least one member of it. So only one group
trains at a time: a round needs the votes of all members of its epoch, and none is committed in an
epoch that one of its members has left. Otherwise members that were suspended while others went on,
and find these suspended, would train separately. If no member of the last epoch lives, new
processes with the names of more than half of its members may take their place."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from thinwire import errors
from thinwire.comm import pauses
from thinwire.torch import private
from thinwire.torch.group import count_user
from thinwire.torch.sites.meeting import Epoch, EpochGroup, EpochStore, have_most

_log = logging.getLogger("thinwire")

_PREFIX = "thinwire/sites"
_LONGEST_PAUSE_S = 0.005  # seconds between two polls for a meeting, for which all members wait
_NEXT, _ANY = "next", "any"  # a member wants an epoch that follows the last one, or any epoch


@dataclass
class _Seen:
    """Another member, as this one sees it."""

    name: str
    beat: bytes | str
    changed: float  # when its counter last grew, by this member's clock
    asked: int = 0  # the newest epoch that it has asked for
    spared: bool = False  # True: since then it was given more time, as this process was suspended


class _Watch:
    """A thread that sends this member's heartbeats and watches the others, until close()."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        beat_s: float,
        dead_s: float,
        looked: Callable[[_Watch], None],
    ) -> None:
        self._store, self._beat_s, self._dead_s = store, beat_s, dead_s
        self._looked = looked  # called after each look
        self._seen: dict[int, _Seen] = {}  # members that have not left; used only by the thread
        self._last_look = 0.0  # when the last look began
        self._latest = 0  # the highest member number that was seen
        self._lock = threading.Lock()
        self._alive: dict[int, str] = {}
        self._silent: set[int] = set()  # those of them without a heartbeat for half of dead_s
        self._asked: dict[int, int] = {}  # the newest epoch that each of them has asked for
        self._known = 0  # the highest member number of a complete look
        self._newest = 0  # the newest epoch that is written
        self._failed: Exception | None = None
        self.number = store.add("members", 1)
        store.add("epoch", 0)  # so that the key exists for all looks
        store.set(f"left/{self.number}", "0")
        store.set(f"asked/{self.number}", "0")
        store.add(f"beat/{self.number}", 1)
        store.set(f"name/{self.number}", name)  # last: a member with a name has all other keys
        self._closing = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="thinwire sites", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s):
            try:
                with private.in_torch():
                    self._look()
                    self._looked(self)
            except RuntimeError as error:
                with self._lock:
                    self._failed = error
                _log.warning(
                    "the store of the members does not answer: %s; rounds go on until a member is "
                    "lost, and nobody can come in", error
                )  # fmt: skip
                return

    def _look(self) -> None:
        """Send a heartbeat and look at the others, with a few queries for any number of members. A
        counter that has not grown had not grown when the look began, so slow looks do no harm. If
        this process was suspended, the whole machine may have been: then each member gets two beats
        more time, once per silence, because on a busy machine all looks may be late."""
        begun, patience = time.monotonic(), self._dead_s - min(2 * self._beat_s, self._dead_s / 2)
        if begun - self._last_look > patience:
            for one in self._seen.values():
                if begun - one.changed > patience and not one.spared:
                    one.changed, one.spared = begun - patience, True
        self._last_look = begun
        self._store.add(f"beat/{self.number}", 1)
        latest = self._store.add("members", 0)
        for number in range(self._latest + 1, latest + 1):
            if not self._store.check([f"name/{number}"]):
                latest = number - 1  # the name is about to be written
                break
            self._seen[number] = _Seen(self._store.get(f"name/{number}").decode(), "", 0.0)
        self._latest = latest
        numbers = list(self._seen)
        keys = [f"{what}/{n}" for n in numbers for what in ("beat", "left", "asked")]
        newest, *said = self._get(["epoch", *keys])
        if time.monotonic() - begun > self._beat_s:  # a busy machine is not dead
            self._store.add(f"beat/{self.number}", 1)
        for number, beat, left, asked in zip(
            numbers, said[0::3], said[1::3], said[2::3], strict=True
        ):
            one = self._seen[number]
            if left != b"0":
                del self._seen[number]
                continue
            if beat != one.beat:
                one = self._seen[number] = _Seen(one.name, beat, time.monotonic())
            one.asked = int(asked)
        alive = {
            number: one.name
            for number, one in self._seen.items()
            if number == self.number or begun - one.changed < self._dead_s
        }
        silent = {n for n in alive if begun - self._seen[n].changed >= self._dead_s / 2}
        with self._lock:
            self._alive, self._silent = alive, silent - {self.number}
            self._asked = {number: one.asked for number, one in self._seen.items()}
            self._known, self._newest = latest, int(newest)

    def _get(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]

    def alive(self) -> dict[int, str]:
        """Return the names of the live members, by number. UnavailableError if the store is
        gone."""
        with self._lock:
            if self._failed is not None:
                raise _gone(self._failed)
            return dict(self._alive)

    def silent(self) -> set[int]:
        """Return the live members without a heartbeat for half of dead_s."""
        with self._lock:
            return set(self._silent)

    def lost(self, members: list[int], epoch: int) -> str | None:
        """Return text about a member that is not in this epoch any more, or None: a member that was
        seen has died or left, or asks for a later epoch; or a later one was written without this
        member. A member that was never seen has only just come."""
        with self._lock:
            if self._failed is not None:
                raise _gone(self._failed)
            for m in members:
                if m == self.number or m > self._known:
                    continue
                if m not in self._alive or self._asked[m] > epoch:
                    return f"member {m} of the store"
            return "this member" if self._newest > epoch else None

    def wanting(self, members: list[int], epoch: int) -> bool:
        """Return whether a live member other than these asks for a later epoch. A member that was
        left out of an epoch as dead, but still counts as alive here, does not ask."""
        with self._lock:
            others = self._alive.keys() - {*members, self.number}
            return any(self._asked[m] > epoch for m in others)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def _gone(error: Exception) -> errors.UnavailableError:
    return errors.UnavailableError(
        f"the store of the members does not answer: {error}; start it where all members reach it, "
        "and join again"
    )


class StoreMembers:
    """The members that join() returns for a torch store."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        min_members: int,
        key_file: str | None,
        *,
        timeout_s: float,
        beat_s: float,
        dead_s: float,
        allow_split: bool,
    ) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._host = store.host if isinstance(store, dist.TCPStore) else None
        self.key_file = key_file
        self.name, self.min_members, self._timeout_s = name, min_members, timeout_s
        self._lock = threading.Lock()
        self._guarded: tuple[int, list[int], Callable[[errors.Error], None]] | None = None
        self._beat_s, self._dead_s, self._allow_split = beat_s, dead_s, allow_split
        self._joined: _Watch | None = None  # created at the first meeting
        self._epoch: Epoch | None = None
        self._members: list[int] = []  # of the present epoch
        self._last: tuple[int, list] | None = None  # a number, and the last epoch before it
        self._waits = ""  # the last logged reason for waiting
        self._lost_one = False  # True: a closed connection has led to this meeting
        self._left = False  # True after close() was called
        self._gone = False  # True after the others were told

    def meet(self, why: errors.Error | None) -> Epoch:
        """Return the next epoch of all live members: at least `min_members`, and one of the last
        epoch unless all allow a split. Blocks until they want one; TimeoutError after timeout_s.
        UnavailableError if the store is gone."""
        with self._lock:
            self._guarded = None
        self._lost_one = isinstance(why, errors.PeerLostError)
        end = time.monotonic() + self._timeout_s
        try:
            if self._joined is None:
                self._joined = _Watch(
                    self._store, self.name, self._beat_s, self._dead_s, self._check_guarded
                )
            mine = 0 if self._epoch is None else self._epoch.number
            number = max(self._store.add("epoch", 0), mine) + 1
            while True:
                listed = self._wait_for(number, end)
                if self._all_ready(number, [one[0] for one in listed], end):
                    return self._enter(number, listed)
                number += 1
        except errors.Error:
            raise
        except RuntimeError as error:
            raise _gone(error) from None

    def _wait_for(self, number: int, end: float) -> list:
        """Wait until an epoch is written; return its members."""
        key = f"epoch/{number}"
        word = _ANY if self._allow_split else _NEXT
        self._store.set(f"want/{number}/{self._joined.number}", word)
        self._store.set(f"asked/{self._joined.number}", str(number))
        self._waits, pause = "", pauses(_LONGEST_PAUSE_S)
        while not self._store.check([key]):
            self._propose(number)
            self._check_left()
            if time.monotonic() > end:
                raise errors.TimeoutError(
                    f"member '{self.name}': no epoch {number} within {self._timeout_s:g} s; "
                    f"{self._hint(number)}"
                )
            time.sleep(next(pause))
        return json.loads(self._store.get(key))

    def _check_left(self) -> None:
        if self._left:
            raise errors.Error(f"member '{self.name}' has left; create another by join()")

    def _all_ready(self, number: int, members: list[int], end: float) -> bool:
        """Announce that this member is about to connect, and wait until all members do. Return
        False if this is not a member, or if a member dies before. The epoch then fails for all:
        the first member to see that all are ready, or that one is dead, writes the epoch's fate."""
        if self._joined.number not in members:
            return False
        self._store.set(f"ready/{number}/{self._joined.number}", "1")
        fate, all_ready = f"fate/{number}", [f"ready/{number}/{m}" for m in members]
        pause = pauses(_LONGEST_PAUSE_S)
        while not self._store.check([fate]):
            self._check_left()
            if self._store.check(all_ready):
                self._store.compare_set(fate, "", "go")
            elif self._is_dead(number, members) or time.monotonic() > end:
                self._store.compare_set(fate, "", "void")
            else:
                time.sleep(next(pause))
        return self._store.get(fate) == b"go"

    def _is_dead(self, number: int, members: list[int]) -> bool:
        """Return whether a member of an epoch is lost before the epoch has begun. If a connection
        has closed, a silent member that is not ready counts as lost."""
        if self._joined.lost(members, number):
            return True
        silent = self._joined.silent() & set(members) if self._lost_one else ()
        return not all(self._store.check([f"ready/{number}/{m}"]) for m in silent)

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Call `fail` once, on another thread, if a member is not in the epoch any more."""
        with self._lock:
            self._guarded = (epoch.number, self._members, fail)

    def _check_guarded(self, watch: _Watch) -> None:
        with self._lock:
            if self._guarded is None:
                return
            number, members, fail = self._guarded
            who = watch.lost(members, number)
            if who is None:
                return
            self._guarded = None
        error = errors.PeerLostError(
            f"{who} is lost to epoch {number}: it has died, left, or a later epoch goes on"
        )
        # On another thread: it waits while connections are made, and heartbeats must continue.
        threading.Thread(target=fail, args=(error,), name="thinwire sites", daemon=True).start()

    def _hint(self, number: int) -> str:
        alive = self._joined.alive()
        missing = [n for k, n in alive.items() if not self._wants(number, k)]
        if missing:
            return f"members {missing} live and do not come: they train, or are in no `with`"
        if len(alive) < self.min_members:
            return f"{sorted(alive.values())} live, expected at least {self.min_members}"
        return self._cannot_follow(number, alive) or f"{sorted(alive.values())} live"

    def _wants(self, number: int, member: int) -> bool:
        return self._store.check([f"want/{number}/{member}"])

    def _propose(self, number: int) -> None:
        """Write the epoch if this member is the lowest live one, and all live members want it. If a
        connection has closed, silent members are not waited for: the lowest of the others writes,
        and a silent member that does not want the epoch counts as dead."""
        alive = self._joined.alive()
        silent = self._joined.silent() if self._lost_one else set()
        for member in silent & alive.keys():
            if not self._wants(number, member):
                del alive[member]
        writer = min(alive.keys() - silent, default=0)
        if len(alive) < self.min_members or writer != self._joined.number:
            return
        if all(self._wants(number, member) for member in alive):
            if waits := self._cannot_follow(number, alive):
                if waits != self._waits:
                    self._waits = waits
                    _log.warning("member '%s' waits: %s", self.name, waits)
                return
            listed = json.dumps(sorted(alive.items()))
            won = self._store.compare_set(f"epoch/{number}", "", listed)
            if won.decode() == listed:
                self._store.set("epoch", str(number))

    def _cannot_follow(self, number: int, alive: Mapping[int, str]) -> str | None:
        """Return the reason why these members must not make the next epoch, or None."""
        if all(self._store.get(f"want/{number}/{member}") == _ANY.encode() for member in alive):
            return None
        if self._last is None or self._last[0] != number:
            self._last = (number, self._last_before(number))
        last = [(m, name) for m, name in self._last[1] if self._store.get(f"left/{m}") == b"0"]
        names = [name for _, name in last]
        if not last or any(m in alive for m, _ in last) or have_most(alive.values(), names):
            return None
        return (
            f"members {sorted(alive.values())} are here, and none of the last epoch's "
            f"{sorted(names)}, expected one at least, since those may go on without these; "
            "continue one, start more than half of them again under their names, or, if they train "
            "nowhere, use another store or pass allow_split=True to join() on all members"
        )

    def _last_before(self, number: int) -> list:
        """Return the members of the last epoch that has begun. An epoch that is written but has not
        begun never will, because some of its members count as dead."""
        for earlier in range(number - 1, 0, -1):
            if self._store.compare_set(f"fate/{earlier}", "", "void") == b"go":
                return json.loads(self._store.get(f"epoch/{earlier}"))
        return []

    def _enter(self, number: int, listed: list) -> Epoch:
        self._members = [one[0] for one in listed]
        rank = self._members.index(self._joined.number)
        key = f"sites{number}"
        members = self._members
        store = EpochStore(self._store, key, lambda: self._joined.lost(members, number))
        group = EpochGroup(
            rank, len(listed), key, count_user(), store,
            timeout_s=self._timeout_s, host=self._host,
        )  # fmt: skip
        self._epoch = Epoch(number, group, tuple(one[1] for one in listed))
        return self._epoch

    def wants_change(self) -> bool:
        """Return whether a live member that is not in the epoch asks for a later one."""
        return self._joined.wanting(self._members, self._epoch.number)

    def close(self) -> None:
        """Leave, so that the others do not wait for this member. A second call does nothing. If
        meet() blocks on another thread, it raises."""
        self._left = True
        joined = self._joined
        if joined is None or self._gone:
            return
        self._gone = True
        joined.close()
        try:
            self._store.set(f"left/{joined.number}", b"1")
        except RuntimeError:
            return  # the store is gone, so no member needs to be told
