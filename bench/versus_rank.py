"""One rank of versus.py, with one tree's thinwire: it does a turn when told, and says how long.

    versus_rank.py TREE SOCKET      started by versus.py, which has set the tree's PYTHONPATH

Each line that comes is a JSON list of a subject ("allreduce int4 1048576", "ddp int4" or
"p3 announced int4") and a number of repetitions; the answer is seconds of one repetition. All ranks
get the same lines. A subject is made at its first turn and stays."""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from folder_store import FolderStore

TIMEOUT_S = 120.0
_UNNAMED_BYTES = 65536  # up to here a call has no name, and so no error feedback

Turn = Callable[[int], float]  # repetitions -> seconds of one


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


def ddp(codec: str) -> Turn:
    """The median of steps of ddp_step.py's model."""
    dist = distributed()
    from ddp_step import Subject

    subject = Subject(codec)

    def turn(repeats: int) -> float:
        dist.barrier()
        return statistics.median(subject.step() for _ in range(repeats))

    return turn


def p3(order: str, codec: str) -> Turn:
    """The mean of steps of priority.py's model, with the last exchange waited for."""
    dist = distributed()
    from subjects import Subject

    subject = Subject(
        "vgg", 40, "p3", codec, planned=order == "predicted", chunk_bytes=1 << 20, lanes=4
    )

    def turn(repeats: int) -> float:
        dist.barrier()
        return _timed(lambda: subject.train(repeats)) / repeats

    return turn


@functools.cache
def make(subject: str, folder: Path) -> Turn:
    kind, *options = subject.split()
    if kind == "allreduce":
        return all_reduce(*options, folder)
    return {"ddp": ddp, "p3": p3}[kind](*options)


def main() -> None:
    tree, path = sys.argv[1:]
    sys.path.insert(0, f"{tree}/bench")  # models and hooks of that tree as well
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw")
        for line in lines:
            subject, repeats = json.loads(line)
            print(make(subject, Path(path).parent)(repeats), file=lines, flush=True)
    # Both trees' ranks are done; how each ends is not what is measured here.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
