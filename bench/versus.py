"""One tree of this project against another, interleaved in one run.

    python -m bench.versus OLD NEW [--only codec,allreduce,ddp,p3] [--filter REGEX] [--rounds N]
                                   [--out build/bench/versus.json]
    python -m bench.versus --rank SOCKET      a rank, with the tree in PYTHONPATH

OLD and NEW are checkouts with a release build in build/. The defaults take about ten minutes on two
quiet cores; --filter takes the rows whose name has a match, for a closer look with more rounds.

codec      each tree's own codec_bench, one operation at a time; its median of 21 repetitions
allreduce  calls through the Python package, one after another, and their median: 1 KiB to 16 MiB,
           fp32 and int4, on loopback, 1 and 10 Gb/s, 2 and 4 ranks; without names up to 64 KiB
ddp        steps of subjects/steps.py's model with int4: 2 ranks, loopback and 1 Gb/s
p3         steps of subjects/priority.py's model with int4: 2 ranks, 200 Mb/s, announced and
           predicted order

Both trees' ranks live at the same time, in the same network namespaces; one tree's take a turn
while the other's wait, in the order A B B A. A turn's time is the slowest rank's. A round is a turn
of each tree; a row has both medians, the median of the rounds' ratios new/old, and their middle
half. A ratio above 1.03 is marked SLOWER, or unclear where the middle half reaches 1. Shaped links
need root; without it those rows are skipped, with the reason. The exit status is 1 if a row could
not be measured because a tree failed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, lab
from bench.folder_store import FolderStore

CODEC_OPERATIONS = (
    r"((encode_ef|decode|decode_add|reduce_requant)/(int8|int4|onebit)|select/topk)"
    r"/(65536|1048576|67108864)/"
)
SIZES = {"1 KiB": 10, "16 KiB": 14, "256 KiB": 18, "1 MiB": 20, "4 MiB": 22, "16 MiB": 24}
SLOWER = 1.03  # a ratio above is marked
WARM_UP, MOST_REPEATS = 3, 200

START_S, TURN_S = 60.0, 120.0  # deadlines
_PORT = 29500  # of the first tree's rendezvous in a lab
TIMEOUT_S = 120.0
_UNNAMED_BYTES = 65536  # up to here a call has no name, and so no error feedback

Turn = Callable[[int], float]  # repetitions -> seconds of one
Turns = tuple[Callable[[], float], Callable[[], float]]  # of old and new: seconds


class Row(NamedTuple):
    name: str
    subject: str  # of make()
    world: int
    link: str
    seconds: float  # of a turn, about; at least one repetition
    rounds: int


def rows() -> list[Row]:
    """Those that ranks measure; the ones of a lab stand together."""
    found = []
    for world, link in itertools.product((2, 4), (lab.LOOPBACK, "1gbit", "10gbit")):
        for codec, (size, bits) in itertools.product(("fp32", "int4"), SIZES.items()):
            name = f"allreduce {codec} {size}, {world} ranks, {link}"
            found.append(Row(name, f"allreduce {codec} {1 << bits}", world, link, 0.12, 11))
        if world == 2 and link != "10gbit":
            found.append(Row(f"ddp int4, 2 ranks, {link}", "ddp int4", 2, link, 0.3, 11))
    for order in ("announced", "predicted"):
        name = f"p3 {order} int4, 2 ranks, 200mbit"
        found.append(Row(name, f"p3 {order} int4", 2, "200mbit", 1.2, 9))
    return found


def turns_of(pair: list[Team], row: Row) -> Turns:
    """Both warm, and with the same number of repetitions."""
    for team in pair:
        team.turn(row.subject, WARM_UP)
    once = max(team.turn(row.subject, WARM_UP) for team in pair)
    repeats = max(1, min(MOST_REPEATS, round(row.seconds / once)))
    old, new = (lambda team=team: team.turn(row.subject, repeats) for team in pair)
    return old, new


def codec_seconds(tree: Path, name: str) -> float:
    command = [tree / "build/bench/codec_bench", f"--benchmark_filter=^{re.escape(name)}$"]
    done = subprocess.run(
        [*command, "--benchmark_format=json"], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)["benchmarks"][0]["real_time"] * 1e-9


def codec_names(tree: Path) -> list[str]:
    command = [tree / "build/bench/codec_bench", "--benchmark_list_tests"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in listed if re.match(CODEC_OPERATIONS, name)]


def compare(name: str, turns: Turns, rounds: int) -> dict[str, Any]:
    """`rounds` turns of each, in the order A B B A."""
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for who in (0, 1) if number % 2 == 0 else (1, 0):
            times[who].append(turns[who]())
    old, new = times
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    many = rounds > 1
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive") if many else ratios * 3
    return {
        "name": name,
        "old_ms": 1e3 * statistics.median(old),
        "new_ms": 1e3 * statistics.median(new),
        "ratio": ratio,
        "low": low,
        "high": high,
        "ratios": ratios,
    }


def verdict(row: dict[str, Any]) -> str:
    """Empty if the row is fast enough; "unclear" asks for more rounds on a quieter machine."""
    if row["ratio"] <= SLOWER:
        return ""
    return "SLOWER" if row["low"] > 1.0 else "unclear"


class Report:
    """Prints each row as it comes, and keeps it for the file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(f"{'':45s} {'old ms':>9s} {'new ms':>9s}  new/old [middle half]")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(
            f"{row['name']:45s} {row['old_ms']:9.4f} {row['new_ms']:9.4f}  {row['ratio']:7.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}] {verdict(row)}",
            flush=True,
        )

    def leave_out(self, name: str, why: str, reason: str) -> None:
        """why: "skipped" or "failed"."""
        self.rows.append({"name": name, why: reason})
        print(f"{name:45s} {why}: {reason}", flush=True)

    def failed(self) -> bool:
        return any("failed" in row for row in self.rows)

    def summary(self) -> None:
        ratios = [row["ratio"] for row in self.rows if "ratio" in row]
        if ratios:
            print(
                f"{len(ratios)} rows, median {statistics.median(ratios):.3f}, most "
                f"{max(ratios):.3f}; {sum(ratio > SLOWER for ratio in ratios)} above {SLOWER}"
            )


