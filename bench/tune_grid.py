"""Measures a step at every point of the tuner's space on one link, and lets the tuner search the
table: how close it comes to the best within 50 trials, and after how many.

    python bench/tune_grid.py [--model mlp] [--link 1gbit] [--batch 64] [--out build/bench]

Points are measured in random order, in two rounds, and the mean is taken, so that a slow minute of
the machine does not fall on neighbours."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import lab_ranks
from subjects import Subject
from thinwire.torch.tune import EVERYTHING, Point, best_of, search

ROUNDS = 2
SEEDS = range(5)
TRIALS = 50
CLOSE = 1.05
TIMEOUT_S = 3000.0


def points() -> list[Point]:
    space = EVERYTHING
    return [Point(c, b, n) for c in space.codecs for b in space.chunk_bytes for n in space.lanes]


def measure(arguments: argparse.Namespace) -> list[list[Any]]:
    times: dict[Point, list[float]] = {point: [] for point in points()}
    for round_ in range(ROUNDS):
        for point in random.Random(round_).sample(points(), len(times)):
            subject = Subject(arguments.model, arguments.batch, "p3", **point._asdict())
            subject.train(2)
            subject.turn(3)
            subject.close()
            times[point] += subject.turns
    return [[*point, statistics.fmean(seconds)] for point, seconds in times.items()]


def judge(rows: list[list[float]]) -> None:
    table = {Point(*row[:3]): row[3] for row in rows}
    best = min(table.values())
    found, needed = [], []
    for seed in SEEDS:
        done = search(EVERYTHING, table.__getitem__, TRIALS, seed)
        found.append(best_of(done).step_s / best)
        near = [n for n, trial in enumerate(done, 1) if trial.step_s <= CLOSE * best]
        needed.append(near[0] if near else len(done) + 1)
    print(f"best of {len(table)} points: {1000 * best:.1f} ms, {min(table, key=table.get)}")
    print(
        f"{len(found)} searches of {TRIALS} trials: {max(found):.3f} of the best at most, within "
        f"5 % after {statistics.median(needed):.0f} trials (at most {max(needed)})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, lambda: measure(arguments))
    options = {"model": arguments.model, "batch": arguments.batch}
    rows = lab_ranks.run(__file__, 2, arguments.link, options, TIMEOUT_S)
    if rows is None:
        return 0
    setting = {"link": arguments.link, **options}
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / f"tune-{arguments.model}-{arguments.link}.json"
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    out.write_text(json.dumps(setting)[:-1] + f', "points": [\n{lines}\n]}}\n')
    judge(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
