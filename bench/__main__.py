"""The benchmarks that run ranks: each row is a ratio to a baseline in the same processes.

    python -m bench KIND [options] [--out FILE]     see KINDS; --help lists the options

Links other than loopback require root (bench/lab.py); without it their rows are printed as
skipped. `make bench` runs the kinds of KINDS one after another, `make bench ARGS=--quick` those of
the main table in five minutes."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, lab, store
from bench.harness import Row


class Kind(NamedTuple):
    """A kind of benchmark, and the defaults of its options."""

    what: str
    links: str = ""
    ways: str = ""
    kinds: str = ""  # kinds of steps, separated by ;, that are measured in its place
    worlds: str = "2"
    sizes: str = "64,67108864"


KINDS = {
    "ddp": Kind(
        "a DDP step by each way of exchanging gradients, over plain DDP", "1gbit,10gbit,loopback",
        "plain,bf16 hook,int8,int4,adaptive,onebit,topk:density=0.01,alone",
    ),
    "fsdp2": Kind(
        "an FSDP2 step, over FSDP2's own collectives", "1gbit", "plain,int8,int4,adaptive"
    ),
    "frameworks": Kind(
        "a step of each framework with int4, over the framework's own exchange", "1gbit",
        "plain,int4",
    ),
    "priority": Kind(
        "steps under p3 and wfbp, and of FSDP2 with as many bytes, over fifo, where exchanging "
        "takes as long as computing", "200mbit", "fifo,wfbp,p3,p3 planned,fsdp2,alone",
    ),
    "allreduce": Kind(
        "one allreduce by size and codec, over Gloo's fp32 allreduce", "1gbit,10gbit,loopback",
        "fp32,bf16,int8,int4,onebit,onebit:down=onebit,topk,adaptive,fp32+checksum",
    ),
    "latency": Kind(
        "small allreduces among 2, 4 and 8 ranks, over Gloo's", lab.LOOPBACK, "fp32,int4",
        worlds="2,4,8", sizes="64,4096",
    ),
    "map": Kind(
        "DDP and FSDP2 with codec='auto' on a grid of links, over the uncompressed step",
        "100mbit,1gbit,10gbit,none", "plain,auto,int8,int4,adaptive", "ddp;fsdp2",
    ),
    "store": Kind("the parameter server: over an allreduce, its orders, with stragglers"),
}  # fmt: skip
COLUMNS = {
    "link": "{link}",
    "ranks": "{world}",
    "subject": "{subject}",
    "ms": "{ms:.2f}",
    "middle half": "{low_ms:.2f} to {high_ms:.2f}",
    "ratio": "**{ratio:.2f}**",
    "95 % interval": "{ratio_low:.2f} to {ratio_high:.2f}",
}
ALLREDUCE_COLUMNS = {  # as nccl-tests prints them; GB are 10^9 bytes
    "link": "{link}",
    "ranks": "{world}",
    "codec": "{subject}",
    "size (B)": "{bytes}",
    "time (us)": "{us:.1f}",
    "algbw (GB/s)": "{algbw:.3f}",
    "busbw (GB/s)": "{busbw:.3f}",
    "#wrong": "{wrong}",
    "over Gloo's fp32": "**{ratio:.2f}**",
}
TIMEOUT_S = 3600.0
PACKAGES = ("lightning", "accelerate", "transformers")  # a result has their versions


def step_rows(arguments: argparse.Namespace) -> list[Row]:
    """Measure steps; runs in the ranks of one lab."""
    from bench.subjects import priority, steps

    ways, options = arguments.ways.split(","), {}
    if arguments.kind == "priority":
        subjects = {way: priority.order(way) for way in ways}
        options = {"steps": priority.TURN}
    elif arguments.kind == "frameworks":
        return [
            {"framework": name} | row
            for name in names_of(arguments) or steps.FRAMEWORKS
            for row in harness.measure(
                {way: steps.FRAMEWORKS[name](way) for way in ways}, seconds=arguments.seconds
            )
        ]
    else:
        make: Callable[..., Any] = steps.fsdp2
        if arguments.kind == "ddp":
            make = functools.partial(steps.ddp, device=arguments.device)
        subjects = {way: make(way, arguments.width) for way in ways}
        options = {"steps": arguments.steps}
    rows = harness.measure(subjects, seconds=arguments.seconds, **options)
    return [row | steps.chosen.get(row["subject"], {}) for row in rows]


def names_of(arguments: argparse.Namespace) -> list[str]:
    """Return the requested frameworks; by default all."""
    return arguments.frameworks.split(";") if arguments.frameworks else []


def allreduce_rows(place: lab.Lab, arguments: argparse.Namespace) -> list[Row]:
    """Run the C++ program; return a row for each size and way."""
    program = str(harness.ROOT / "build/bench/allreduce_bench")
    sizes, found = arguments.sizes.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        command = [program, folder, str(arguments.repetitions), *sizes, arguments.ways]
        place.run(command, TIMEOUT_S)
        lines = (Path(folder) / "times.json").read_text().splitlines()
    for times in map(json.loads, lines):
        ways = ["Gloo", *arguments.ways.split(",")]
        for row in harness.rows_of({way: times[way] for way in ways})[1:]:
            wrong = times[f"{row['subject']} wrong"]
            found.append(network_row(row | {"bytes": times["bytes"], "wrong": wrong}, place.world))
    return found


def network_row(row: Row, world: int) -> Row:
    """Add bandwidths as nccl-tests defines them (doc/PERFORMANCE.md there): algbw = size / time,
    busbw = algbw * 2 (n - 1) / n. The size is that of fp32, not of the bytes sent."""
    algbw = row["bytes"] / row["ms"] / 1e6
    return row | {"us": 1e3 * row["ms"], "algbw": algbw, "busbw": algbw * 2 * (world - 1) / world}


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """Yield the links, delays in milliseconds, and numbers of ranks to measure."""
    links = arguments.links.split(",")
    delays = [float(delay) for delay in arguments.delays_ms.split(",")]
    worlds = [int(world) for world in arguments.worlds.split(",")]
    for link, delay_ms, world in itertools.product(links, delays, worlds):
        if not (delay_ms and link == lab.LOOPBACK):
            yield link, delay_ms, world


def measure_cell(arguments: argparse.Namespace, place: lab.Lab, kind: str, width: int) -> list[Row]:
    if kind in ("allreduce", "latency"):
        return allreduce_rows(place, arguments)
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    options = [f"--{key}={value}" for key, value in given.items() if key not in ("kind", "resume")]
    return harness.run_ranks(place, [kind, *options, f"--width={width}"], TIMEOUT_S)


def show(found: list[Row]) -> None:
    columns = ALLREDUCE_COLUMNS if "bytes" in found[0] else COLUMNS
    if "framework" in found[0]:
        columns = {"framework": "{framework}"} | columns
    print(harness.table(found, columns) + "\n", flush=True)


def run(arguments: argparse.Namespace, out: Path) -> list[Row]:
    """Measure all cells, and write `out` after each. With --resume the cells in it are kept; they
    must be of this commit, because a result names one commit."""
    rows: list[Row] = []
    if arguments.resume and out.exists():
        result = json.loads(out.read_text())
        if result["commit"] != harness.commit():
            raise SystemExit(
                f"{out} is of commit {result['commit']}; --resume needs it checked out"
            )
        rows = result["rows"]
    refusal, end = lab.can_shape(), time.monotonic() + 60 * arguments.minutes
    kinds, widths = [arguments.kind], str(arguments.width)
    if several := KINDS[arguments.kind].kinds:
        kinds, widths = names_of(arguments) or several.split(";"), arguments.widths
    for (link, delay_ms, world), kind, width in itertools.product(
        cells(arguments), kinds, map(int, widths.split(","))
    ):
        cell = {
            "link": link, "delay_ms": delay_ms, "world": world, "kind": kind, "width": width
        }  # fmt: skip
        if any(cell.items() <= row.items() for row in rows):
            continue
        if link != lab.LOOPBACK and refusal:
            print(f"{cell}: skipped, {refusal}", flush=True)
            continue
        if time.monotonic() > end:
            print(f"{cell}: skipped, the {arguments.minutes:g} minutes are over", flush=True)
            continue
        start = time.monotonic()
        with lab.open_lab(world, link, delay_ms=delay_ms) as place:
            found = [cell | row for row in measure_cell(arguments, place, kind, width)]
        print(f"{kind}, {width}, {delay_ms:g} ms: {time.monotonic() - start:.0f} s")
        if found:
            show(found)
        rows += found
        harness.write(out, rows, *PACKAGES)
    return rows


def main() -> int:
    kinds = "; ".join(f"{name}: {kind.what}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        "python -m bench", description=f"Runs one kind of benchmark. {kinds}."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--links", help="rates of hosts' links, 'none' or 'loopback'")
    parser.add_argument("--delays_ms", default="0", help="one way, of shaped links")
    parser.add_argument("--worlds", help="numbers of ranks; default: 2")
    parser.add_argument("--ways", help="subjects; the first is the baseline")
    parser.add_argument("--width", type=int, default=1024, help="of the four layers of a step")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="of the kind ddp; ranks of a machine with one GPU share it",
    )  # fmt: skip
    parser.add_argument(
        "--frameworks", default="", help="names, with ; between them; of the kind map: ddp, fsdp2"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, of a subject")
    parser.add_argument("--steps", type=int, default=5, help="of a turn; kinds ddp, fsdp2, map")
    parser.add_argument("--widths", default="256,1024,2048", help="of the kind map")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no cell begins after them")
    parser.add_argument("--resume", action="store_true", help="keep the cells that OUT has")
    parser.add_argument("--sizes", help="of allreduces: smallest and largest, bytes")
    parser.add_argument("--repetitions", type=int, default=15, help="of an allreduce")
    parser.add_argument("--parts", default=",".join(store.ALL), help="of the kind store")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if harness.is_rank() and arguments.kind == "store":
        return store.rank(arguments)
    if harness.is_rank():
        return harness.be_rank(lambda: step_rows(arguments))
    for option in ("links", "ways", "worlds", "sizes"):
        given = getattr(arguments, option)
        setattr(arguments, option, given or getattr(KINDS[arguments.kind], option))
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = arguments.out or harness.ROOT / f"build/bench/{arguments.kind}.json"
    try:
        rows = store.run(arguments) if arguments.kind == "store" else run(arguments, out)
    except KeyboardInterrupt:
        kept = f"; {out} has the cells that were measured" if out.exists() else ""
        print(f"python -m bench {arguments.kind}: interrupted{kept}", file=sys.stderr)
        return 130
    harness.write(out, rows, *PACKAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
