"""What an option costs: steps with and without it in one run, in turns, as ratios of pairs.

    python bench/option_cost.py recoverable | check_replicas [--world 2] [--steps 200]

Every rank is a process on this machine, over loopback; each way has its own exchange. A pair is a
step with the option and one without, in changing order; printed are the median ratio and its
quartiles. check_replicas compares every step here; with check_replicas=100 a hundredth of what it
adds is left."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from thinwire.torch import GradientExchange

CASES = ((1 << 20, "int4"), (25 << 20, "int4"), (25 << 20, "int8"), (25 << 20, "topk:density=0.01"))
# Option -> (with, without).
OPTIONS = {"recoverable": (True, False), "check_replicas": (1, 0)}
WARM_UP = 3


class Subject:
    def __init__(self, codec: str, numel: int, options: dict[str, object]) -> None:
        options = {"recoverable": False, **options}
        self._exchange = GradientExchange(codec, min_bytes=0, **options)
        self._bucket = self._exchange.bucket("bucket", [("p", numel)], torch.float32)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._gradient = torch.randn(numel, generator=generator)
        self._buffer = torch.empty(numel)

    def seconds(self) -> float:
        """Of a step's exchange alone."""
        self._buffer.copy_(self._gradient)
        dist.barrier()
        start = time.perf_counter()
        self._exchange.wait(self._exchange.submit(self._bucket, self._buffer))
        spent = time.perf_counter() - start
        self._exchange.end_step()
        return spent


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world
    )
    on, off = OPTIONS[args.option]
    for size, codec in CASES:
        subjects = [Subject(codec, size // 4, {args.option: value}) for value in (on, off)]
        ratios, times = [], []
        for number in range(-WARM_UP, args.steps):
            order = (0, 1) if number % 2 else (1, 0)
            spent = dict.fromkeys(order, 0.0)
            for which in order:
                spent[which] = subjects[which].seconds()
            if number >= 0:
                ratios.append(spent[0] / spent[1])
                times.append(spent[1])
        if rank == 0:
            low, middle, high = statistics.quantiles(ratios, n=4)
            without = f"{1e3 * statistics.median(times):8.2f} ms without"
            spread = f"quartiles {low:.3f} to {high:.3f} of {len(ratios)} pairs"
            print(f"{size >> 20:3} MiB {codec:18} {without}; with: {middle:.3f} times, {spread}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("option", choices=sorted(OPTIONS))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="of each way and case")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args, folder), nprocs=args.world)


if __name__ == "__main__":
    main()
