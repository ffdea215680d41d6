"""One checkout of this project against another: the same benchmarks of both, in turn.

    python -m bench.versus OLD NEW [--rounds 3] [--out build/bench/versus.json] [COMMAND ...]

OLD and NEW are checkouts with a release build in build/. A COMMAND is the arguments of `python -m
bench` in one word, such as "ddp --links 1gbit --ways plain,int4", or `codec_bench` with its own.
Without any, COMMANDS take about forty minutes on two quiet cores.

A round runs a command with each tree's own programs, in the order A B B A. A row's figure is its
time over that of the run's baseline, which is no code of ours (Gloo, plain DDP, a step without
exchange, a twin), so what slows the whole machine down cancels out. Printed are the medians of both
trees over the rounds, and new / old: its median, least and most over the rounds. Above 1.03 it is
SLOWER, or unclear where a round says otherwise. The exit status is 1 if a tree's program failed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import harness

COMMANDS = (
    "codec_bench --benchmark_filter='((encode_ef|decode|decode_add|reduce_requant)/"
    "(int8|int4|onebit)|select/topk)'",
    "allreduce --links loopback,1gbit,10gbit --worlds 2,4 --sizes 1024,16777216 --ways fp32,int4",
    "ddp --links loopback,1gbit --ways plain,int4 --seconds 3",
    "priority --ways 'alone,p3,p3 planned' --seconds 10",
)
FIELDS = ("kind", "framework", "subject", "bytes", "world", "link", "delay_ms", "width")
SLOWER = 1.03
COLUMNS = {
    "row": "{name}",
    "old, over the baseline": "{old:.3f}",
    "new": "{new:.3f}",
    "new / old": "{ratio:.3f} [{least:.3f}, {most:.3f}]",
    "": "{verdict}",
}


def times(tree: Path, command: str) -> dict[str, float]:
    """By row: its time over its baseline's. CalledProcessError if the tree's program fails."""
    program, *options = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        if program == "codec_bench":
            binary = tree / "build/bench/codec_bench"
            words = [binary, *options, f"--benchmark_out={out}", "--benchmark_out_format=json"]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(out.read_text())["benchmarks"]
            return {row["name"]: row["ratio_to_twin"] for row in found}
        environment = os.environ | {
            "PYTHONPATH": f"{tree}:{tree}/integrations/python",
            "THINWIRE_LIBRARY": f"{tree}/build/integrations/c/libthinwire.so",
        }
        words = [sys.executable, "-m", "bench", program, *options, f"--out={out}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=tree, env=environment)
        return {
            " ".join(str(row[field]) for field in FIELDS if field in row): 1 / row["ratio"]
            for row in json.loads(out.read_text())["rows"]
        }


def compare(trees: tuple[Path, Path], command: str, rounds: int) -> list[harness.Row]:
    """A row for each that both trees have."""
    found: tuple[list[dict[str, float]], ...] = ([], [])
    for number in range(rounds):
        for who in (0, 1) if number % 2 == 0 else (1, 0):
            found[who].append(times(trees[who], command))
    rows = []
    for name in found[0][0].keys() & found[1][0].keys():
        old, new = ([one[name] for one in each] for each in found)
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        ratio, least = statistics.median(ratios), min(ratios)
        rows.append({
            "name": name, "old": statistics.median(old), "new": statistics.median(new),
            "ratio": ratio, "least": least, "most": max(ratios), "ratios": ratios,
            "verdict": ("SLOWER" if least > 1 else "unclear") if ratio > SLOWER else "",
        })  # fmt: skip
    return sorted(rows, key=lambda row: list(found[0][0]).index(row["name"]))


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.versus", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=lambda path: Path(path).resolve())
    parser.add_argument("new", type=lambda path: Path(path).resolve())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/versus.json"))
    parser.add_argument("commands", nargs="*", default=COMMANDS)
    given = parser.parse_intermixed_args()
    kept, failed = [], 0
    for command in given.commands:
        try:
            rows = compare((given.old, given.new), command, given.rounds)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{command}: failed, {error}", file=sys.stderr)
            failed = 1
            continue
        print(f"{command}\n\n{harness.table(rows, COLUMNS)}\n", flush=True)
        kept += rows
    harness.write(given.out, kept)
    return failed


if __name__ == "__main__":
    sys.exit(main())
