"""One process that outlives thousands of groups, of each of which a rank is killed: `make soak`.

  python tests/faults/soak.py [--minutes 30] [--seed N]

In each round this process is a rank of a new group, and another rank dies, at a place that the seed
says. Its memory, descriptors and threads must not grow. It ends with 1 if they do, or if a round
went wrong."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import harness
from cases import PHASES, draw
from report import table
from verdict import Verdict, judge

ROUND_S = 600.0  # after which a round hangs, also on a machine that stands still for minutes
WARM_UP = 40  # rounds until all sizes of tensors, worlds and codecs have been there
GROWTH = 1.05  # of memory, between the rounds after the warm-up and the last ones
PAUSE_S = 30.0  # between two lines of output
# Dying in the store costs the timeout, which the matrix is there for.
STRUCK = [phase for phase in PHASES if phase != "store"]


@dataclass
class Vitals:
    """What a process holds."""

    resident_mib: float
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Vitals:
        """Of this process."""
        status = Path("/proc/self/status").read_text()
        kib, threads = (
            int(re.search(rf"^{name}:\s*(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")
        )
        return Vitals(kib / 1024, len(os.listdir("/proc/self/fd")), threads)


def play(seed: int) -> Verdict:
    """A round, with this process as one of the survivors."""
    chance = random.Random(seed)
    case = draw(seed, chance.choice(STRUCK), "SIGKILL", 10.0)
    own = chance.choice([rank for rank in range(case.world) if rank != case.victim])
    faulthandler.dump_traceback_later(ROUND_S, exit=True)
    verdict = judge(harness.run_awake(case, own))
    faulthandler.cancel_dump_traceback_later()
    return verdict


def growth(history: list[Vitals]) -> list[str]:
    """What has grown since the warm-up, in words."""
    part = max(1, (len(history) - WARM_UP) // 5)
    first, last = history[WARM_UP : WARM_UP + part], history[-part:]
    grown = []
    for name, factor in (("resident_mib", GROWTH), ("descriptors", 1.0), ("threads", 1.0)):
        before, after = (
            statistics.median(getattr(vitals, name) for vitals in some) for some in (first, last)
        )
        if after > factor * before:
            grown.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"soaking for {arguments.minutes} minutes from seed {arguments.seed} on", flush=True)
    history: list[Vitals] = []
    verdicts: list[Verdict] = []
    end, said = time.monotonic() + 60 * arguments.minutes, 0.0
    for seed in itertools.count(arguments.seed):
        if time.monotonic() > end and len(history) > WARM_UP:
            break
        verdicts.append(play(seed))
        history.append(Vitals.now())
        if verdicts[-1].problems:
            print(f"{verdicts[-1].case}\n  " + "\n  ".join(verdicts[-1].problems), flush=True)
        if time.monotonic() > said + PAUSE_S:
            said = time.monotonic()
            print(f"{len(history)} groups, {history[-1]}", flush=True)
    print(table(verdicts))
    grown = growth(history)
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(history)} groups, {history[-1]}; {wrong} went wrong; {', '.join(grown) or 'flat'}")
    return int(wrong > 0 or bool(grown))


if __name__ == "__main__":
    sys.exit(main())