def run_codecs(arguments: argparse.Namespace, report: Report) -> None:
    trees = (arguments.old, arguments.new)
    try:
        names = [codec_names(tree) for tree in trees]
    except (OSError, subprocess.CalledProcessError) as error:
        return report.leave_out("codec", "failed", str(error))
    for name in dict.fromkeys([*names[0], *names[1]]):
        operation, spec, size = name.split("/")[:3]
        label = f"codec {operation} {spec} {int(size) >> 10} KiB"
        if not re.search(arguments.filter, label):
            continue
        if not all(name in some for some in names):
            report.leave_out(label, "skipped", "only one of the trees has it")
            continue
        old, new = (lambda tree=tree, name=name: codec_seconds(tree, name) for tree in trees)
        rounds = 3 if int(size) > 1 << 20 else 5
        report.add(compare(label, (old, new), arguments.rounds or rounds))


def run_ranks(arguments: argparse.Namespace, report: Report) -> None:
    wanted = [
        row
        for row in rows()
        if row.name.split()[0] in arguments.only and re.search(arguments.filter, row.name)
    ]
    refusal = lab.can_shape()
    for (world, link), group in itertools.groupby(wanted, lambda row: (row.world, row.link)):
        if link != lab.LOOPBACK and refusal:
            for row in group:
                report.leave_out(row.name, "skipped", refusal)
            continue
        left = list(group)
        try:
            with open_teams((arguments.old, arguments.new), world, link) as pair:
                while left:
                    turns = turns_of(pair, left[0])
                    rounds = arguments.rounds or left[0].rounds
                    report.add(compare(left[0].name, turns, rounds))
                    left.pop(0)
        except (RuntimeError, OSError) as error:
            for row in left:
                report.leave_out(row.name, "failed", str(error))


# The ranks of both trees beside each other, in one lab.


class Team:
    """One tree's ranks in a lab. RuntimeError once a rank has failed; its words are on stderr."""

    def __init__(self, tree: Path, place: lab.Lab, port: int) -> None:
        self._tree = tree
        self._folder = tempfile.TemporaryDirectory()
        path = f"{self._folder.name}/turns"
        settings = [
            f"PYTHONPATH={tree}:{tree}/integrations/python",
            f"THINWIRE_LIBRARY={tree}/build/integrations/c/libthinwire.so",
        ]
        if place.link != lab.LOOPBACK:  # there the lab has chosen a free port
            settings.append(f"MASTER_PORT={port}")
        command = ["env", *settings, sys.executable, "-m", "bench.versus", "--rank", path]
        self._lines = []
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(place.world)
            server.settimeout(START_S)
            self._ranks = threading.Thread(target=self._run, args=(place, command), daemon=True)
            self._ranks.start()
            for _ in range(place.world):
                connection, _ = server.accept()
                connection.settimeout(TURN_S)
                self._lines.append(connection.makefile("rw"))
                connection.close()  # the file keeps it open

    def _run(self, place: lab.Lab, command: list[str]) -> None:
        try:
            place.run(command, 3600.0)
        except RuntimeError as error:
            print(f"{self._tree}: {error}", file=sys.stderr)

    def turn(self, subject: str, repeats: int) -> float:
        """Seconds of one repetition, on the slowest rank."""
        try:
            for lines in self._lines:
                print(json.dumps([subject, repeats]), file=lines, flush=True)
            return max(float(lines.readline()) for lines in self._lines)
        except (OSError, ValueError) as error:  # an empty line: the rank is no more
            raise RuntimeError(f"a rank of {self._tree} gave no answer: {error}") from error

    def close(self) -> None:
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.close()
        self._ranks.join(START_S)
        self._folder.cleanup()


