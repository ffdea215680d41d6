"""Compares two trees of this project, interleaved in one run.

    python -m bench.versus OLD NEW [--only codec,allreduce,ddp,p3] [--filter REGEX] [--rounds N]
                                   [--out build/bench/versus.json]
    python -m bench.versus --rank SOCKET      a rank, with the tree in PYTHONPATH

OLD and NEW are checkouts with a release build in build/. The defaults take about ten minutes on two
quiet cores; --filter chooses the rows whose name matches, for a closer look with more rounds.

codec      each tree's own codec_bench, one operation at a time; its median of 21 repetitions
allreduce  calls through the Python package, one after another, and their median: 1 KiB to 16 MiB,
           fp32 and int4, on loopback, 1 and 10 Gb/s, 2 and 4 ranks; without names up to 64 KiB
ddp        steps of subjects/steps.py's model with int4: 2 ranks, loopback and 1 Gb/s
p3         steps of subjects/priority.py's model with int4: 2 ranks, 200 Mb/s, announced and
           predicted order

Both trees' ranks run at the same time, in the same network namespaces; one tree's ranks take a turn
while the other's wait, in the order A B B A. A turn's time is the slowest rank's. A round is a turn
of each tree; a row has both medians, the median of the rounds' ratios new/old, and their middle
half. A ratio above 1.03 is marked SLOWER, or unclear if the middle half reaches 1. Shaped links
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
import timeit
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NamedTuple

from bench import harness, lab
from bench.folder_store import FolderStore

CODEC_OPERATIONS = (
    r"((encode_ef|decode|decode_add|reduce_requant)/(int8|int4|onebit)|select/topk)"
    r"/(65536|1048576|67108864)/"
)
SIZES = {"1 KiB": 10, "16 KiB": 14, "256 KiB": 18, "1 MiB": 20, "4 MiB": 22, "16 MiB": 24}
SLOWER = 1.03  # larger ratios are marked
WARM_UP, MOST_REPEATS = 3, 200
START_S, TURN_S = 60.0, 120.0  # deadlines
_UNNAMED_BYTES = 65536  # calls up to this size have no name, and so no error feedback

Turn = Callable[[int], float]  # repetitions -> seconds of one
Trees = tuple[Path, Path]  # old and new


class Row(NamedTuple):
    name: str
    subject: str  # as make() takes it
    world: int
    link: str
    seconds: float  # approximately, of a turn; at least one repetition
    rounds: int


def rows() -> list[Row]:
    """Return the rows that ranks measure; those of a lab are adjacent."""
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


def compare(name: str, old: Callable[[], float], new: Callable[[], float], rounds: int) -> None:
    """Measure `rounds` turns of each, in the order A B B A; print the row and keep it."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for who in (0, 1) if number % 2 == 0 else (1, 0):
            times[who].append((old, new)[who]())
    ratios = [b / a for a, b in zip(*times, strict=True)]
    middle = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    row = {"name": name, "ratios": ratios} | dict(
        zip(("low", "ratio", "high"), middle, strict=True)
    )
    row["old_ms"], row["new_ms"] = (1e3 * statistics.median(each) for each in times)
    slower = (
        "SLOWER" if row["low"] > 1.0 else "unclear"
    )  # it requires more rounds, on a quieter machine
    row["verdict"] = slower if row["ratio"] > SLOWER else ""
    keep(row, "{old_ms:9.4f} {new_ms:9.4f}  {ratio:7.3f} [{low:.3f}, {high:.3f}] {verdict}")


kept: list[harness.Row] = []


def keep(row: harness.Row, form: str) -> None:
    kept.append(row)
    print(f"{row['name']:45s} {form.format_map(row)}", flush=True)


