"""Times training steps under each order of chunks: fifo and wfbp with a barrier in step(), and p3,
under which the next forward pass overlaps with what is still on its way.

    python bench/priority.py [--link 200mbit] [--codec int4] [--batch 40] [--chunk_bytes 1048576]

The model is VGG-like: convolutions that take most of the time and have few parameters, then fully
connected layers with most of them. Batch and link are to be chosen so that communication takes
about as long as computation, which `alone` (no exchange at all) tells. All policies run in the same
processes, in turns; a row has the median over turns of the slowest rank's mean step, with the last
exchange of a turn waited for, and the digest of the weights, which must be equal."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from thinwire.demo import lab
from thinwire.torch import DistributedOptimizer

POLICIES = ("fifo", "wfbp", "p3")
ALONE = "alone"
TURN = 8  # steps
TIMEOUT_S = 900.0
_SETTINGS = ("codec", "batch", "turns", "chunk_bytes", "lanes")


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    channels = 3
    for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
        if width == 0:
            layers.append(torch.nn.MaxPool2d(2))
            continue
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.ReLU()]
        channels = width
    layers += [torch.nn.Flatten(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
    layers += [torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)]
    return torch.nn.Sequential(*layers)


class Subject:
    """A model that is trained under one policy, or alone."""

    def __init__(self, policy: str, codec: str, batch: int, **options: Any) -> None:
        self.model = make_model()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if policy != ALONE:
            self.optimizer = DistributedOptimizer(
                self.optimizer, self.model, codec=codec, policy=policy, timeout_s=120, **options
            )
        self.batch = batch
        self.steps = 0
        self.turns: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.steps + dist.get_rank())
            x = torch.randn(self.batch, 3, 32, 32, generator=generator)
            y = torch.randint(10, (self.batch,), generator=generator)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.steps += 1
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.finish()

    def turn(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.train(TURN)
        seconds = torch.tensor((time.perf_counter() - start) / TURN)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.turns.append(seconds.item())

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for parameter in self.model.parameters():
            hashed.update(parameter.detach().numpy().tobytes())
        return hashed.hexdigest()[:16]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = {"chunk_bytes": arguments.chunk_bytes, "lanes": arguments.lanes}
    subjects = {
        policy: Subject(policy, arguments.codec, arguments.batch, **options)
        for policy in (ALONE, *POLICIES)
    }
    for subject in subjects.values():
        subject.train(2)
    for _ in range(arguments.turns):
        for subject in subjects.values():
            subject.turn()
    rows = []
    for policy, subject in subjects.items():
        quartiles = statistics.quantiles(subject.turns, n=4)
        rows.append({
            "policy": policy,
            "step_ms": 1000 * statistics.median(subject.turns),
            "p25_ms": 1000 * quartiles[0],
            "p75_ms": 1000 * quartiles[2],
            "weights": subject.digest(),
        })  # fmt: skip
        if policy != ALONE:
            subject.optimizer.close()
    return rows


def be_a_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(arguments)
    if dist.get_rank() == 0:
        arguments.rows.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--chunk_bytes", type=int, default=1 << 20)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("build/bench/priority.json"))
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # set in the ranks
    arguments = parser.parse_args()
    if arguments.rows is not None:
        be_a_rank(arguments)
        return 0
    refusal = lab.can_shape()
    if arguments.link != lab.LOOPBACK and refusal:
        print(f"{arguments.link}: skipped, {refusal}")
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        lab.open_lab(arguments.world, arguments.link) as place,
    ):
        rows_file = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--rows", str(rows_file)]
        for key in _SETTINGS:
            command += [f"--{key}", str(getattr(arguments, key))]
        place.run(command, TIMEOUT_S)
        rows = json.loads(rows_file.read_text())
    baseline = next(row["step_ms"] for row in rows if row["policy"] == "fifo")
    for row in rows:
        row["over_fifo"] = baseline / row["step_ms"]
        print(
            f"{row['policy']:>6} {row['step_ms']:8.1f} ms [{row['p25_ms']:.1f}, "
            f"{row['p75_ms']:.1f}] {row['over_fifo']:6.3f} x  weights {row['weights']}"
        )
    setting = {key: getattr(arguments, key) for key in ("world", "link", *_SETTINGS)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**setting, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
