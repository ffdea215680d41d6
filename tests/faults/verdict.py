"""How a case must end, and how long that took.

After a kill the error must come within 250 ms. A stopped rank, or one that dies before it has
published its address, can only be found by the timeout T: the error comes in [T, 1.1 T]. Both upper
bounds apply to the 99th percentile over all cases. A single case has seconds more before it counts
as a fault, since a rank may wait that long for a processor on a busy machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from actor import Report
from cases import Case
from harness import Ending

KILL_P99_S, TIMEOUT_P99 = 0.25, 1.1  # in seconds, and in timeouts
KILL_MOST_S = 10.0
NOISE_S = 10.0  # of a busy machine, added to the upper bound of a single case


KIND_OF = {"SIGSTOP": "timeout", "abort": "abort"}
ERRORS = {"kill": "PeerLostError", "abort": "Error", "timeout": "TimeoutError"}


@dataclass
class Verdict:
    """kind: "kill", "abort", "timeout", "close", or "missed" if everything was over before the
    blow. latencies: one per survivor, in seconds from the blow, or in timeouts. problems:
    human-readable."""

    case: Case
    kind: str
    latencies: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repeated: int = 0  # like Ending's


def judge(ending: Ending) -> Verdict:
    """Judge a case."""
    case = ending.case
    verdict = Verdict(case, _kind(ending), repeated=ending.repeated)
    verdict.problems += [f"rank {rank} hangs" for rank in ending.hung]
    verdict.problems += [f"rank {rank} ended with {code}" for rank, code in ending.crashed.items()]
    # The rank that aborts gets the reason like all others.
    survivors = {
        rank: report
        for rank, report in ending.reports.items()
        if rank != case.victim or case.blow == "abort"
    }
    verdict.problems += [f"rank {n}: {r.wrong}" for n, r in survivors.items() if r.wrong]
    if ending.struck_at is None:
        if verdict.kind != "missed":
            said = [f"{n}: {r.error} {r.message}" for n, r in ending.reports.items()]
            verdict.problems.append(f"the victim was never struck, and ranks said {said}")
        return verdict
    base = min((r.called_at for r in survivors.values()), default=0.0)
    for rank, report in survivors.items():
        _judge_error(verdict, rank, report)
        _judge_time(verdict, rank, report, ending.struck_at, base)
    return verdict


def _kind(ending: Ending) -> str:
    case = ending.case
    if case.phase == "closing":
        return "missed" if ending.struck_at is None else "close"
    if case.blow in KIND_OF:
        return KIND_OF[case.blow]
    # No rank can know of one that dies before it has published its address.
    unknown = any(report.error == "TimeoutError" for report in ending.reports.values())
    return "timeout" if case.phase == "store" and unknown else "kill"


def _names(message: str, rank: int) -> bool:
    """Return whether a message names the rank: "rank 2", or "ranks 1, 2"."""
    return re.search(rf"\branks? (\d+, )*{rank}\b", message) is not None


def _judge_error(verdict: Verdict, rank: int, report: Report) -> None:
    case = verdict.case
    if verdict.kind == "close":
        # A rank in its last step may still need bytes that the victim has not sent.
        in_step = report.stage == "step" and report.error == "PeerLostError"
        if report.error and not (in_step and _names(report.message, case.victim)):
            verdict.problems.append(
                f"rank {rank} got {report.error} while {report.stage}: {report.message}"
            )
        return
    expected = {ERRORS[verdict.kind]}
    # A rank that has all its connections only learns that its peers have failed.
    if case.phase == "connecting" and report.stage == "step":
        expected.add("PeerLostError")
    if report.error not in expected:
        verdict.problems.append(
            f"rank {rank}: {report.error or 'no error'}, expected {expected}: {report.message}"
        )
    elif report.error == ERRORS[verdict.kind] and not _names(report.message, case.victim):
        verdict.problems.append(f"rank {rank} does not name the victim: {report.message}")


def _judge_time(verdict: Verdict, rank: int, report: Report, struck_at: float, base: float) -> None:
    case = verdict.case
    if verdict.kind == "timeout":
        start = report.called_at if report.stage == "connecting" else base
        took = (report.failed_at - start) / case.timeout_s
        # The first rank to time out tells the others, which may have begun a moment later.
        is_early = (report.failed_at - base) / case.timeout_s < 0.999
        if (is_early and report.error == "TimeoutError") or took > 1.1 + NOISE_S / case.timeout_s:
            verdict.problems.append(f"rank {rank}: the error came after {took:.3f} T")
    else:
        took = max(0.0, report.failed_at - max(struck_at, report.called_at))
        if took > KILL_MOST_S:
            verdict.problems.append(f"rank {rank}: it took {took:.3f} s")
    verdict.latencies.append(took)
