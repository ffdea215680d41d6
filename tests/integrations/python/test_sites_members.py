"""Members that come, go and die: survivors lose no step, all have the same bits after each round.
The same tests over a store of torch's and over torchft's Lighthouse, where it is installed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire import config, errors
from thinwire.torch import sites
from thinwire.torch.sites import lighthouse_members, store_members
from thinwire.torch.sites.meeting import EpochStore, Meeting, unless_lost

WIDTH = 64


def join(address: str, name: str, **options):
    if not address.startswith("http"):
        host, _, port = address.partition(":")
        address = dist.TCPStore(host, int(port), is_master=False)
    # A loaded machine is no dead one.
    return sites.join(address, name, **{"timeout_s": 120, "dead_s": 8.0, **options})


class Trainer:
    """Trains, and counts the steps that it has made, and that rounds have counted."""

    def __init__(
        self, rank: int, address: str, sync_every=2, patience_s: float = 120, **options
    ) -> None:
        self.name, self.rank, self.steps = f"site {rank}", rank, 0
        self.model = make_mlp(seed=rank, width=WIDTH)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = sites.DiLoCo(
            join(address, self.name, timeout_s=patience_s),
            [self.model[0], self.model[2:]], self.inner, outer, sync_every, **options,
        )  # fmt: skip

    def step(self) -> None:
        self.inner.zero_grad()
        loss_of(self.model, data(self.steps, self.rank, WIDTH)).backward()
        self.inner.step()
        self.steps += 1

    def until(self, rounds: int) -> None:
        while self.diloco.rounds < rounds:
            self.step()

    def until_members(self, count: int) -> None:
        """Until that many have made a round together."""
        while not self.diloco.reports or len(self.diloco.reports[-1].members) != count:
            self.step()

    def anchors(self) -> bytes:
        return self.diloco.dump()

    def summary(self) -> dict:
        """All rounds that this member committed: number -> (members, weights, digest)."""
        reports = {r.number: (r.members, r.weights, r.digest) for r in self.diloco.reports}
        # Each fragment counts the steps up to its last round.
        counted = [0.0, 0.0]
        for number, (members, weights, _) in reports.items():
            counted[number % 2] += weights[members.index(self.name)]
        return {"reports": reports, "counted": max(counted), "made": self.steps,
                "bits": self.anchors(), "stats": self.diloco.stats()}  # fmt: skip


LAST = 11


def check_alike(*kept: dict) -> None:
    """All have the same state, and the same rounds from the one on that the last of them made."""
    assert len({each["bits"] for each in kept}) == 1
    first = max(min(each["reports"]) for each in kept)
    rounds = [{n: r for n, r in each["reports"].items() if n >= first} for each in kept]
    assert all(each == rounds[0] for each in rounds)
    assert len(rounds[0]) > 1


def killed_at(rank: int, address: str, phase: str):
    """Member 1 of three dies in its second round with them."""
    trainer = Trainer(rank, address)
    with trainer.diloco:
        trainer.until_members(3)
        first = trainer.diloco.rounds
        if rank == 1:
            die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            tell = Meeting.tell
            if phase == "before":
                die()
            if phase == "begin":
                Meeting.start = die
            if phase == "vote":
                Meeting.tell = die
            if phase == "after":
                Meeting.tell = lambda *arguments: (tell(*arguments), die())
        trainer.until(first + LAST)
        return trainer.summary()


@pytest.mark.parametrize("phase", ["before", "begin", "vote", "after"])
def test_survivors_of_a_killed_member_lose_no_step(address, phase):
    outcomes = outcomes_of(killed_at, address, phase, world=3, timeout_s=150)
    assert outcomes[1].exit_code == -signal.SIGKILL
    kept = []
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].trace
        kept.append(outcomes[rank].value)
        assert kept[-1]["counted"] == kept[-1]["made"]
        numbers = sorted(kept[-1]["reports"])
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
    check_alike(*kept)
    last = kept[0]["reports"][numbers[-1]]
    assert sorted(last[0]) == ["site 0", "site 2"]


def streamed_and_killed(rank: int, address: str):
    """The same with two rounds under way."""
    trainer = Trainer(
        rank, address, 6, fragment_sync_delay=4, fragment_update_alpha="rebase", codec="int4"
    )
    with trainer.diloco:
        trainer.until_members(3)
        first = trainer.diloco.rounds
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.until(first + LAST)
        trainer.diloco.sync()
        return trainer.summary()


def test_rounds_under_way_survive(address):
    outcomes = outcomes_of(streamed_and_killed, address, world=3, timeout_s=150)
    kept = [outcomes[rank].value for rank in (0, 2)]
    assert all(kept), outcomes[0].trace + outcomes[2].trace
    check_alike(*kept)


def fails_after_the_vote(rank: int, address: str):
    """Member 0 has all votes of round 3 and loses its connections before it commits; member 1
    commits the round."""
    trainer = Trainer(rank, address)
    tell = Meeting.tell
    with trainer.diloco:
        trainer.until(3)
        if rank == 0:

            def lost(meeting, name, mine, *meanwhile):
                tell(meeting, name, mine, *meanwhile)
                Meeting.tell = tell
                time.sleep(0.5)  # the other has committed by then, or it has not: both are right
                error = errors.PeerLostError("the connection broke after the last byte")
                meeting.fail(error)
                raise error

            Meeting.tell = lost
        trainer.until(LAST)
        return trainer.summary()


def test_a_round_that_one_has_committed_is_committed_by_all(address):
    kept = run(fails_after_the_vote, address, timeout_s=150)
    check_alike(*kept)
    for each in kept:
        assert each["counted"] == each["made"]


def joins_later(rank: int, address: str, folder: str):
    trainer = Trainer(rank, address, 4)
    flag = os.path.join(folder, "now")
    if rank == 2:
        while not os.path.exists(flag):
            time.sleep(0.01)
    with trainer.diloco:
        while True:
            trainer.step()
            if rank == 0 and trainer.diloco.rounds == 6 and not os.path.exists(flag):
                Path(flag).touch()
            together = len(trainer.diloco.stats()["members"]) == 3
            if (
                together
                and trainer.diloco.reports
                and len(trainer.diloco.reports[-1].members) == 3
                and trainer.diloco.reports[-1].weights.count(0.0) == 0
            ):
                break
            time.sleep(0.02)
        return trainer.summary()


def test_a_newcomer_has_the_others_state(address, tmp_path):
    results = run(joins_later, address, str(tmp_path), world=3, timeout_s=150)
    check_alike(results[0], results[1])
    assert results[2]["bits"] == results[0]["bits"]
    last = max(results[0]["reports"])
    assert sorted(results[0]["reports"][last][0]) == ["site 0", "site 1", "site 2"]
    assert results[0]["counted"] == results[0]["made"]
    assert min(results[2]["reports"]) > 6


def leaves(rank: int, address: str):
    trainer = Trainer(rank, address)
    with trainer.diloco:
        trainer.until_members(3)
        if rank != 2:
            trainer.until_members(2)
            trainer.until(trainer.diloco.rounds + 4)
        return trainer.summary()


def test_one_that_leaves_does_not_stop_the_others(address):
    results = run(leaves, address, world=3, timeout_s=150)
    check_alike(results[0], results[1])
    for each in results[:2]:
        assert each["counted"] == each["made"]


def stopped(rank: int, address: str, folder: str):
    """Member 2 is stopped for longer than a dead one; it comes back with its steps."""
    trainer = Trainer(rank, address)
    pid_file = os.path.join(folder, "pid")
    with trainer.diloco:
        trainer.until_members(3)
        if rank == 2:
            trainer.step()  # that a later round is to count
            Path(pid_file + ".part").write_text(str(os.getpid()))
            os.rename(pid_file + ".part", pid_file)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            trainer.until_members(2)
        if rank == 0:
            os.kill(int(Path(pid_file).read_text()), signal.SIGCONT)
        if rank == 2:
            missed = trainer.diloco.reports[-1].number + 1
            while trainer.diloco.reports[-1].number <= missed:
                trainer.step()
        trainer.until_members(3)
        trainer.diloco.sync()
        trainer.diloco.sync()
        return trainer.summary()


def test_a_stopped_member_comes_back_with_its_steps(address, tmp_path):
    results = run(stopped, address, str(tmp_path), world=3, timeout_s=150)
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert result["counted"] == result["made"]


def stopped_while_connecting(rank: int, address: str, folder: str):
    """Member 2 comes to two others, stops when it has told where it listens, and is never
    continued."""
    pid_file, together = os.path.join(folder, "pid"), os.path.join(folder, "together")
    while rank == 2 and not os.path.exists(together):
        time.sleep(0.01)
    trainer = Trainer(rank, address, patience_s=600)
    tell = EpochStore.set

    def tell_and_stop(store, key, value):
        tell(store, key, value)
        if "/mesh/" in key and key[-1].isdigit():
            Path(pid_file + ".part").write_text(str(os.getpid()))
            os.rename(pid_file + ".part", pid_file)
            os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 2:
        EpochStore.set = tell_and_stop
    with trainer.diloco:
        trainer.until_members(2)
        Path(together).touch()
        while not os.path.exists(pid_file):
            trainer.step()
        trainer.until(trainer.diloco.rounds + 4)
        if rank == 0:
            os.kill(int(Path(pid_file).read_text()), signal.SIGKILL)
        return trainer.summary()


def test_one_that_stops_while_all_connect_is_not_waited_for(address, tmp_path):
    """The deadline of connections is 600 s."""
    outcomes = outcomes_of(stopped_while_connecting, address, str(tmp_path), world=3, timeout_s=150)
    assert outcomes[2].exit_code == -signal.SIGKILL
    kept = []
    for rank in (0, 1):
        assert not outcomes[rank].error, outcomes[rank].trace
        kept.append(outcomes[rank].value)
        assert kept[-1]["counted"] == kept[-1]["made"]
    check_alike(*kept)


def test_connections_that_come_too_late_are_closed():
    """A call that is not waited for any more hands its result over to be dropped."""
    lost, release, dropped = threading.Event(), threading.Event(), Queue()

    def call() -> str:
        lost.set()
        release.wait(30)
        return "late"

    with pytest.raises(errors.PeerLostError, match="member 7 is lost while all connect"):
        unless_lost(call, lambda: "member 7" if lost.is_set() else None, dropped.put)
    assert dropped.empty()
    release.set()
    assert dropped.get(timeout=30) == "late"
    assert unless_lost(lambda: "soon", lambda: None, dropped.put) == "soon"
    assert dropped.empty()


def test_one_that_was_not_seen_yet_is_not_lost():
    """Member b looks at the others before c comes, and c is the last to be ready."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = {
        name: sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, min_members=3,
            timeout_s=30, beat_s=20 if name == "b" else 0.05, dead_s=40,
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
    """Member a leaves the epoch while b connects: it lives, and its word never comes."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    a, b = (
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, min_members=2,
            timeout_s=30, beat_s=0.05, dead_s=40,
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
    """A member looks every 0.2 s at another one, which falls silent after a second. late: seconds
    by which a look takes longer. Return how long it was silent until it counted as dead."""
    clock, looks = [100.0], [0]
    monkeypatch.setattr(
        store_members, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )

    class Slow(dist.HashStore):
        def multi_get(self, keys):  # in the middle of a look
            clock[0] += late.get(looks[0], 0.0)
            return super().multi_get(keys)

    store = Slow()
    other = store.add("members", 1)
    for key, value in (("left", "0"), ("asked", "0"), ("beat", "1"), ("name", "other")):
        store.set(f"{key}/{other}", value)
    watch = store_members._Watch(store, "me", 3600.0, dead_s, lambda _: None)
    watch._beat_s = 0.2  # its thread sleeps on
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
    """A busy machine makes looks late. That takes no longer than the looks, dead_s, and two
    beats after a late one, since the other may have stood still as well."""
    silent_s = silence_until_dead(monkeypatch, late)
    assert silent_s is not None
    assert silent_s <= most_s + 1e-6


def test_who_stood_still_gives_the_others_a_moment_for_a_sign(monkeypatch):
    """On a machine that slept all stood still."""
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
    """Members a and b meet again while c, which has not beaten for half of dead_s, still counts as
    alive, as it would without a lost connection."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False),
            name,
            beat_s=0.05,
            dead_s=8,
            timeout_s=30,
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
        c._joined.close()  # no more beats, and no word of leaving
        lost = errors.PeerLostError("rank 2 is gone")
        for meeting in [threads.submit(one.meet, lost) for one in (a, b)]:
            assert meeting.result().names == ("a", "b")
        assert c._joined.number in a._joined.alive()
        b._joined.silent = set  # its looks come later: c has beaten lately
        for one in (a, b):
            assert not one.wants_change()  # which would wait for c until it is dead
        d = sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), "d", beat_s=0.05, dead_s=8,
            timeout_s=30, min_members=3,
        )  # fmt: skip
        coming = threads.submit(d.meet, None)
        while not (a.wants_change() and b.wants_change()):
            assert not coming.done()
            time.sleep(0.01)
        for one in (a, b, d):
            one.close()
        with pytest.raises(errors.Error, match="'d' has left"):
            coming.result()


