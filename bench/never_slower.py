"""Draws the map of `python -m bench map`, and counts its cells.

python -m bench.never_slower RESULT.json [RESULT.json ...] [--plot FILE.png]

A cell is a kind of step, a width, a link, a delay and a number of ranks. Its figures are the speed
of codec="auto" divided by that of the uncompressed step, of the fastest fixed way among those that
auto may choose, and of the fastest of all. The uncompressed step is a fixed way. If several files
have a cell, the last one counts."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Row

FIELDS = ("link", "delay_ms", "world", "kind", "width")
TAKEN = ("plain", "bf16", "int8", "int4")  # the ways that auto may choose: forecast.ACCURATE
NEVER_SLOWER, NEAR_BEST = 0.98, 0.95  # the least values of a cell's two figures
COLUMNS = {
    "step": "{kind}, {width}",
    "ranks": "{world}",
    "link": "{link}",
    "delay, ms": "{delay_ms:g}",
    "auto over plain": "**{ratio:.2f}**",
    "95 % interval": "{ratio_low:.2f} to {ratio_high:.2f}",
    "auto took": "{chosen}",
    "best that auto may take": "{best}",
    "auto over it": "{over_best:.2f}",
    "best of all": "{best_of_all}",
    "auto over that": "{over_all:.2f}",
}


def cells(files: Iterable[Iterable[Row]]) -> list[Row]:
    """Return a row for each cell: auto's, with the fastest fixed ways and its speed relative to
    theirs. If several files have a cell, the last one counts."""
    found: dict[tuple[Any, ...], Row] = {}
    for rows in files:
        ways: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in rows:
            ways.setdefault(tuple(row[field] for field in FIELDS), {})[row["subject"]] = row
        for cell, way in ways.items():
            auto = way.pop("auto")
            best = min((name for name in way if name in TAKEN), key=lambda name: way[name]["ms"])
            best_of_all = min(way, key=lambda name: way[name]["ms"])
            found[cell] = auto | {
                "best": best, "over_best": way[best]["ms"] / auto["ms"],
                "best_of_all": best_of_all, "over_all": way[best_of_all]["ms"] / auto["ms"],
            }  # fmt: skip
    return list(found.values())


def counts(found: list[Row]) -> Row:
    """Count the cells. kept: at NEVER_SLOWER or above; proven: below it with their whole interval;
    near: within 5 % of the best way that auto may choose; near_all: within 5 % of the best of all;
    taken: those of the others where auto had chosen that best way."""
    ratios = [cell["ratio"] for cell in found]
    far = [cell for cell in found if cell["over_best"] < NEAR_BEST]
    return {
        "cells": len(found), "least": min(ratios), "median": statistics.median(ratios),
        "most": max(ratios), "slower": sum(ratio < 1 for ratio in ratios),
        "kept": sum(ratio >= NEVER_SLOWER for ratio in ratios),
        "proven": sum(cell["ratio_high"] < NEVER_SLOWER for cell in found),
        "near": len(found) - len(far),
        "taken": sum(cell.get("chosen") == cell["best"] for cell in far),
        "near_all": sum(cell["over_all"] >= NEAR_BEST for cell in found),
    }  # fmt: skip


def plot(found: list[Row], path: Path) -> None:
    links = list(dict.fromkeys(cell["link"] for cell in found))
    lines = sorted(
        {(cell["link"], cell["delay_ms"]) for cell in found},
        key=lambda line: (links.index(line[0]), line[1]),
    )
    columns = sorted({(cell["kind"], cell["world"], cell["width"]) for cell in found})
    grid = [[math.nan] * len(columns) for _ in lines]
    size = (2.6 + 0.62 * len(columns), 1.9 + 0.36 * len(lines))
    with harness.picture(path, figsize=size) as axis:
        for cell in found:
            line = lines.index((cell["link"], cell["delay_ms"]))
            column = columns.index((cell["kind"], cell["world"], cell["width"]))
            grid[line][column] = math.log2(cell["ratio"])
            weight = "bold" if cell["ratio_high"] < NEVER_SLOWER else "normal"
            text = f"{cell['ratio']:.2f}"
            axis.text(column, line, text, ha="center", va="center", fontsize=8, weight=weight)
        # White is as fast as uncompressed, blue is faster, red is slower.
        axis.imshow(grid, cmap="RdBu", vmin=-3, vmax=3, aspect="auto", alpha=0.7)
        axis.set_xticks(
            range(len(columns)),
            [f"{kind}\n{width}\n{world} ranks" for kind, world, width in columns],
            fontsize=7,
        )
        names = [f"{link}, {delay:g} ms" if delay else link for link, delay in lines]
        axis.set_yticks(range(len(lines)), names, fontsize=8)
        axis.set_title('codec="auto" over the uncompressed step', fontsize=10)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.never_slower", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of python -m bench map")
    parser.add_argument("--plot", type=Path, help="the picture")
    given = parser.parse_args()
    found = cells(json.loads(path.read_text())["rows"] for path in given.results)
    print(harness.table(found, COLUMNS))
    print("\n" + harness.table([counts(found)]))
    if given.plot:
        plot(found, given.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
