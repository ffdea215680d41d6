"""Runs one case: its ranks are processes, each of which sends its report through a pipe."""

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

STANDSTILL_S = 0.25  # without a processor, after which a case proves nothing
ATTEMPTS = 3


@dataclass
class Ending:
    """The outcome of a case."""

    case: Case
    struck_at: float | None = None
    reports: dict[int, Report] = field(default_factory=dict)  # of the ranks that reported, by rank
    hung: list[int] = field(default_factory=list)
    crashed: dict[int, int] = field(default_factory=dict)  # survivor -> exit code
    repeated: int = 0  # earlier runs that were discarded because the machine stood still


def _be(case: Case, rank: int, folder: Path, node: str | None) -> Report:
    with inside(node):
        return Actor(case, rank, folder).run()


def run_awake(case: Case, own: int | None = None) -> Ending:
    """Like run(), but if the machine stood still, which may have caused a wrong error, print that
    and run the case again. A rank that hangs or crashes counts in any case."""
    for attempt in range(ATTEMPTS):
        with Standstill() as standstill:
            ending = run(case, own)
        ending.repeated = attempt
        if ending.hung or ending.crashed or standstill.longest_s < STANDSTILL_S:
            break
        print(f"repeated: the machine stood still for {standstill.longest_s:.2f} s during {case}")
    return ending


def run(case: Case, own: int | None = None) -> Ending:
    """Run all ranks of the case; no process of theirs outlives this call. A stopped victim is
    continued once all survivors have ended, and reports too. own: a survivor that this process runs
    itself."""
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
