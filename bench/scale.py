"""How an allreduce scales with the number of ranks: measured for 2 to 16 ranks on one machine, and
simulated for thousands.

    python -m bench.scale measure FILE [--rounds N]   lines of JSON; ranks are threads
    python -m bench.scale report FILE FOLDER          calibrates the simulator with 2, 4 and 8 flat
                                                      ranks of FILE, compares it with the others,
                                                      and simulates up to 4,096: scale.json and .png

A rank's processor time is fitted to messages, bytes, elements and exchanges. Predictions are first
compared by processor time, because wall-clock time depends more on other users of the machine."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls
from thinwire.comm import Communicator
from thinwire.config import Config

from bench import harness
from bench.folder_store import FolderStore
from bench.harness import Row

MIB = 1 << 20
CALIBRATED, HELD_OUT = (2, 4, 8), (3, 6, 12, 16)
WARM_UP, REPETITIONS = 2, 11
CORES = 2  # of the machine that all measured ranks share
GRADIENTS = 1_300_000_000  # bytes of fp32 of BERT-Large
RANKS = (16, 64, 256, 1024, 4096)
BUCKETS = {"25 MiB": 25 * MIB, "256 MiB": 256 * MIB}
# Bits per second; threads that move a rank's messages (THINWIRE_LOOPS); and chunks in flight.
PANELS = {
    "1 Gb/s": (1e9, 1, 4),
    "10 Gb/s": (10e9, 1, 4),
    "25 Gb/s": (25e9, 1, 4),
    "25 Gb/s, 8 loops, 16 lanes": (25e9, 8, 16),
}
LATENCY_S = 20e-6  # one way, inside a data centre
# Bits of an element, including its scale. The three quantisers are assumed to cost the same per
# element, so that the cost per byte can be told from the cost per element.
BITS = {"int4": 4.0625, "int8": 8.0625, "onebit:down=onebit": 1.0625}


class Costs(NamedTuple):
    """Processor seconds of one rank."""

    message_s: float
    byte_s: float
    element_s: float
    exchange_s: float  # of a chunk's hop of any size: threads wait and are woken


# Measured settings.


def measure_one(ranks: int, size: int, chunk: int, codec: str, topology: str) -> Row:
    """Return the times of an allreduce of `size` bytes over Gloo on loopback, and the processor
    time of all ranks together. Ranks are threads of this process, each with its own
    communicator."""
    barrier, times = threading.Barrier(ranks), []
    settings = {"codec": codec, "topology": topology, "chunk_bytes": chunk, "transport": "gloo"}
    config = Config(min_bytes=0, **settings)

    def be(rank: int, folder: str) -> None:
        comm = Communicator(rank, ranks, FolderStore(folder), "scale", config)
        noise = np.sin(np.arange(size // 4) % 997 + rank).astype(np.float32)
        values = np.empty_like(noise)
        for _ in range(WARM_UP + REPETITIONS):
            values[:] = noise
            barrier.wait()
            wall, processor = time.perf_counter(), time.process_time()
            comm.start(values.ctypes.data, values.size, "float32", "mean", "g").wait()
            barrier.wait()
            if rank == 0:
                times.append((time.perf_counter() - wall, time.process_time() - processor))
            barrier.wait()
        comm.close()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        list(pool.map(be, range(ranks), [folder] * ranks))
    wall, processor = (np.array(each) for each in zip(*times[WARM_UP:], strict=True))
    low, middle, high = 1e3 * np.quantile(wall, (0.1, 0.5, 0.75))
    return settings | {
        "ranks": ranks, "bytes": size, "repetitions": REPETITIONS, "ms": middle, "low_ms": low,
        "high_ms": high, "processor_ms": 1e3 * np.median(processor),
    }  # fmt: skip


def settings() -> Iterator[tuple[int, int, int, str, str]]:
    """Yield ranks, bytes, bytes of a chunk, codec and topology of all measurements."""
    chunks, every = (MIB // 2, MIB, 4 * MIB), (*CALIBRATED, *HELD_OUT)
    yield from itertools.product(every, (4 * MIB, 16 * MIB), chunks, ("int4",), ("flat",))
    yield from itertools.product((4, 6, 12, 16), (16 * MIB,), chunks[1:], ("int4",), ("grid",))
    others = ("int8", "onebit:down=onebit")
    yield from itertools.product(CALIBRATED, (16 * MIB,), chunks[1:], others, ("flat",))


def measure(file: Path, rounds: int) -> None:
    with file.open("w") as out:
        for _ in range(rounds):
            for setting in settings():
                print(json.dumps(measure_one(*setting)), file=out, flush=True)


def load(file: Path) -> list[Row]:
    """Return one row for each setting: medians over the rounds; for wall-clock time the
    minimum."""
    setting = ("ranks", "bytes", "chunk_bytes", "codec", "topology")
    found = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found[tuple(row[field] for field in setting)].append(row)
    return [
        dict(zip(setting, key, strict=True)) | {
            "processor_ms": statistics.median(row["processor_ms"] for row in rows),
            "wall_ms": min(row["low_ms"] for row in rows),
        }
        for key, rows in found.items()
    ]  # fmt: skip


# The model's costs.


def rows_of(ranks: int) -> int:
    """Return the rows of the grid of schedule/collective/partition.h."""
    return max(r for r in range(1, math.isqrt(ranks) + 1) if ranks % r == 0)


def features(row: Row) -> np.ndarray:
    """Return the messages, bytes, elements and exchanges of one rank."""
    ranks, numel = row["ranks"], row["bytes"] / 4
    chunks = max(1, row["bytes"] // row["chunk_bytes"])
    grid, rows = row["topology"] == "grid", rows_of(ranks)
    peers = rows + ranks // rows - 2 if grid else ranks - 1
    sent = 2 * numel * BITS[row["codec"]] / 8 * (ranks - 1) / ranks
    # As in wire.cc: a column's part is summed, and its sum encoded, a second time.
    coded = numel * (1 + 2 / 3 / (ranks // rows)) if grid else numel
    return np.array([2 * peers * chunks, sent, coded, (4 if grid else 2) * chunks])


def calibrate(rows: list[Row]) -> Costs:
    """Fit the costs by least squares of relative errors; no cost is below zero."""
    known = [row for row in rows if row["ranks"] in CALIBRATED]
    measured = np.array([row["processor_ms"] / 1e3 / row["ranks"] for row in known])
    matrix = np.array([features(row) for row in known]) / measured[:, None]
    found, _ = nnls(matrix, np.ones(len(known)))
    return Costs(*found)


# Simulations.


MEASURED = {"rate": 1e12, "latency_s": 0.0, "cores": CORES, "loops": 1, "lanes": 4}


def simulate(cases: list[Row], costs: Costs) -> list[Row]:
    """Simulate cases. rate: bytes per second of a rank's link. chunk_bytes 0: the library's
    default."""
    codec = " ".join([f"{costs.element_s / 3}"] * 3)  # a third each, because the sum was fitted
    line = (
        "{ranks} {bytes} {bucket_bytes} {chunk_bytes} {codec} {topology} {rate} {latency_s} {cores}"
        f" {costs.message_s} {costs.byte_s} {costs.exchange_s} {codec} {{loops}} {{lanes}}"
    )
    return harness.simulate("ranks", map(line.format_map, cases))


def hold_against(rows: list[Row], costs: Costs) -> list[Row]:
    """Return predictions for all measurements. Loopback has no limited rate."""
    simulated = simulate([row | MEASURED | {"bucket_bytes": row["bytes"]} for row in rows], costs)
    for row, found in zip(rows, simulated, strict=True):
        row["simulated_ms"] = 1e3 * found["step_s"]
        row["held_out"] = row["ranks"] not in CALIBRATED
        row["error"] = row["simulated_ms"] / (row["processor_ms"] / CORES) - 1
        row["wall_error"] = row["simulated_ms"] / row["wall_ms"] - 1
    return rows


def curves(costs: Costs) -> list[Row]:
    cases = [
        {"panel": panel, "bucket": name, "topology": topology, "ranks": ranks, "codec": "int4",
         "bytes": GRADIENTS, "bucket_bytes": BUCKETS[name], "chunk_bytes": 0,
         "rate": bits_per_s / 8, "latency_s": LATENCY_S, "cores": 0, "loops": loops, "lanes": lanes}
        for panel, (bits_per_s, loops, lanes) in PANELS.items()
        for name, topology, ranks in itertools.product(BUCKETS, ("flat", "grid"), RANKS)
    ]  # fmt: skip
    rows = simulate(cases, costs)
    for row, case in zip(rows, cases, strict=True):
        row |= {key: case[key] for key in ("panel", "bucket", "topology")}
        row["efficiency"] = row["wire_bytes"] / case["rate"] / row["step_s"]
    return rows


# Output.


def plot(rows: list[Row], path: Path) -> None:
    with harness.picture(path, 1, len(PANELS), figsize=(14, 3.8), sharey=True) as axes:
        for axis, panel in zip(axes, PANELS, strict=True):
            for name, style in zip(BUCKETS, ("--", "-"), strict=True):
                for topology, colour in (("flat", "tab:gray"), ("grid", "tab:blue")):
                    wanted = (panel, name, topology)
                    chosen = [r for r in rows if (r["panel"], r["bucket"], r["topology"]) == wanted]
                    axis.plot(
                        [row["ranks"] for row in chosen], [row["efficiency"] for row in chosen],
                        style, color=colour, marker="o", markersize=3,
                        label=f"{topology}, buckets of {name}",
                    )  # fmt: skip
            axis.axhline(0.9, color="black", linewidth=0.5)
            axis.set_xscale("log", base=2)
            axis.set_xticks(RANKS, [str(n) for n in RANKS], fontsize=8)
            axis.set_xlabel("ranks")
            axis.set_title(panel, fontsize=10)
            axis.grid(alpha=0.3)
        axes[0].set_ylim(0, 1.02)
        axes[0].set_ylabel("time of the bytes / simulated time")
        axes[0].legend(fontsize=8, loc="lower left")


def report(file: Path, folder: Path) -> None:
    """Write scale.json, from which bench.pages makes tables, and the picture."""
    rows = load(file)
    costs = calibrate(rows)
    found = {"costs": costs._asdict(), "measured": hold_against(rows, costs)}
    simulated = curves(costs)
    folder.mkdir(parents=True, exist_ok=True)
    result = harness.source() | found | {"simulated": simulated}
    (folder / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(simulated, folder / "scale.png")


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.scale", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "report"):
        commands.add_parser(name).add_argument("file", type=Path)
    commands.choices["measure"].add_argument("--rounds", type=int, default=3)
    commands.choices["report"].add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file, given.rounds)
    else:
        report(given.file, given.folder)


if __name__ == "__main__":
    main()
