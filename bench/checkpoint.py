"""The time to save and to load the residuals of a model, by its size.

    python bench/checkpoint.py            # 38.9 M elements in 146 parameters, and an eighth of that

Two ranks, as threads of this process, keep int4's residuals of parameters in buckets of 25 MiB. The
last column is a copy of as many bytes in memory. The times grow as the elements do.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from thinwire.comm import Communicator, Segment, Segments
from thinwire.config import Config
from thinwire.torch.exchange import checkpoint

PARAMETERS = 146
SIZES = (38_900_000 // 8, 38_900_000)  # elements
BUCKET = 25 << 18  # elements
TURNS = 5


class MemoryStore:
    """A Store of this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(key)
            return self._values[key]


def reduce_buckets(communicator: Communicator, elements: int) -> None:
    """One allreduce of every bucket, after which each has residuals."""
    each = elements // PARAMETERS
    held = max(1, BUCKET // each)
    for first in range(0, PARAMETERS, held):
        names = range(first, min(first + held, PARAMETERS))
        gradient = torch.randn(len(names) * each)
        segments = Segments([Segment(f"layer{i}.weight", 0, each, each) for i in names])
        work = communicator.start(
            gradient.data_ptr(), gradient.numel(), "float32", "mean", f"bucket{first}", segments
        )
        work.wait()


def timed(call) -> tuple[float, object]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(communicator: Communicator, elements: int) -> None:
    saves, loads, copies = [], [], []
    for _ in range(TURNS):
        reduce_buckets(communicator, elements)
        seconds, kept = timed(lambda: checkpoint.read(communicator, momentum=False))
        saves.append(seconds)
        loads.append(timed(lambda kept=kept: checkpoint.write(communicator, kept))[0])
        source = torch.ones(2 * elements)
        copies.append(timed(source.clone)[0])
    row = [min(times) for times in (saves, loads, copies)]
    print(f"{elements / 1e6:9.1f} M {row[0]:8.3f} s {row[1]:8.3f} s {row[2]:8.3f} s", flush=True)


def rank_of(rank: int, store: MemoryStore, elements: int, done: threading.Barrier) -> None:
    config = Config(codec="int4")
    communicator = Communicator(rank, 2, store, f"checkpoint{elements}", config)
    if rank == 0:
        measure(communicator, elements)
    else:
        for _ in range(TURNS):
            reduce_buckets(communicator, elements)
    done.wait()
    communicator.close()


def main() -> None:
    print(f"{PARAMETERS} parameters; best of {TURNS}")
    print("   elements       save       load       copy")
    for elements in [int(size) for size in sys.argv[1:]] or SIZES:
        store, done = MemoryStore(), threading.Barrier(2)
        ranks = [
            threading.Thread(target=rank_of, args=(rank, store, elements, done))
            for rank in range(2)
        ]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()


if __name__ == "__main__":
    main()
