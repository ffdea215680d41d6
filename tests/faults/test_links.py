"""Links that are cut while ranks train or connect: every rank, on both sides of the cut, gets a
typed error when the timeout is over. iptables drops the packets, in namespaces of our own."""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from actor import Actor, Report, training_file
from cases import Case, draw
from ranks import HANG_S, started, values_of

from bench.lab import Lab, can_shape, open_lab

TIMEOUT_S = 8.0  # more than connecting and warming up take, even on a busy machine
NOISE_S = 15.0  # of a busy machine; without our error a rank ends after minutes, when TCP gives up
CLONE_NEWNET = 0x40000000
WORLD, VICTIM = 3, 1


pytestmark = pytest.mark.slow


@pytest.fixture
def lab():
    reason = "iptables is missing (apt-get install iptables)"
    if shutil.which("iptables") is not None:
        reason = can_shape()
    if reason:
        pytest.skip(f"cutting a link needs network namespaces and iptables: {reason}")
    with open_lab(WORLD, "1gbit") as lab:
        yield lab


def cut(lab: Lab, directions: tuple[str, ...], peer: int | None = None) -> None:
    """Drop the packets to and from the victim, or only those to and from one peer."""
    for chain in directions:
        which = []
        if peer is not None:
            which = ["-s" if chain == "INPUT" else "-d", f"10.88.0.{peer + 1}"]
        subprocess.run(
            ["ip", "netns", "exec", lab.namespaces[VICTIM],
             "iptables", "-A", chain, *which, "-j", "DROP"],
            check=True,
        )  # fmt: skip


def be(case: Case, rank: int, folder: Path, namespace: str) -> Report:
    """Run a rank in its own namespace."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0
    return Actor(case, rank, folder, interface="eth0").run()


def reports(lab: Lab, case: Case, folder: Path, when_training) -> list[Report]:
    arguments = [(case, rank, folder, lab.namespaces[rank]) for rank in range(WORLD)]
    with started(be, arguments) as ranks:
        end = time.monotonic() + HANG_S
        while not all(training_file(folder, rank).exists() for rank in range(WORLD)):
            if when_training is None:
                break
            assert time.monotonic() < end, "they do not connect"
            time.sleep(0.01)
        if when_training is not None:
            when_training()
        return values_of(ranks)


def a_case(timeout_s: float) -> Case:
    """Return a case in which no rank strikes itself."""
    seed = int.from_bytes(os.urandom(3), "big")
    drawn = draw(seed, "mixed", "SIGKILL", timeout_s)
    return dataclasses.replace(drawn, world=WORLD, victim=-1)


def expect_timeouts(case: Case, ended: list[Report]) -> None:
    base = min(report.called_at for report in ended)
    for rank, report in enumerate(ended):
        said = f"{case}\nrank {rank}: {report}"
        assert report.error == "TimeoutError", said
        start = report.called_at if report.stage == "connecting" else base
        assert 0.999 * TIMEOUT_S <= report.failed_at - start <= 1.1 * TIMEOUT_S + NOISE_S, said


@pytest.mark.parametrize("directions, peer", [
    (("INPUT", "OUTPUT"), None),
    (("INPUT",), None),
    (("OUTPUT",), None),
    (("INPUT", "OUTPUT"), 2),
    (("OUTPUT",), 0),
])  # fmt: skip
def test_a_link_that_is_cut_in_a_step(lab, tmp_path, directions, peer):
    case = a_case(TIMEOUT_S)
    expect_timeouts(case, reports(lab, case, tmp_path, lambda: cut(lab, directions, peer)))


@pytest.mark.parametrize("directions", [("INPUT", "OUTPUT"), ("OUTPUT",)])
def test_a_link_that_is_cut_before_the_ranks_connect(lab, tmp_path, directions):
    case = a_case(TIMEOUT_S)
    cut(lab, directions)
    ended = reports(lab, case, tmp_path, None)
    expect_timeouts(case, ended)
    for rank in (0, 2):
        assert f"rank {VICTIM} did not connect in time" in ended[rank].message