@pytest.mark.parametrize("second", ["a", "b"])  # a writes epochs while it lives
def test_a_second_death_during_a_meeting_takes_no_longer_than_the_first(monkeypatch, second):
    """Member c dies, another one asks for the epoch without it and dies as well. The others go on
    when it has given no sign for half of dead_s; until then it is one of those who are to begin."""
    clock = [100.0]
    monkeypatch.setattr(
        store_members, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.01, dead_s=8,
            timeout_s=30, min_members=4,
        )
        for name in "abcd"
    ]  # fmt: skip
    first, dead = members[2], members["abcd".index(second)]
    rest = [one for one in members if one not in (first, dead)]
    store = dist.PrefixStore("thinwire/sites", server)

    def advance(seconds: float) -> None:
        """Until the rest have looked at all that was done before."""
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
        first._joined.close()  # no more beats, and no word of leaving
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
                assert meeting.result(timeout=30).names == tuple(one.name for one in rest)
        finally:
            for one in rest:
                one.close()


class FakeLighthouse:
    """Stands for torchft.coordination: quorums of two that ask, and of others that have died or are
    cut off, and are not missed yet."""

    def __init__(self, dead: list, misses: int) -> None:
        """misses: quorums that still list these."""
        self.dead, self.misses = dead, misses
        self._meet = threading.Barrier(2, action=self._make)
        self._asking: list = []
        self._number = 0

    def _make(self) -> None:
        self._number += 1
        listed = [*self._asking, *(self.dead if self._number <= self.misses else [])]
        self.quorum = SimpleNamespace(quorum_id=self._number, participants=listed)
        self._asking = []

    def LighthouseClient(self, _address, _timeout):
        def quorum(**one):
            self._asking.append(SimpleNamespace(**one))
            self._meet.wait(one["timeout"].total_seconds())
            return self.quorum

        return SimpleNamespace(quorum=quorum, heartbeat=lambda _id: None)


