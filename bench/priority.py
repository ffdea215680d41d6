"""Times training steps under each order of chunks: fifo and wfbp with a barrier in step(), and p3,
under which the next forward pass overlaps with what is still on its way, with every chunk announced
and with the order predicted.

    python bench/priority.py [--link 200mbit] [--delay_ms 0] [--codec int4] [--batch 40]
                             [--steps 24] [--chunk_bytes 1048576]

The model is VGG-like: convolutions that take most of the time and have few parameters, then fully
connected layers with most of them. Batch and link are to be chosen so that communication takes
about as long as computation, which `alone` (no exchange at all) tells. All policies run in the same
processes, in turns; a row has the median over turns of the slowest rank's mean step, with the last
exchange of a turn waited for, and the digest of the weights, which must be equal. Under p3 that
wait overlaps with nothing, so a turn has as many steps as make it hardly count."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import lab_ranks
from subjects import ALONE, Subject

# By the name of a row: the policy, and whether the order is predicted.
ORDERS = {
    "fifo": ("fifo", False),
    "wfbp": ("wfbp", False),
    "p3": ("p3", False),
    "p3 planned": ("p3", True),
}
TIMEOUT_S = 900.0
_SETTINGS = ("codec", "batch", "turns", "steps", "chunk_bytes", "lanes")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = {"chunk_bytes": arguments.chunk_bytes, "lanes": arguments.lanes}
    subjects = {ALONE: Subject("vgg", arguments.batch, ALONE, arguments.codec)}
    for order, (policy, planned) in ORDERS.items():
        subjects[order] = Subject(
            "vgg", arguments.batch, policy, arguments.codec, planned=planned, **options
        )
    for subject in subjects.values():
        subject.train(2)
    for _ in range(arguments.turns):
        for subject in subjects.values():
            subject.turn(arguments.steps)
    rows = []
    for order, subject in subjects.items():
        quartiles = statistics.quantiles(subject.turns, n=4)
        rows.append({
            "policy": order,
            "step_ms": 1000 * statistics.median(subject.turns),
            "p25_ms": 1000 * quartiles[0],
            "p75_ms": 1000 * quartiles[2],
            "weights": subject.digest(),
        })  # fmt: skip
        subject.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--delay_ms", type=float, default=0.0, help="one way")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    parser.add_argument("--chunk_bytes", type=int, default=1 << 20)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("build/bench/priority.json"))
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, lambda: measure(arguments))
    options = {key: getattr(arguments, key) for key in _SETTINGS}
    rows = lab_ranks.run(
        __file__, arguments.world, arguments.link, options, TIMEOUT_S, arguments.delay_ms
    )
    if rows is None:
        return 0
    baseline = next(row["step_ms"] for row in rows if row["policy"] == "fifo")
    for row in rows:
        row["over_fifo"] = baseline / row["step_ms"]
        print(
            f"{row['policy']:>10} {row['step_ms']:8.1f} ms [{row['p25_ms']:.1f}, "
            f"{row['p75_ms']:.1f}] {row['over_fifo']:6.3f} x  weights {row['weights']}"
        )
    setting = {key: getattr(arguments, key) for key in ("world", "link", "delay_ms", *_SETTINGS)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**setting, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