def run_codecs(trees: Trees, wanted: Callable[[str], bool], rounds: int | None) -> None:
    def run(tree: Path, *options: str) -> str:
        command = [tree / "build/bench/codec_bench", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def seconds(tree: Path, name: str) -> float:
        only = f"--benchmark_filter=^{re.escape(name)}$"
        found = json.loads(run(tree, only, "--benchmark_format=json"))
        return found["benchmarks"][0]["real_time"] * 1e-9

    try:
        names = [run(tree, "--benchmark_list_tests").split() for tree in trees]
    except (OSError, subprocess.CalledProcessError) as error:
        return keep({"name": "codec", "failed": str(error)}, "failed: {failed}")
    for name in filter(
        functools.partial(re.match, CODEC_OPERATIONS), dict.fromkeys(itertools.chain(*names))
    ):
        operation, spec, size = name.split("/")[:3]
        label = f"codec {operation} {spec} {int(size) >> 10} KiB"
        if not wanted(label):
            continue
        if all(name in some for some in names):
            turns = (functools.partial(seconds, tree, name) for tree in trees)
            compare(label, *turns, rounds or (3 if int(size) > 1 << 20 else 5))
        else:
            keep({"name": label, "skipped": "only one tree has it"}, "skipped: {skipped}")


def run_ranks(trees: Trees, wanted: Callable[[str], bool], rounds: int | None) -> None:
    refusal = lab.can_shape()
    all_ = (row for row in rows() if wanted(row.name))
    for (world, link), group in itertools.groupby(all_, lambda row: (row.world, row.link)):
        left = list(group)
        try:
            if link != lab.LOOPBACK and refusal:
                raise PermissionError(refusal)
            with open_teams(trees, world, link) as pair:
                while left:
                    row = left[0]
                    once = max([team.turn(row.subject, WARM_UP) for team in pair * 2][2:])
                    repeats = max(1, min(MOST_REPEATS, round(row.seconds / once)))
                    turns = (functools.partial(t.turn, row.subject, repeats) for t in pair)
                    compare(row.name, *turns, rounds or row.rounds)
                    left.pop(0)
        except (RuntimeError, OSError, EOFError) as error:
            why = "skipped" if isinstance(error, PermissionError) else "failed"
            for row in left:
                keep({"name": row.name, why: str(error)}, f"{why}: {{{why}}}")


# The ranks of both trees, in one lab.


class Team:
    """One tree's ranks in a lab. RuntimeError after a rank has failed; its output is on stderr."""

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
        self._pipes = []
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(place.world)
            server.settimeout(START_S)
            self._ranks = threading.Thread(target=self._run, args=(place, command), daemon=True)
            self._ranks.start()
            for _ in range(place.world):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                self._pipes.append(Connection(accepted.detach()))

    def _run(self, place: lab.Lab, command: list[str]) -> None:
        try:
            place.run(command, 3600.0)
        except RuntimeError as error:
            print(f"{self._tree}: {error}", file=sys.stderr)

    def turn(self, subject: str, repeats: int) -> float:
        """Return the seconds of one repetition on the slowest rank."""
        for pipe in self._pipes:
            pipe.send((subject, repeats))
        if not all(pipe.poll(TURN_S) for pipe in self._pipes):
            raise RuntimeError(f"a rank of {self._tree} gave no answer")
        return max(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._ranks.join(START_S)
        self._folder.cleanup()


@contextlib.contextmanager
def open_teams(trees: Trees, world: int, link: str) -> Iterator[list[Team]]:
    """Yield the ranks of both trees, in one lab. RuntimeError if the system or a tree fails."""
    with lab.open_lab(world, link) as place, contextlib.ExitStack() as stack:
        started = []
        for port, tree in enumerate(trees, lab.PORT):
            started.append(Team(tree, place, port))
            stack.callback(started[-1].close)
        yield started


# A rank, with one tree's thinwire.


@functools.cache
def communicator(codec: str, folder: Path):
    from thinwire.comm import Communicator
    from thinwire.config import resolve

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = resolve(codec=codec, timeout_s=TURN_S)
    return Communicator(rank, world, FolderStore(folder), f"versus-{codec}", config)


def all_reduce(codec: str, size: str, folder: Path) -> Turn:
    """Return a turn: the median of successive calls with `size` bytes of float32."""
    import numpy

    comm, count = communicator(codec, folder), int(size) // 4
    generator = numpy.random.default_rng(int(os.environ["RANK"]))
    values = generator.standard_normal(count, dtype=numpy.float32)

    def once() -> None:
        if int(size) <= _UNNAMED_BYTES:
            comm.all_reduce(values.ctypes.data, count, "float32", "mean")
        else:
            comm.start(values.ctypes.data, count, "float32", "mean", size).wait()

    def turn(repeats: int) -> float:
        once()  # as a barrier
        return statistics.median(timeit.repeat(once, number=1, repeat=repeats))

    return turn


def steps(kind: str, *options: str) -> Turn:
    """Return a turn: the median of a subject's steps. The subject lives as long as the rank."""
    import torch
    import torch.distributed as dist

    from bench.subjects import priority
    from bench.subjects import steps as models

    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if kind == "ddp":
        subject = models.ddp(*options)
    else:
        order, _ = options  # priority.order() has one codec
        subject = priority.order("p3 planned" if order == "predicted" else "p3")
    turn = subject.__enter__()

    def again(repeats: int) -> float:
        dist.barrier()
        return statistics.median(turn(repeats))

    return again


@functools.cache
def make(subject: str, folder: Path) -> Turn:
    kind, *options = subject.split()
    return all_reduce(*options, folder) if kind == "allreduce" else steps(kind, *options)


def be_rank(path: str) -> None:
    """Answer each (subject, repetitions), such as ("allreduce int4 1048576", 9), "ddp int4" or
    "p3 announced int4", with the seconds of one repetition. All ranks get the same requests. A
    subject is created at its first turn, and kept."""
    with Client(path) as pipe, contextlib.suppress(EOFError):
        while True:
            subject, repeats = pipe.recv()
            pipe.send(make(subject, Path(path).parent)(repeats))
    # Both trees' ranks are done; their exit is not measured.
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        be_rank(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=lambda path: Path(path).resolve())
    parser.add_argument("new", type=lambda path: Path(path).resolve())
    parser.add_argument("--only", default="codec,allreduce,ddp,p3", type=lambda s: s.split(","))
    parser.add_argument("--filter", default="", help="regular expression of rows' names")
    parser.add_argument("--rounds", type=int, help="of every row; default: 3 to 11")
    parser.add_argument("--out", type=Path, default=Path("build/bench/versus.json"))
    given = parser.parse_args()

    def wanted(name: str) -> bool:
        return name.split()[0] in given.only and bool(re.search(given.filter, name))

    print(f"{'':45s} {'old ms':>9s} {'new ms':>9s}  new/old [middle half]")
    if "codec" in given.only:
        run_codecs((given.old, given.new), wanted, given.rounds)
    run_ranks((given.old, given.new), wanted, given.rounds)
    if ratios := [row["ratio"] for row in kept if "ratio" in row]:
        print(
            f"{len(ratios)} rows, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}; "
            f"{sum(ratio > SLOWER for ratio in ratios)} above {SLOWER}"
        )
    harness.write(given.out, kept)
    return int(any("failed" in row for row in kept))


if __name__ == "__main__":
    sys.exit(main())
