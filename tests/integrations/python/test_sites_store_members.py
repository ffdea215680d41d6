"""Members that meet over torch's store: which are alive, which one writes an epoch, which wait for
which, and that no two groups train separately."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ranks import HANG_S
from thinwire import errors
from thinwire.torch import sites
from thinwire.torch.sites import store_members
from thinwire.torch.sites.meeting import unless_lost

LOST = errors.PeerLostError("a connection has closed")


def test_connections_that_come_too_late_are_closed():
    """If a call is given up, its result is passed to a function that drops it."""
    lost, release, dropped = threading.Event(), threading.Event(), Queue()

    def call() -> str:
        lost.set()
        release.wait(30)
        return "late"

    with pytest.raises(errors.PeerLostError, match="member 7 is lost while all connect"):
        unless_lost(call, lambda: "member 7" if lost.is_set() else None, dropped.put)
    assert dropped.empty()
    release.set()
    assert dropped.get(timeout=HANG_S) == "late"
    assert unless_lost(lambda: "soon", lambda: None, dropped.put) == "soon"
    assert dropped.empty()


def test_one_that_was_not_seen_yet_is_not_lost():
    """Member b looks at the others before c joins, and c is the last one to be ready."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = {
        name: sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, min_members=3,
            timeout_s=100, beat_s=20 if name == "b" else 0.05, dead_s=40,
        )
        for name in "abc"
    }  # fmt: skip
    ready = members["c"]._all_ready
    members["c"]._all_ready = lambda *arguments: (time.sleep(0.3), ready(*arguments))[1]
    count = dist.PrefixStore("thinwire/sites", server)
    with ThreadPoolExecutor() as threads:
        epochs = []
        for number, one in enumerate(members.values()):
            epochs.append(threads.submit(one.meet, None))
            while count.add("members", 0) <= number or not count.check([f"want/1/{number + 1}"]):
                time.sleep(0.001)
        for epoch in epochs:
            assert (epoch.result().number, epoch.result().names) == (1, ("a", "b", "c"))
        list(threads.map(lambda one: one.close(), members.values()))