@contextlib.contextmanager
def open_teams(trees: tuple[Path, Path], world: int, link: str) -> Iterator[list[Team]]:
    """The ranks of both trees, in one lab. RuntimeError if the system or a tree refuses."""
    with lab.open_lab(world, link) as place, contextlib.ExitStack() as stack:
        started = []
        for number, tree in enumerate(trees):
            started.append(Team(tree, place, _PORT + number))
            stack.callback(started[-1].close)
        yield started


# A rank, with one tree's thinwire.


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@functools.cache
def communicator(codec: str, folder: Path):
    from thinwire.comm import Communicator
    from thinwire.config import resolve

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = resolve(codec=codec, timeout_s=TIMEOUT_S)
    return Communicator(rank, world, FolderStore(folder), f"versus-{codec}", config)


def all_reduce(codec: str, size: str, folder: Path) -> Turn:
    """The median of calls that follow one another, of `size` bytes of float32."""
    import numpy

    comm, count = communicator(codec, folder), int(size) // 4
    generator = numpy.random.default_rng(int(os.environ["RANK"]))
    values = generator.standard_normal(count, dtype=numpy.float32)
    address = values.ctypes.data

    def once() -> None:
        if int(size) <= _UNNAMED_BYTES:
            comm.all_reduce(address, count, "float32", "mean")
        else:
            comm.start(address, count, "float32", "mean", size).wait()

    def turn(repeats: int) -> float:
        assert values.size == count  # the closure keeps the memory
        once()  # as a barrier
        return statistics.median(_timed(once) for _ in range(repeats))

    return turn


@functools.cache
def distributed():
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist


def steps(subject: contextlib.AbstractContextManager[harness.Turn]) -> Turn:
    """The median of a subject's steps; it lives as long as the rank."""
    dist = distributed()
    turn = subject.__enter__()

    def again(repeats: int) -> float:
        dist.barrier()
        return statistics.median(turn(repeats))

    return again


def ddp(codec: str) -> Turn:
    distributed()
    from bench.subjects import steps as models

    return steps(models.ddp(codec))


def p3(order: str, codec: str) -> Turn:
    distributed()
    from bench.subjects import priority

    return steps(priority.order("p3 planned" if order == "predicted" else "p3", codec))


@functools.cache
def make(subject: str, folder: Path) -> Turn:
    kind, *options = subject.split()
    if kind == "allreduce":
        return all_reduce(*options, folder)
    return {"ddp": ddp, "p3": p3}[kind](*options)


def be_rank(path: str) -> int:
    """Does a turn for each line that comes: a JSON list of a subject ("allreduce int4 1048576",
    "ddp int4" or "p3 announced int4") and a number of repetitions. The answer is seconds of one
    repetition. All ranks get the same lines. A subject is made at its first turn and stays."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw")
        for line in lines:
            subject, repeats = json.loads(line)
            print(make(subject, Path(path).parent)(repeats), file=lines, flush=True)
    # Both trees' ranks are done; how each ends is not measured here.
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        return be_rank(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=lambda path: Path(path).resolve())
    parser.add_argument("new", type=lambda path: Path(path).resolve())
    parser.add_argument("--only", default="codec,allreduce,ddp,p3", type=lambda s: s.split(","))
    parser.add_argument("--filter", default="", help="regular expression of rows' names")
    parser.add_argument("--rounds", type=int, help="of every row; default: 3 to 11")
    parser.add_argument("--out", type=Path, default=Path("build/bench/versus.json"))
    arguments = parser.parse_args()
    report = Report()
    if "codec" in arguments.only:
        run_codecs(arguments, report)
    run_ranks(arguments, report)
    report.summary()
    harness.write(arguments.out, report.rows)
    return 1 if report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
