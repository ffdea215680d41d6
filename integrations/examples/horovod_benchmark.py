"""A benchmark for Horovod: random data, and images a second of all ranks. One line differs.

torchrun --nproc-per-node 2 integrations/examples/horovod_benchmark.py [--compression int4]"""

from __future__ import annotations

import argparse
import statistics
import timeit

import thinwire.horovod as hvd  # was: import horovod.torch as hvd
import torch
from torch import nn


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=2, help="batches that are not counted")
    parser.add_argument("--batches", type=int, default=3, help="in an iteration")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--compression", default="none", help="none, fp16, int8, int4")
    arguments = parser.parse_args()

    hvd.init()
    width = arguments.width
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, arguments.compression),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data, target = torch.randn(arguments.batch, width), torch.randint(1000, (arguments.batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    log(f"batch {arguments.batch}, {hvd.size()} ranks, compression {arguments.compression}")
    timeit.timeit(step, number=arguments.warm_up)
    rates = []
    for number in range(arguments.iterations):
        seconds = timeit.timeit(step, number=arguments.batches)
        rates.append(arguments.batch * arguments.batches / seconds)
        log(f"iteration {number}: {rates[-1]:.1f} images/s on this rank")
    mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    total = hvd.allreduce(torch.tensor(mean), op=hvd.Sum, name="images a second").item()
    log(f"on this rank {mean:.1f} +-{spread:.1f} images/s, on {hvd.size()} ranks {total:.1f}")


if __name__ == "__main__":
    main()
