"""Secure sums among members that join, leave and die: a drop-out costs no step, and a round is
retried with fresh masks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import data, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire import errors
from thinwire.torch import sites
from thinwire.torch.sites import rounds as rounds_module
from thinwire.torch.sites import secure
from thinwire.torch.sites.meeting import Meeting
from thinwire.torch.sites.rounds import Rounds

pytest.importorskip("cryptography")
WIDTH = 64


class Trainer:
    """Trains among members that join and leave, and counts steps made and steps in rounds."""

    def __init__(self, rank: int, address: str, **options) -> None:
        host, _, port = address.partition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        self.name, self.rank, self.steps = f"site {rank}", rank, 0
        self.model = make_mlp(seed=rank, width=WIDTH)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        members = sites.join(store, self.name, min_members=3, timeout_s=120, dead_s=8.0)
        self.diloco = sites.DiLoCo(
            members, [self.model[0], self.model[2:]], self.inner, outer, 2, secure=True, **options
        )

    def until(self, done) -> None:
        while not done(self.diloco.reports):
            self.inner.zero_grad()
            loss_of(self.model, data(self.steps, self.rank, WIDTH)).backward()
            self.inner.step()
            self.steps += 1

    def summary(self) -> dict:
        reports = {r.number: (r.members, r.weights, r.digest) for r in self.diloco.reports}
        counted = [0.0, 0.0]
        for number, (members, weights, _) in reports.items():
            counted[number % 2] += weights[members.index(self.name)]
        return {"reports": reports, "counted": max(counted), "made": self.steps,
                "bits": self.diloco.dump(), "stats": self.diloco.stats()}  # fmt: skip


def check_alike(kept: list[dict]) -> None:
    """Check that all have the same state, and the same rounds from the first common one on."""
    assert len({each["bits"] for each in kept}) == 1
    first = max(min(each["reports"]) for each in kept)
    rounds = [{n: r for n, r in each["reports"].items() if n >= first} for each in kept]
    assert all(each == rounds[0] for each in rounds)
    assert len(rounds[0]) > 1


def all_four(reports) -> bool:
    return bool(reports) and len(reports[-1].members) == 4 and min(reports[-1].weights) > 0


def killed_at(rank: int, address: str, phase: str, delay: int):
    """Member 1 of four dies in a round of all four."""
    keys = []
    agree = secure.Masks.agree.__func__

    def keep(cls, meeting):
        found = agree(cls, meeting)
        keys.append(found.digest)
        return found

    secure.Masks.agree = classmethod(keep)
    trainer = Trainer(rank, address, fragment_sync_delay=delay)
    with trainer.diloco:
        trainer.until(all_four)
        first = trainer.diloco.rounds
        if rank == 1:
            start, tell = Meeting.start, Meeting.tell
            die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731

            def start_or_die(meeting, name, mine):
                if name.startswith(phase):
                    die()
                return start(meeting, name, mine)

            def tell_or_die(meeting, name, *rest):
                if phase == "vote":
                    die()
                return tell(meeting, name, *rest)

            Meeting.start, Meeting.tell = start_or_die, tell_or_die
        trainer.until(lambda _: trainer.diloco.rounds >= first + 10)
        trainer.diloco.sync()
        return trainer.summary(), keys


@pytest.mark.parametrize(
    ("phase", "delay"), [("round", 0), ("codes", 0), ("vote", 0), ("codes", 1)]
)
def test_survivors_retry_with_fresh_masks_and_lose_no_step(phase, delay):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    outcomes = outcomes_of(killed_at, address, phase, delay, world=4)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert not outcomes[rank].error, outcomes[rank].trace
    kept = [outcomes[rank].value for rank in (0, 2, 3)]
    check_alike([each for each, _ in kept])
    for each, keys in kept:
        assert each["counted"] == each["made"]
        assert sorted(each["stats"]["members"]) == ["site 0", "site 2", "site 3"]
        assert len(set(keys)) == len(keys) >= 2
        assert keys[-2:] == kept[0][1][-2:]


def one_has_the_sum(rank: int, address: str, folder: str):
    """Member 1 of four dies when member 0 has the sum and member 2 does not."""
    flag = Path(folder) / "there"

    def wait_for_it():
        while not flag.exists():
            time.sleep(0.01)

    trainer = Trainer(rank, address)
    with trainer.diloco:
        trainer.until(all_four)
        number = trainer.diloco.rounds
        make, vote = rounds_module.add_hidden, Rounds._vote

        def tells(rounds, *arguments):
            flag.touch()
            vote(rounds, *arguments)

        def dies(*_):
            wait_for_it()
            os.kill(os.getpid(), signal.SIGKILL)

        def loses_it(meeting, one, *arguments):
            make(meeting, one, *arguments)
            one.result = {}
            wait_for_it()
            rounds_module.add_hidden = make
            error = errors.PeerLostError("the connection broke before the last byte")
            meeting.fail(error)
            raise error

        if rank == 0:
            Rounds._vote = tells
        if rank == 1:
            Rounds._vote = dies
        if rank == 2:
            rounds_module.add_hidden = loses_it
        trainer.until(lambda _: trainer.diloco.rounds >= number + 6)
        trainer.diloco.sync()
        return trainer.summary(), number


def test_a_sum_that_one_has_is_committed_by_all(tmp_path):
    """Otherwise the next sum, over the remaining members, would reveal the dead member's update."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    outcomes = outcomes_of(one_has_the_sum, address, str(tmp_path), world=4)
    for rank in (0, 2, 3):
        assert not outcomes[rank].error, outcomes[rank].trace
    kept = [outcomes[rank].value for rank in (0, 2, 3)]
    check_alike([each for each, _ in kept])
    for each, number in kept:
        members, weights, _ = each["reports"][number]
        assert len(members) == 4 and min(weights) > 0
        assert len(each["reports"][number + 1][0]) == 3
        assert each["counted"] == each["made"]


def joins_later(rank: int, address: str, folder: str):
    """Member 3 joins when the others are in their sixth round."""
    flag = Path(folder) / "now"
    trainer = Trainer(rank, address, fragment_sync_delay=1, fragment_update_alpha="rebase")
    while rank == 3 and not flag.exists():
        time.sleep(0.01)

    def together(reports):
        if rank == 0 and trainer.diloco.rounds >= 6:
            flag.touch()
        return all_four(reports)

    with trainer.diloco:
        trainer.until(together)
        trainer.diloco.sync()
        return trainer.summary()


def test_a_newcomer_counts_from_its_first_round_on(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    results = run(joins_later, address, str(tmp_path), world=4)
    check_alike(results)
    for each in results[:3]:
        assert each["counted"] == each["made"]
    assert min(results[3]["reports"]) >= 5
