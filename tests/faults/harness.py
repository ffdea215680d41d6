"""Runs one case: its ranks are processes, and each one's report comes back by a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from actor import Actor, Report
from cases import Case
from nodes import inside, open_nodes
from standstill import Standstill
from strike import struck_at

# A process has one fork server, and the list set last holds for all tests of it: this is the list
# of tests/integrations/python/ranks.py, without which each of its ranks would import torch itself.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "thinwire.torch"])

HANG_S = 20.0  # beyond the timeout, and beyond all that is judged
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


def _be(pipe, case: Case, rank: int, folder: Path, node: str | None) -> None:
    with inside(node):
        pipe.send(Actor(case, rank, folder).run())


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
        processes, pipes = {}, {}
        node_of = {r: nodes[r // case.node_size] if nodes else None for r in range(case.world)}
        for rank in (r for r in range(case.world) if r != own):
            pipes[rank], theirs = context.Pipe(duplex=False)
            processes[rank] = context.Process(
                target=_be, args=(theirs, case, rank, folder, node_of[rank])
            )
            processes[rank].start()
            theirs.close()
        ending = Ending(case)
        try:
            if own is not None:
                with inside(node_of[own]):
                    ending.reports[own] = Actor(case, own, folder).run()
            end = time.monotonic() + case.timeout_s + HANG_S
            for rank in (r for r in processes if r != case.victim or case.blow == "abort"):
                _collect(ending, rank, pipes[rank], processes[rank], end)
            ending.struck_at = struck_at(folder)
            if case.blow == "SIGSTOP":
                with contextlib.suppress(ProcessLookupError):  # it ended before it was struck
                    os.kill(processes[case.victim].pid, signal.SIGCONT)
                end = time.monotonic() + case.timeout_s + HANG_S
                _collect(ending, case.victim, pipes[case.victim], processes[case.victim], end)
            return ending
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _collect(ending: Ending, rank: int, pipe, process, end: float) -> None:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        ending.hung.append(rank)
        return
    with contextlib.suppress(EOFError):  # it died
        ending.reports[rank] = pipe.recv()
    process.join(max(0.1, end - time.monotonic()))
    if process.exitcode is None:
        ending.hung.append(rank)
    elif process.exitcode != 0:
        ending.crashed[rank] = process.exitcode
