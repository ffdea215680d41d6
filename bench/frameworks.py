"""Times training steps of each framework, with its own exchange of gradients and with ours.

    python bench/frameworks.py [--codec int4] [--link 1gbit] [--turns 15] [--out FILE]

`make bench-frameworks` installs the frameworks first. One model (framework_subjects.py), two ranks,
one thread each. A turn is a few steps of a framework, by its own exchange and then by ours, in the
same processes; a row has the medians of all counted steps and, as ratio, the median over the turns
of own / ours with its middle half. A link other than loopback needs root."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import lab_ranks
import torch.distributed as dist
from framework_subjects import FRAMEWORKS, OWN, Turn

STEPS = 5  # of a turn
TIMEOUT_S = 1800.0


def median_step(turn: Turn) -> float:
    """Milliseconds, on this rank; a synchronous exchange keeps all ranks in step."""
    dist.barrier()
    return 1000 * statistics.median(turn(STEPS))


def row_of(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [own / ours for own, ours in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    own, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {
        "framework": name, "own_ms": own, "ours_ms": ours, "ratio": middle, "low": low,
        "high": high, "turns": len(pairs),
    }  # fmt: skip


def measure(names: list[str], codec: str, turns: int) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        subjects = {
            name: [stack.enter_context(FRAMEWORKS[name](way)) for way in (OWN, codec)]
            for name in names
        }
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(turns):
            for name, (own, ours) in subjects.items():
                pairs[name].append((median_step(own), median_step(ours)))
        return [row_of(name, pairs[name]) for name in names]


def table(rows: list[dict[str, Any]], codec: str) -> str:
    lines = [f"| framework | its own, ms a step | {codec}, ms | speed-up [middle half] |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row['framework']} | {row['own_ms']:.1f} | {row['ours_ms']:.1f} "
            f"| **{row['ratio']:.2f} ×** [{row['low']:.2f}, {row['high']:.2f}] |"  # noqa: RUF001
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--frameworks", default=";".join(FRAMEWORKS), help="names, between ;")
    parser.add_argument("--out", type=Path, default=Path("build/bench/frameworks.json"))
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    names, codec, turns = arguments.frameworks.split(";"), arguments.codec, arguments.turns
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, lambda: measure(names, codec, turns))
    os.environ["HF_HUB_OFFLINE"] = "1"
    options = {"codec": codec, "turns": turns, "frameworks": arguments.frameworks}
    rows = lab_ranks.run(__file__, 2, arguments.link, options, TIMEOUT_S) or []
    print(table(rows, codec))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