def lighthouse_meeting(monkeypatch, other_names: str, misses: int, talk, **options) -> list:
    """Members b and c, and others that asked and do no more: what talk(members, server) made."""
    server = socket.create_server(("127.0.0.1", 0))
    place = f"127.0.0.1:{server.getsockname()[1]}"
    others = [
        SimpleNamespace(replica_id=f"{name}:1", address=place, store_address=place, data={})
        for name in other_names
    ]
    fake = FakeLighthouse(others, misses)
    monkeypatch.setitem(sys.modules, "torchft", ModuleType("torchft"))
    monkeypatch.setitem(sys.modules, "torchft.coordination", fake)
    options = {"timeout_s": 20, **options}
    members = [sites.join("http://127.0.0.1:9", name, **options) for name in "bc"]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda one: talk(one, server), members, timeout=50))
        list(threads.map(lambda one: one.close(), members))
    server.close()
    return found


@pytest.mark.parametrize("dead_name", ["a", "d"])  # the first one's store is where all connect
def test_a_member_that_the_lighthouse_does_not_miss_yet_is_not_waited_for(monkeypatch, dead_name):
    def talk(one, gone):
        gone.close()  # before anybody connects
        return one.meet(None).names

    assert lighthouse_meeting(monkeypatch, dead_name, 1, talk) == [("b", "c")] * 2


