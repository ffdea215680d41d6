"""The time to save and to load the residuals of a model, by its size.

    python bench/checkpoint.py            # 38.9 M elements in 146 parameters, and an eighth of that

Two ranks, as threads of this process, keep int4's residuals of parameters in buckets of 25 MiB. The
last column is a copy of as many bytes in memory. The times grow as the elements do.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from thinwire.comm import Communicator, Segment, Segments
from thinwire.config import Config
from thinwire.torch.exchange import checkpoint

PARAMETERS = 146
SIZES = (38_900_000 // 8, 38_900_000)  # elements
BUCKET = 25 << 18  # elements
TURNS = 5


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


def seconds(call: Callable[[], object]) -> float:
    return timeit.timeit(call, number=1)


def measure(rank: int, elements: int) -> None:
    config = Config(codec="int4", local_group=f"checkpoint{elements}")
    communicator = Communicator(rank, 2, None, "checkpoint", config)
    rows = []
    for _ in range(TURNS):
        reduce_buckets(communicator, elements)
        if rank == 0:
            kept, source = checkpoint.read(communicator, momentum=False), torch.ones(2 * elements)
            rows.append((
                seconds(lambda: checkpoint.read(communicator, momentum=False)),
                seconds(lambda kept=kept: checkpoint.write(communicator, kept)),
                seconds(source.clone),
            ))  # fmt: skip
    if rank == 0:
        save, load, copy = (min(times) for times in zip(*rows, strict=True))
        print(f"{elements / 1e6:9.1f} M {save:8.3f} s {load:8.3f} s {copy:8.3f} s", flush=True)
    communicator.close()


def main() -> None:
    print(f"{PARAMETERS} parameters; best of {TURNS}")
    print("   elements       save       load       copy")
    for elements in [int(size) for size in sys.argv[1:]] or SIZES:
        with ThreadPoolExecutor(2) as ranks:
            list(ranks.map(measure, range(2), [elements] * 2))


if __name__ == "__main__":
    main()
