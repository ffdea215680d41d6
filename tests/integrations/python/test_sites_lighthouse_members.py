"""Members that meet over torchft's Lighthouse, replaced here by a fake: the members it lists, the
members that have left, and majorities."""

from __future__ import annotations

import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import ModuleType, SimpleNamespace

import pytest
from ranks import HANG_S, reserved_port
from thinwire import config, errors
from thinwire.torch import sites
from thinwire.torch.sites import lighthouse_members
from thinwire.torch.sites.meeting import Meeting

LOST = errors.PeerLostError("a connection has closed")


class FakeLighthouse:
    """Stands in for torchft.coordination. Its quorums have two members that ask, and others that
    have died or are cut off, but are still listed."""

    def __init__(self, dead: list, misses: int) -> None:
        """misses: number of quorums that still list the dead members."""
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
    """Members b and c meet, with others that have asked and do nothing more. Return what
    talk(member, server) returns for each."""
    with reserved_port() as port:  # the port stays ours when the server closes
        server = socket.create_server(("127.0.0.1", port))
        place = f"127.0.0.1:{port}"
        others = [
            SimpleNamespace(replica_id=f"{name}:1", address=place, store_address=place, data={})
            for name in other_names
        ]
        fake = FakeLighthouse(others, misses)
        monkeypatch.setitem(sys.modules, "torchft", ModuleType("torchft"))
        monkeypatch.setitem(sys.modules, "torchft.coordination", fake)
        options = {"timeout_s": 100, **options}
        members = [sites.join("http://127.0.0.1:9", name, **options) for name in "bc"]
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(lambda one: talk(one, server), members, timeout=HANG_S))
            list(threads.map(lambda one: one.close(), members))
        server.close()
        return found


@pytest.mark.parametrize("dead_name", ["a", "d"])  # all members connect at the first one's store
def test_a_member_that_the_lighthouse_does_not_miss_yet_is_not_waited_for(monkeypatch, dead_name):
    def talk(one, gone):
        gone.close()  # before any member connects
        return one.meet(None).names

    assert lighthouse_meeting(monkeypatch, dead_name, 1, talk) == [("b", "c")] * 2


def test_a_lighthouse_that_is_started_again_is_waited_for(monkeypatch):
    """It refuses connections for a while in the second meeting."""

    def talk(one, gone):
        gone.close()
        first, quorum = one.meet(None), one._client.quorum
        refused = iter([True] * 3)

        def refuse(**asked):
            if next(refused, False):
                raise RuntimeError("tcp connect error")
            return quorum(**asked)

        monkeypatch.setattr(one._client, "quorum", refuse)
        second = one.meet(LOST)
        return first.names, second.names, next(refused, None)

    met = lighthouse_meeting(monkeypatch, "", 0, talk, beat_s=0.05)
    assert met == [(("b", "c"), ("b", "c"), None)] * 2


def test_a_lighthouse_that_never_comes_back_is_a_typed_error(monkeypatch):
    def talk(one, gone):
        gone.close()
        one.meet(None)
        begun = time.monotonic()

        def refuse(**_asked):
            raise RuntimeError("tcp connect error")

        monkeypatch.setattr(one._client, "quorum", refuse)
        with pytest.raises(errors.TimeoutError, match=r"within 5 s; .*tcp connect error.*look"):
            one.meet(LOST)
        return time.monotonic() - begun >= 5

    assert lighthouse_meeting(monkeypatch, "", 0, talk, timeout_s=5, beat_s=0.05) == [True] * 2


@pytest.mark.parametrize("quorums", [1, 1 << 30])
def test_a_member_that_the_lighthouse_lists_and_nobody_reaches_is_a_typed_error(
    monkeypatch, quorums
):
    """quorums: number of quorums after which no member asks any more."""

    def talk(one, gone):
        gone.close()
        quorum, left = one._client.quorum, iter(range(quorums))

        def ask(**asked):
            if next(left, None) is None:
                raise RuntimeError("nobody asks")
            return quorum(**asked)

        monkeypatch.setattr(one._client, "quorum", ask)
        with pytest.raises(errors.TimeoutError, match="within 5 s") as raised:
            one.meet(None)
        return str(raised.value)

    told = lighthouse_meeting(monkeypatch, "d", 1 << 30, talk, timeout_s=5, beat_s=0.05)
    assert all("'d' of the Lighthouse does not answer" in each for each in told), told


def test_a_member_that_dies_while_all_connect_is_lost(monkeypatch):
    here = threading.Barrier(2)

    def talk(one, gone):
        epoch = one.meet(None)
        assert epoch.names == ("b", "c", "d")
        if here.wait(HANG_S) == 0:
            close(gone)
        with pytest.raises(errors.Error):
            Meeting(epoch, config.resolve(codec="fp32", timeout_s=100)).tell("status", b"1234")

    lighthouse_meeting(monkeypatch, "d", 1, talk)


@pytest.mark.parametrize("allow_split", [False, True])
def test_a_minority_waits_for_the_others(monkeypatch, allow_split):
    """Members b and c are cut off from a, d and e, which may continue."""
    options = {"timeout_s": 8, "beat_s": 0.05, "allow_split": allow_split}

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
        assert any(here in each for each in told)  # the second member may get no quorum


def test_who_has_ended_counts_in_no_majority(monkeypatch):
    """Members a, d and e have died: their ports are closed."""
    here = threading.Barrier(2)

    def talk(one, server):
        one.meet(None)
        if here.wait(HANG_S) == 0:
            close(server)
        return one.meet(LOST).names

    assert lighthouse_meeting(monkeypatch, "ade", 1, talk, beat_s=0.05) == [("b", "c")] * 2


def test_a_silent_member_of_a_lighthouse_is_lost(monkeypatch):
    """Its connection stays open, but nothing arrives."""

    def talk(one, _server):
        lost: Queue = Queue()
        one.guard(one.meet(None), lost.put)
        return str(lost.get(timeout=HANG_S))

    for error in lighthouse_meeting(monkeypatch, "d", 1, talk, beat_s=0.05, dead_s=2.0):
        assert "member 'd' of the Lighthouse has given no sign of life for 2 s" in error


def close(server: socket.socket) -> None:
    """Close the server and all its connections, as the end of its process does."""
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


def test_who_stood_still_hears_that_a_later_epoch_has_begun():
    a, b = (lighthouse_members._Signs(0.02, 30.0) for _ in "ab")

    def watch(epoch_of_a: int, epoch_of_b: int) -> None:
        a.watch({"b:1": f"127.0.0.1:{b.port}"}, epoch_of_a)
        b.watch({"a:1": f"127.0.0.1:{a.port}"}, epoch_of_b)
        end = time.monotonic() + HANG_S
        while any(line.epoch is None for each in (a, b) for line in each._lines.values()):
            assert time.monotonic() < end, "no sign of life"
            a.lost(), b.lost()
            time.sleep(0.02)

    try:
        for earlier in (0, 5, 127):  # 128 is sent as 0
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