def test_a_member_that_the_lighthouse_lists_and_nobody_reaches_is_a_typed_error(monkeypatch):
    def talk(one, gone):
        gone.close()
        with pytest.raises(errors.TimeoutError, match="within 1 s") as raised:
            one.meet(None)
        return str(raised.value)

    # The second one to give up may hear that nobody asks with it.
    told = lighthouse_meeting(monkeypatch, "d", 1 << 30, talk, timeout_s=1, beat_s=0.05)
    assert any("'d' of the Lighthouse does not answer" in each for each in told)


def test_a_member_that_dies_while_all_connect_is_lost(monkeypatch):
    here = threading.Barrier(2)

    def talk(one, gone):
        epoch = one.meet(None)
        assert epoch.names == ("b", "c", "d")
        if here.wait(30) == 0:
            close(gone)
        with pytest.raises(errors.Error):
            Meeting(epoch, config.resolve(codec="fp32", timeout_s=100)).tell("status", b"1234")

    lighthouse_meeting(monkeypatch, "d", 1, talk)


LOST = errors.PeerLostError("a connection has closed")


@pytest.mark.parametrize("allow_split", [False, True])
def test_a_minority_waits_for_the_others(monkeypatch, allow_split):
    """Members b and c are cut off from a, d and e, which may go on."""
    options = {"timeout_s": 3, "beat_s": 0.05, "allow_split": allow_split}

    def talk(one, _server):
        assert one.meet(None).names == tuple("abcde")
        if allow_split:
            return str(one.meet(LOST).names)
        with pytest.raises(errors.TimeoutError) as raised:
            one.meet(LOST)
        return str(raised.value)

    told = lighthouse_meeting(monkeypatch, "ade", 1, talk, **options)
    if allow_split:
        assert told == ["('b', 'c')"] * 2
    else:
        here = "['b', 'c'] are here, expected more than half of the last epoch's ['a', 'b', 'c', "
        assert any(here in each for each in told)  # the second one may hear of no quorum


