"""Members that join, leave and die: survivors lose no step, and all have the same bits after each
round. The same tests run over torch's store and over torchft's Lighthouse, if it is installed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire import config, errors
from thinwire.torch import sites
from thinwire.torch.sites.meeting import EpochStore, Meeting

WIDTH = 64


def join(address: str, name: str, **options):
    if not address.startswith("http"):
        host, _, port = address.partition(":")
        address = dist.TCPStore(host, int(port), is_master=False)
    # A member on a loaded machine must not count as dead.
    return sites.join(address, name, **{"timeout_s": 120, "dead_s": 8.0, **options})


class Trainer:
    """Trains, and counts the steps made and the steps counted by rounds."""

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
        """Train until that many members have made a round together."""
        while not self.diloco.reports or len(self.diloco.reports[-1].members) != count:
            self.step()

    def anchors(self) -> bytes:
        return self.diloco.dump()

    def summary(self) -> dict:
        """Return all rounds that this member committed: number -> (members, weights, digest)."""
        reports = {r.number: (r.members, r.weights, r.digest) for r in self.diloco.reports}
        # Each fragment counts the steps up to its last round.
        counted = [0.0, 0.0]
        for number, (members, weights, _) in reports.items():
            counted[number % 2] += weights[members.index(self.name)]
        return {"reports": reports, "counted": max(counted), "made": self.steps,
                "bits": self.anchors(), "stats": self.diloco.stats()}  # fmt: skip


LAST = 11


def check_alike(*kept: dict) -> None:
    """Check that all have the same state, and the same rounds from the first common one on."""
    assert len({each["bits"] for each in kept}) == 1
    first = max(min(each["reports"]) for each in kept)
    rounds = [{n: r for n, r in each["reports"].items() if n >= first} for each in kept]
    assert all(each == rounds[0] for each in rounds)
    assert len(rounds[0]) > 1


def killed_at(rank: int, address: str, phase: str):
    """Member 1 of three dies in its second round."""
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
    outcomes = outcomes_of(killed_at, address, phase, world=3)
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
    """Member 1 of three dies with two rounds in progress."""
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
    outcomes = outcomes_of(streamed_and_killed, address, world=3)
    kept = [outcomes[rank].value for rank in (0, 2)]
    assert all(kept), outcomes[0].trace + outcomes[2].trace
    check_alike(*kept)


def asks_for_bytes(rank: int, address: str):
    """The other member starts the gather only after the status, for which this one asks later."""
    members = join(address, f"site {rank}", min_members=2, timeout_s=30)
    meeting = Meeting(members.meet(None), config.resolve(codec="fp32", timeout_s=15))
    meeting.tell("status", b"1234")
    mine = [b"5678" * 100]
    gather = meeting.start("rows", mine) if rank == 0 else None
    sent = meeting.wire_bytes()
    meeting.tell("status", b"1234")
    gather = gather or meeting.start("rows", mine)
    rows = [bytes(row) for row in gather.rows()]
    meeting.tell("status", b"1234")
    found = sent, meeting.wire_bytes(), rows
    meeting.close()
    members.close()
    return found


def test_bytes_are_counted_while_others_are_on_their_way(address):
    for before, after, rows in run(asks_for_bytes, address):
        assert 0 < before < after - 400
        assert rows == [b"5678" * 100] * 2


def fails_after_the_vote(rank: int, address: str):
    """Member 0 has all votes of round 3, and loses its connections before it commits; member 1
    commits the round."""
    trainer = Trainer(rank, address)
    tell = Meeting.tell
    with trainer.diloco:
        trainer.until(3)
        if rank == 0:

            def lost(meeting, name, mine, *meanwhile):
                tell(meeting, name, mine, *meanwhile)
                Meeting.tell = tell
                time.sleep(0.5)  # the other one may have committed by then or not; both are correct
                error = errors.PeerLostError("the connection broke after the last byte")
                meeting.fail(error)
                raise error

            Meeting.tell = lost
        trainer.until(LAST)
        return trainer.summary()


def test_a_round_that_one_has_committed_is_committed_by_all(address):
    kept = run(fails_after_the_vote, address)
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
    results = run(joins_later, address, str(tmp_path), world=3)
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
    results = run(leaves, address, world=3)
    check_alike(results[0], results[1])
    for each in results[:2]:
        assert each["counted"] == each["made"]


def stopped(rank: int, address: str, folder: str):
    """Member 2 is stopped for longer than dead_s, and returns with its steps."""
    trainer = Trainer(rank, address)
    pid_file = os.path.join(folder, "pid")
    with trainer.diloco:
        trainer.until_members(3)
        if rank == 2:
            trainer.step()  # a later round must count this step
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
    results = run(stopped, address, str(tmp_path), world=3)
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert result["counted"] == result["made"]


def stopped_while_connecting(rank: int, address: str, folder: str):
    """Member 2 joins two others, stops after publishing its address, and is never continued."""
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
    """Connecting times out after 600 s."""
    outcomes = outcomes_of(stopped_while_connecting, address, str(tmp_path), world=3)
    assert outcomes[2].exit_code == -signal.SIGKILL
    kept = []
    for rank in (0, 1):
        assert not outcomes[rank].error, outcomes[rank].trace
        kept.append(outcomes[rank].value)
        assert kept[-1]["counted"] == kept[-1]["made"]
    check_alike(*kept)


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
    """No member leaves before all have got the error; otherwise a later one would learn only that a
    member has left."""
    key = os.path.join(folder, f"key{rank // 2}")
    members = join(address, f"site {rank}", min_members=3, key_file=key)
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    local = sites.LocalSGD(members, model, inner, 2, timeout_s=100)
    leave = local.close

    def leave_with_the_others() -> None:
        Path(folder, f"told{rank}").touch()
        while not all(Path(folder, f"told{other}").exists() for other in range(3)):
            time.sleep(0.01)
        leave()

    local.close = leave_with_the_others
    with pytest.raises(errors.Error, match="different keys"):
        local.__enter__()


def test_a_name_without_the_key_takes_no_part(tmp_path):
    for number in (0, 1):
        key = tmp_path / f"key{number}"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(wrong_key, f"127.0.0.1:{server.port}", str(tmp_path), world=3)


def bits_of(rank: int, address: str):
    trainer = Trainer(rank, address)
    with trainer.diloco:
        return digest(trainer.model)


def test_members_begin_alike(address):
    assert len(set(run(bits_of, address))) == 1
