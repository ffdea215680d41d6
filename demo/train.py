"""One rank of the demo: trains the model once for each way of exchanging gradients.

demo/run.py starts it with torchrun's variables. Rank 0 prints a line of the table for each way, and
writes all rows as JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from demo import data
from demo.exchange import Exchange

_WIDTH = 1024
_MOMENTUM = 0.9
_WARM_UP = 20  # steps not in the median: DDP rebuilds its buckets, connections speed up
_TAIL = 100  # last steps, whose mean is the training loss


@dataclass(frozen=True)
class Recipe:
    epochs: int
    batch: int  # images per rank and step
    rate: float  # learning rate at the start
    seed: int

    def steps(self, images: int) -> int:
        return self.epochs * (images // (self.batch * dist.get_world_size()))


def make_model() -> torch.nn.Sequential:
    """1.9 million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(data.PIXELS, _WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(_WIDTH, _WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(_WIDTH, data.CLASSES),
    )


def batches(images: int, recipe: Recipe):
    """This rank's row numbers for every step; together the ranks see each image once an epoch."""
    generator = torch.Generator().manual_seed(recipe.seed)
    whole = recipe.batch * dist.get_world_size()
    for _ in range(recipe.epochs):
        order = torch.randperm(images, generator=generator)
        for begin in range(0, images - whole + 1, whole):
            yield order[begin + dist.get_rank() : begin + whole : dist.get_world_size()]


def train(way: str, images: data.Images, recipe: Recipe) -> dict[str, Any]:
    """Train from the seed; return a row of the report, except the cells that need other rows."""
    torch.manual_seed(recipe.seed)
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=recipe.rate, momentum=_MOMENTUM)
    exchange = Exchange(ddp, way, optimizer)
    steps = recipe.steps(len(images))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    losses, times = [], []
    bar = tqdm(
        batches(len(images), recipe), way, steps, unit="step", disable=dist.get_rank() != 0,
        mininterval=0.5 if sys.stderr.isatty() else 10.0, leave=False,
    )  # fmt: skip
    for rows in bar:
        start = time.perf_counter()
        pixels, labels = images.batch(rows)
        loss = cross_entropy(ddp(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        schedule.step()
        losses.append(loss.detach())
        if len(losses) % 20 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.3f}", ms=f"{1000 * times[-1]:.0f}", refresh=False)
    raw, wire = exchange.bytes_sent(steps)
    exchange.close()
    loss = torch.stack(losses[-_TAIL:]).mean()
    dist.all_reduce(loss)
    if not replicas_identical(model):
        raise SystemExit(f"{way}: the replicas differ after {steps} steps")
    return {
        "codec": way,
        "loss": loss.item() / dist.get_world_size(),
        "step_ms": 1000 * statistics.median(times[_WARM_UP:] or times),
        "wire_bytes": wire,
        "raw_bytes": raw,
        "ratio": raw / wire if wire else 1.0,
        "accuracy": accuracy(model, data.load("t10k")),
    }


_COLUMNS = {
    "codec": 30, "test accuracy": 14, "training loss": 14, "ms per step": 12, "speed-up": 9,
    "MB sent": 8, "less by": 8,
}  # fmt: skip


def table_head() -> str:
    head = "".join(title.rjust(width) for title, width in list(_COLUMNS.items())[1:])
    return f"{'codec':30}{head}\n{'-' * sum(_COLUMNS.values())}"


def table_line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A way's line; after the first line, accuracy is the difference to the first way's."""
    accuracy = row["accuracy"]
    cells = [
        f"{accuracy:.1f} %" if row is first else f"{accuracy - first['accuracy']:+.1f}",
        f"{row['loss']:.3f}",
        f"{row['step_ms']:.1f}",
        f"{first['step_ms'] / row['step_ms']:.2f} x",
        f"{row['wire_bytes'] / 1e6:.0f}",
        f"{row['ratio']:.1f} x",
    ]
    widths = list(_COLUMNS.values())[1:]
    return f"{row['codec']:30}" + "".join(map(str.rjust, cells, widths))


def replicas_identical(model: torch.nn.Module) -> bool:
    """True if the parameters have the same bits on all ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: data.Images) -> float:
    """The accuracy in percent."""
    hits = 0
    for rows in torch.arange(len(images)).split(1000):
        pixels, labels = images.batch(rows)
        hits += int((model(pixels).argmax(1) == labels).sum())
    return 100 * hits / len(images)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", required=True, help="separated by spaces")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe = Recipe(arguments.epochs, arguments.batch, arguments.lr, arguments.seed)
    images = data.load("train")
    leads = dist.get_rank() == 0
    if leads:
        print(table_head(), flush=True)
    rows: list[dict[str, Any]] = []
    for way in arguments.ways.split():
        rows.append(train(way, images, recipe))
        if leads:
            print(table_line(rows[-1], rows[0]), flush=True)
    if leads:
        arguments.rows.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
