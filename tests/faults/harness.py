"""Runs one case: its ranks are processes, and each one's report comes back by a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from actor import Actor, Report
from cases import Case
from nodes import inside, open_nodes
from standstill import Standstill
from strike import struck_at

sys.path.append(str(Path(__file__).resolve().parents[1]))  # matrix.py and soak.py have no conftest
from ranks import HANG_S, Rank, started

STANDSTILL_S = 0.25  # without a processor; the case says nothing then
ATTEMPTS = 3


@dataclass
class Ending:
    """What became of a case."""

    case: Case
    struck_at: float | None = None
    reports: dict[int, Report] = field(default_factory=dict)  # of the ranks that came back
    hung: list[int] = field(default_factory=list)
    crashed: dict[int, int] = field(default_factory=dict)  # survivor -> exit code
    repeated: int = 0  # how often it was run before, while the machine stood still


def _be(case: Case, rank: int, folder: Path, node: str | None) -> Report:
    with inside(node):
        return Actor(case, rank, folder).run()


def run_awake(case: Case, own: int | None = None) -> Ending:
    """As run(), and again, with a line that says so, where the machine stood still meanwhile, which
    may have made an error of another kind. A rank that hangs or crashes is no matter of time, and
    counts in any case."""
    for attempt in range(ATTEMPTS):
        with Standstill() as standstill:
            ending = run(case, own)
        ending.repeated = attempt
        if ending.hung or ending.crashed or standstill.longest_s < STANDSTILL_S:
            break
        print(f"repeated: the machine stood still for {standstill.longest_s:.2f} s during {case}")
    return ending


def run(case: Case, own: int | None = None) -> Ending:
    """All ranks of the case, none of which outlives this call. A victim that was stopped goes on
    once all survivors have ended, and reports as well. own: a survivor that is this very process
    and no one of its own."""
    with tempfile.TemporaryDirectory() as name, open_nodes(case.nodes) as nodes:
        folder = Path(name)
        node_of = {r: nodes[r // case.node_size] if nodes else None for r in range(case.world)}
        others = [rank for rank in range(case.world) if rank != own]
        ending = Ending(case)
        with started(_be, [(case, rank, folder, node_of[rank]) for rank in others]) as processes:
            rank_of = dict(zip(others, processes, strict=True))
            if own is not None:
                with inside(node_of[own]):
                    ending.reports[own] = Actor(case, own, folder).run()
            end = time.monotonic() + case.timeout_s + HANG_S
            for rank in (r for r in others if r != case.victim or case.blow == "abort"):
                _collect(ending, rank, rank_of[rank], end)
            ending.struck_at = struck_at(folder)
            if case.blow == "SIGSTOP":
                victim = rank_of[case.victim]
                with contextlib.suppress(ProcessLookupError):  # it ended before it was struck
                    os.kill(victim.process.pid, signal.SIGCONT)
                _collect(ending, case.victim, victim, time.monotonic() + case.timeout_s + HANG_S)
        return ending


def _collect(ending: Ending, number: int, rank: Rank, end: float) -> None:
    outcome = rank.outcome(end)
    if outcome is None:
        ending.hung.append(number)
        return
    if outcome.error:
        print(f"rank {number} raised\n{outcome.trace}")
        ending.crashed[number] = 1
        return
    if outcome.value is not None:
        ending.reports[number] = outcome.value
    exit_code = rank.exit_code(end)
    if exit_code is None:
        ending.hung.append(number)
    elif exit_code != 0:
        ending.crashed[number] = exit_code