def test_one_that_gave_an_epoch_up_is_not_waited_for():
    """Member a leaves the epoch while b connects: a is alive, but its word never arrives."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    a, b = (
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, min_members=2,
            timeout_s=100, beat_s=0.05, dead_s=40,
        )
        for name in "ab"
    )  # fmt: skip
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda one: one.meet(None), (a, b))
        assert first.number == second.number
        waiting = threads.submit(second.group.store.get, "a word of a's", 20.0)
        again = threads.submit(a.meet, errors.PeerLostError("a connection closed"))
        with pytest.raises(errors.PeerLostError, match="of the store is lost while all connect"):
            waiting.result()
        epochs = again, threads.submit(b.meet, errors.PeerLostError("a has gone on"))
        assert {epoch.result().number for epoch in epochs} == {first.number + 1}
        list(threads.map(lambda one: one.close(), (a, b)))


def silence_until_dead(monkeypatch, late: dict[int, float], dead_s: float = 2.0) -> float | None:
    """A member looks every 0.2 s at another one, which falls silent after a second. late: extra
    seconds of a look, by its number. Return how long the other was silent until it counted as
    dead."""
    clock, looks = [100.0], [0]
    monkeypatch.setattr(
        store_members, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )

    class Slow(dist.HashStore):
        def multi_get(self, keys):  # during a look
            clock[0] += late.get(looks[0], 0.0)
            return super().multi_get(keys)

    store = Slow()
    other = store.add("members", 1)
    for key, value in (("left", "0"), ("asked", "0"), ("beat", "1"), ("name", "other")):
        store.set(f"{key}/{other}", value)
    watch = store_members._Watch(store, "me", 3600.0, dead_s, lambda _: None)
    watch._beat_s = 0.2  # its thread keeps sleeping
    try:
        for number in range(1, 60):
            looks[0] = number
            clock[0] += 0.2
            if number <= 5:
                store.add(f"beat/{other}", 1)
                last = clock[0]
            watch._look()
            if other not in watch.alive():
                return clock[0] - last
    finally:
        watch.close()
    return None


@pytest.mark.parametrize(
    "late, most_s",
    [
        ({}, 2.2),
        ({6: 1.05}, 2.5),
        ({10: 1.8}, 3.5),  # the late look ends after 2.8 s
        ({n: 0.9 for n in range(6, 60)}, 3.5),
        ({n: 1.8 for n in range(6, 60)}, 6.0),
    ],
)
def test_late_looks_find_the_dead(monkeypatch, late, most_s):
    """A busy machine delays looks. A death is found within the time of the looks, dead_s, and two
    beats after a late look, since the other member may have stood still too."""
    silent_s = silence_until_dead(monkeypatch, late)
    assert silent_s is not None
    assert silent_s <= most_s + 1e-6


def test_who_stood_still_gives_the_others_a_moment_for_a_sign(monkeypatch):
    """If the whole machine slept, all members stood still."""
    clock = [100.0]
    monkeypatch.setattr(
        store_members, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    store = dist.HashStore()
    watches = [
        store_members._Watch(store, name, 3600.0, 2.0, lambda _: None) for name in ("a", "b")
    ]
    try:
        for watch in watches * 2:
            watch._beat_s = 0.2
            watch._look()
        clock[0] += 30.0
        for watch in watches * 3:
            watch._look()
            assert len(watch.alive()) == 2
            assert watch.lost([1, 2], 1) is None
            clock[0] += 0.1
    finally:
        for watch in watches:
            watch.close()


def test_after_a_lost_connection_a_silent_member_is_not_waited_for():
    """Members a and b meet again while c still counts as alive: its last beat is half of dead_s
    ago, and without a lost connection they would wait for it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False),
            name,
            beat_s=0.05,
            dead_s=8,
            timeout_s=100,
            min_members=3,
        )
        for name in "abc"
    ]
    with ThreadPoolExecutor() as threads:
        # One after another, so that their order is known.
        count = dist.PrefixStore("thinwire/sites", server)
        starts = []
        for number, one in enumerate(members):
            starts.append(threads.submit(one.meet, None))
            while count.add("members", 0) <= number:
                time.sleep(0.001)
        assert all(start.result().size == 3 for start in starts)
        for one in members:
            one.min_members = 2
        a, b, c = members
        c._joined.close()  # sends no more beats and does not announce that it leaves
        lost = errors.PeerLostError("rank 2 is gone")
        for meeting in [threads.submit(one.meet, lost) for one in (a, b)]:
            assert meeting.result().names == ("a", "b")
        assert c._joined.number in a._joined.alive()
        b._joined.silent = set  # its looks come later, so to b c has beaten recently
        for one in (a, b):
            assert not one.wants_change()  # such a change would wait until c is dead
        d = sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), "d", beat_s=0.05, dead_s=8,
            timeout_s=100, min_members=3,
        )  # fmt: skip
        coming = threads.submit(d.meet, None)
        while not (a.wants_change() and b.wants_change()):
            assert not coming.done()
            time.sleep(0.01)
        for one in (a, b, d):
            one.close()
        with pytest.raises(errors.Error, match="'d' has left"):
            coming.result()


@pytest.mark.parametrize("second", ["a", "b"])  # a writes epochs while it is alive
def test_a_second_death_during_a_meeting_takes_no_longer_than_the_first(monkeypatch, second):
    """Member c dies. Another member requests the epoch without it, and dies as well. The others
    continue once that one has been silent for half of dead_s; until then the epoch includes it."""
    clock = [100.0]
    monkeypatch.setattr(
        store_members, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.01, dead_s=8,
            timeout_s=100, min_members=4,
        )
        for name in "abcd"
    ]  # fmt: skip
    first, dead = members[2], members["abcd".index(second)]
    rest = [one for one in members if one not in (first, dead)]
    store = dist.PrefixStore("thinwire/sites", server)

    def advance(seconds: float) -> None:
        """Advance the clock, until the rest have looked at everything done before."""
        for step in (seconds, 0.001):
            clock[0] += step
            for one in rest:
                while one._joined._last_look < clock[0]:
                    time.sleep(0.001)

    with ThreadPoolExecutor() as threads:
        starts = []
        for number, one in enumerate(members):
            starts.append(threads.submit(one.meet, None))
            while store.add("members", 0) <= number:
                time.sleep(0.001)
        epoch = starts[0].result().number
        assert all(start.result().size == 4 for start in starts)
        for one in rest:
            one.min_members = 2
        advance(0.1)
        first._joined.close()  # sends no more beats and does not announce that it leaves
        advance(1.0)
        store.set(f"want/{epoch + 1}/{dead._joined.number}", "next")
        store.set(f"asked/{dead._joined.number}", str(epoch + 1))
        dead._joined.close()
        lost = errors.PeerLostError("rank 2 is gone")
        meetings = [threads.submit(one.meet, lost) for one in rest]
        try:
            for _ in range(6):
                advance(0.8)
            assert dead._joined.number in rest[0]._joined.alive(), "dead_s are not over"
            for meeting in meetings:
                assert meeting.result(timeout=HANG_S).names == tuple(one.name for one in rest)
        finally:
            for one in rest:
                one.close()


