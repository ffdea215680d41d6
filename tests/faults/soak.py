"""One process outlives thousands of groups, in each of which a rank is killed: `make soak`.

  python tests/faults/soak.py [--minutes 30] [--seed N]

In each round this process is a rank of a new group, and another rank dies at a place that the seed
determines. The process's memory, descriptors and threads must not grow. It exits with 1 if they do,
or if a round went wrong.

Memory is read when only leaks of a round are left: after Python has collected its cycles (an actor
is one, and holds megabytes of tensors), and with a malloc that returns free memory. heap_mib is
the memory that is allocated and not freed, exact to the byte; resident_mib includes everything
else, such as stacks, and gaps between blocks in use."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
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

ROUND_S = 600.0  # after which a round counts as hung, even if the machine stands still for minutes
WARM_UP = 40  # rounds until all sizes of tensors, worlds and codecs have occurred
# Growth from the rounds after the warm-up to the last ones. A leak grows with every round; what the
# rounds themselves keep is less than these limits.
HEAP_MIB_A_ROUND = 1 / 1024
RESIDENT_MIB, RESIDENT_MIB_A_ROUND = 2.0, 2 / 1024
PAUSE_S = 30.0  # between two lines of output
# A death in the store costs the whole timeout; the matrix tests it.
STRUCK = [phase for phase in PHASES if phase != "store"]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def make_malloc_frugal() -> None:
    """Stop malloc from learning from large blocks to keep megabytes in each of its arenas (eight
    per processor): such memory is used again, but looks like a leak at first."""
    for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        _libc.mallopt(threshold, 128 << 10)


def grow_table_of_names() -> None:
    """Grow Python's table of interned strings now. Otherwise it doubles once after some hundreds of
    rounds: half a MiB at once, which is no leak."""
    for number in range(1 << 15):
        sys.intern(f"soak {number}")


@dataclass
class Vitals:
    """The resources that a process holds."""

    heap_mib: float
    resident_mib: float
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Vitals:
        """Return those of this process."""
        gc.collect()
        _libc.malloc_trim(0)
        heap = _libc.mallinfo2()
        status = Path("/proc/self/status").read_text()
        kib, threads = (
            int(re.search(rf"^{name}:\s*(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")
        )
        return Vitals(
            round((heap.uordblks + heap.hblkhd) / 2**20, 3),
            round(kib / 1024, 1),
            len(os.listdir("/proc/self/fd")),
            threads,
        )


def play(seed: int) -> Verdict:
    """Run a round, with this process as one of the survivors."""
    chance = random.Random(seed)
    case = draw(seed, chance.choice(STRUCK), "SIGKILL", 10.0)
    own = chance.choice([rank for rank in range(case.world) if rank != case.victim])
    faulthandler.dump_traceback_later(ROUND_S, exit=True)
    verdict = judge(harness.run_awake(case, own))
    faulthandler.cancel_dump_traceback_later()
    return verdict


def growth(history: list[Vitals]) -> list[str]:
    """Describe what has grown since the warm-up."""
    rounds = len(history) - WARM_UP
    part = max(1, rounds // 5)
    first, last = history[WARM_UP : WARM_UP + part], history[-part:]
    grown = []
    for name, allowed in (
        ("heap_mib", HEAP_MIB_A_ROUND * rounds),
        ("resident_mib", RESIDENT_MIB + RESIDENT_MIB_A_ROUND * rounds),
        ("descriptors", 0),
        ("threads", 0),
    ):
        before, after = (
            statistics.median(getattr(vitals, name) for vitals in some) for some in (first, last)
        )
        if after > before + allowed:
            grown.append(f"{name} grew from {before:.3f} to {after:.3f} in {rounds} rounds")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    make_malloc_frugal()
    grow_table_of_names()
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