def test_who_has_ended_counts_in_no_majority(monkeypatch):
    """Members a, d and e have died: nobody listens at their places."""
    here = threading.Barrier(2)

    def talk(one, server):
        one.meet(None)
        if here.wait(30) == 0:
            close(server)
        return one.meet(LOST).names

    assert lighthouse_meeting(monkeypatch, "ade", 1, talk, beat_s=0.05) == [("b", "c")] * 2


def test_a_silent_member_of_a_lighthouse_is_lost(monkeypatch):
    """Its line stays open, and nothing comes on it."""

    def talk(one, _server):
        lost: Queue = Queue()
        one.guard(one.meet(None), lost.put)
        return str(lost.get(timeout=30))

    for error in lighthouse_meeting(monkeypatch, "d", 1, talk, beat_s=0.05, dead_s=0.5):
        assert "member 'd' of the Lighthouse has given no sign of life for 0.5 s" in error


def close(server: socket.socket) -> None:
    """As the end of its process does it, with all lines."""
    server.setblocking(False)
    lines = []
    while True:
        try:
            lines.append(server.accept()[0])
        except BlockingIOError:
            break
    server.close()
    for line in lines:
        line.close()


@pytest.mark.parametrize("allow_split", [False, True])
def test_members_that_stood_still_do_not_train_apart(allow_split):
    """While a and b stand still, c and d go on. Then these stand still, and a and b wait for one of
    them."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    a, b, c, d = members = [
        sites.join(
            dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.05,
            dead_s=1.0, timeout_s=20, allow_split=allow_split,
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
            one._joined._look = lambda: None  # stands still
        assert {tuple(sorted(names)) for names in meet(LOST, c, d)} == {("c", "d")}
        for one in (c, d):
            one._joined._look = lambda: None
        for one in (a, b):
            del one._joined._look
            one._timeout_s = 4.0
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
                one._timeout_s = 20.0
            assert {tuple(sorted(names)) for names in meet(LOST, a, b, c)} == {("a", "b", "c")}
        list(threads.map(lambda one: one.close(), members))


def test_new_processes_take_the_places_of_those_that_died():
    """Two of three are killed with the third one, and come back under their names."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def joined(names: str) -> list:
        return [
            sites.join(
                dist.TCPStore("127.0.0.1", server.port, is_master=False), name, beat_s=0.05,
                dead_s=0.5, timeout_s=4 if "x" in names else 20, min_members=len(names),
            )
            for name in names
        ]  # fmt: skip

    with ThreadPoolExecutor() as threads:

        def meet(those: list) -> list:
            return [epoch.size for epoch in threads.map(lambda one: one.meet(None), those)]

        first, strangers, again = joined("abc"), joined("xyz"), joined("ab")
        assert meet(first) == [3, 3, 3]
        for one in first:
            one._joined.close()  # no more beats, and no word of leaving
        with pytest.raises(errors.TimeoutError, match=r"none of the last epoch's \['a', 'b', 'c'"):
            meet(strangers)
        for one in strangers:
            one.close()
        assert meet(again) == [2, 2]
        for one in again:
            one.close()


