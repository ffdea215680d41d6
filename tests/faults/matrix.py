"""The whole fault matrix: `make soak` runs it, and then soak.py.

  python tests/faults/matrix.py [--cases 300] [--seed N] [--stop-s 2] [--only 'phase,...']
                                [--blows 'SIGKILL,...'] [--between-nodes] [--seconds 60]

Prints each case that went wrong, with the seed that repeats it, and a table. Exits with 1 if a case
did, or if the 99th percentile of all kills is above 250 ms or that of all timeouts above 1.1 T."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time

import harness
import tqdm
from cases import BLOWS, PHASES, matrix
from report import percentile, table
from verdict import KILL_P99_S, TIMEOUT_P99, Verdict, judge

BOUNDS = {"kill": KILL_P99_S, "abort": KILL_P99_S, "timeout": TIMEOUT_P99}


def is_late(verdicts: list[Verdict], kind: str, most: float) -> bool:
    """Return whether the 99th percentile of the errors of this kind is above the bound."""
    values = [v for verdict in verdicts if verdict.kind == kind for v in verdict.latencies]
    return bool(values) and percentile(values, 0.99) > most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--stop-s", type=float, default=2.0, help="timeout where ranks are stopped")
    parser.add_argument("--only", default=",".join(PHASES), help="phases, separated by commas")
    parser.add_argument("--blows", default=",".join(BLOWS), help="the same of blows")
    parser.add_argument("--between-nodes", action="store_true", help="no cases of one node")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    arguments = parser.parse_args()
    cases = [
        case
        for case in matrix(arguments.cases, arguments.seed, arguments.stop_s)
        if case.phase in arguments.only.split(",")
        and case.blow in arguments.blows.split(",")
        and (case.nodes > 0 or not arguments.between_nodes)
    ]
    print(f"{len(cases)} cases from seed {arguments.seed} on")
    verdicts: list[Verdict] = []
    end = time.monotonic() + arguments.seconds
    for case in tqdm.tqdm(cases, mininterval=10):
        if time.monotonic() > end:
            break
        verdict = judge(harness.run_awake(case))
        verdicts.append(verdict)
        if verdict.problems:
            print(f"{case}\n  " + "\n  ".join(verdict.problems), flush=True)
    print(table(verdicts))
    late = [kind for kind, most in BOUNDS.items() if is_late(verdicts, kind, most)]
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{sum(v.repeated for v in verdicts)} repetitions, since the machine stood still")
    print(f"{wrong} cases went wrong; too late at the 99th percentile: {', '.join(late) or 'none'}")
    return int(wrong > 0 or bool(late))


if __name__ == "__main__":
    sys.exit(main())