@pytest.mark.parametrize("allow_split", [False, True])
def test_members_that_stood_still_do_not_train_apart(allow_split):
    """While a and b stand still, c and d continue. Then c and d stand still, and a and b wait for
    one of them."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    a, b, c, d = members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.05,
            dead_s=3.0, timeout_s=100, allow_split=allow_split,
            min_members=4,
        )
        for name in "abcd"
    ]  # fmt: skip

    with ThreadPoolExecutor() as threads:

        def meet(why, *those) -> set:
            return {epoch.names for epoch in threads.map(lambda one: one.meet(why), those)}

        assert {tuple(sorted(names)) for names in meet(None, *members)} == {tuple("abcd")}
        for one in members:
            one.min_members = 2
        for one in (a, b):
            one._joined._look = lambda: None  # a stops looking
        assert {tuple(sorted(names)) for names in meet(LOST, c, d)} == {("c", "d")}
        for one in (c, d):
            one._joined._look = lambda: None
        for one in (a, b):
            del one._joined._look
            one._timeout_s = 8.0
        if allow_split:
            assert {tuple(sorted(names)) for names in meet(LOST, a, b)} == {("a", "b")}
        else:
            for waits in [threads.submit(one.meet, LOST) for one in (a, b)]:
                with pytest.raises(
                    errors.TimeoutError, match=r"none of the last epoch's \['c', 'd'"
                ):
                    waits.result()
            del c._joined._look
            for one in (a, b):
                one._timeout_s = 100.0
            assert {tuple(sorted(names)) for names in meet(LOST, a, b, c)} == {("a", "b", "c")}
        list(threads.map(lambda one: one.close(), members))


def test_new_processes_take_the_places_of_those_that_died():
    """Three members are killed, and two of them return under their names."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def joined(names: str) -> list:
        return [
            sites.join(
                dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.05,
                dead_s=2.0, timeout_s=8 if "x" in names else 100, min_members=len(names),
            )
            for name in names
        ]  # fmt: skip

    with ThreadPoolExecutor() as threads:

        def meet(those: list) -> list:
            return [epoch.size for epoch in threads.map(lambda one: one.meet(None), those)]

        first, strangers, again = joined("abc"), joined("xyz"), joined("ab")
        assert meet(first) == [3, 3, 3]
        for one in first:
            one._joined.close()  # sends no more beats and does not announce that it leaves
        with pytest.raises(errors.TimeoutError, match=r"none of the last epoch's \['a', 'b', 'c'"):
            meet(strangers)
        for one in strangers:
            one.close()
        assert meet(again) == [2, 2]
        for one in again:
            one.close()


def test_one_that_leaves_while_it_joins_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    members = sites.join(store, "a", timeout_s=20)
    members.close()  # from another thread, before meet() has written anything
    with pytest.raises(errors.Error, match="'a' has left"):
        members.meet(None)
    members.close()
    assert "thinwire sites" not in {thread.name for thread in threading.enumerate()}
    assert server.get("thinwire/sites/left/1") == b"1"


def test_a_store_that_has_gone_is_a_warning_at_once(caplog):
    """Rounds need the store only when a member is lost."""
    gone, looked = threading.Event(), threading.Event()

    class Going(dist.HashStore):
        def add(self, key, amount):
            if gone.is_set():
                looked.set()
                raise RuntimeError("Broken pipe")
            return super().add(key, amount)

    member = sites.join(dist.HashStore(), "basel", min_members=1, beat_s=0.01, dead_s=40)
    member._store = Going()  # a PrefixStore of torch would not call this method
    assert member.meet(None).names == ("basel",)
    with caplog.at_level("WARNING", "thinwire"):
        gone.set()
        assert looked.wait(30)
        member.close()  # ends the thread
    assert "store of the members does not answer: Broken pipe; rounds go on" in caplog.text