def alone(rank: int, address: str):
    members = sites.join(
        dist.TCPStore(*_place(address), is_master=False), "a", min_members=2, timeout_s=1
    )
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(errors.TimeoutError, match="expected at least 2"):
        sites.LocalSGD(members, model, inner, 2).__enter__()
    members.close()


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)


def test_too_few_members_are_a_typed_error():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(alone, f"127.0.0.1:{server.port}", world=1)


def wrong_key(rank: int, address: str, folder: str):
    key = os.path.join(folder, f"key{rank // 2}")
    members = join(address, f"site {rank}", min_members=3, key_file=key)
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    local = sites.LocalSGD(members, model, inner, 2, timeout_s=3)
    with pytest.raises(errors.Error, match="different keys"):
        local.__enter__()


def test_a_name_without_the_key_takes_no_part(tmp_path):
    for number in (0, 1):
        key = tmp_path / f"key{number}"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(wrong_key, f"127.0.0.1:{server.port}", str(tmp_path), world=3, timeout_s=150)


def bits_of(rank: int, address: str):
    trainer = Trainer(rank, address)
    with trainer.diloco:
        return digest(trainer.model)


def test_members_begin_alike(address):
    assert len(set(run(bits_of, address, timeout_s=60))) == 1


def test_one_that_leaves_while_it_joins_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = join(f"127.0.0.1:{server.port}", "a", timeout_s=20)
    members.close()  # another thread's, before meet() has written anything
    with pytest.raises(errors.Error, match="'a' has left"):
        members.meet(None)
    members.close()
    assert "thinwire sites" not in {thread.name for thread in threading.enumerate()}
    assert server.get("thinwire/sites/left/1") == b"1"


def test_who_stood_still_hears_that_a_later_epoch_has_begun():
    a, b = (lighthouse_members._Signs(0.02, 30.0) for _ in "ab")

    def watch(epoch_of_a: int, epoch_of_b: int) -> None:
        a.watch({"b:1": f"127.0.0.1:{b.port}"}, epoch_of_a)
        b.watch({"a:1": f"127.0.0.1:{a.port}"}, epoch_of_b)
        end = time.monotonic() + 20
        while any(line.epoch is None for each in (a, b) for line in each._lines.values()):
            assert time.monotonic() < end, "no sign of life"
            a.lost(), b.lost()
            time.sleep(0.02)

    try:
        for earlier in (0, 5, 127):  # 128 is told as 0
            watch(earlier, earlier)
            assert (a.lost(), b.lost()) == (None, None)
            watch(earlier, earlier + 1)
            assert (a.lost(), b.lost()) == ("member 'b' of the Lighthouse", None)
    finally:
        a.close(), b.close()


def test_strangers_do_not_take_all_descriptors():
    most = 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lighthouse_members, "_MOST_LISTENERS", most)
        signs = lighthouse_members._Signs(0.02, 1.0)
        there = ("127.0.0.1", signs.port)
        strangers = [socket.create_connection(there, 5) for _ in range(3 * most)]
        try:
            for stranger in strangers:
                stranger.settimeout(10)
            heard = [stranger.recv(1) for stranger in strangers]
            assert heard.count(b"\0") == most
            assert heard.count(b"") == 2 * most
        finally:
            for stranger in strangers:
                stranger.close()
            signs.close()
