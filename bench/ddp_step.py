"""Times a DDP step with each way of exchanging gradients, on links of several rates.

    python bench/ddp_step.py [--world 2] [--links 1gbit,100mbit,10gbit] [--out build/bench/ddp.json]

The model is 4 x Linear 1024 x 1024 without bias (16.8 MB of gradients), batch 2, one thread a rank.
All ways run in the same processes, in turns of a few steps, so that they see the same machine; a
row has the median of the slowest rank's steps and the spread (10th and 90th percentile). Links
other than loopback need root (network namespaces); without it those rows are printed as skipped."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lab_ranks
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab
from demo.exchange import WAYS, Exchange

WIDTH, LAYERS, BATCH = 1024, 4, 2
WARM_UP = 3  # steps: DDP rebuilds its buckets in the second
TURN = 5  # steps of one way before the next way's turn
TIMEOUT_S = 600.0
POWER_SGD = "powersgd"  # torch's hook, rank 1
ALONE = "alone"  # no exchange: what is left of a step when exchanging costs nothing
ALL_WAYS = (*WAYS[:-1], "onebit:down=onebit", "topk:density=0.01", ALONE, POWER_SGD)
# torch's PowerSGD gives no answer on Gloo over the fast shaped links.
POWER_SGD_LINKS = ("100mbit", lab.LOOPBACK)


def _keep(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that leaves the bucket as it is."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_keep.__annotations__ = {}  # DDP wants types there, and this file postpones them


class Subject:
    """A model that exchanges its gradients in one way."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        # With more than one bucket torch's PowerSGD hangs on Gloo: the buckets' allreduces start in
        # callbacks, in another order on every rank.
        options = {"bucket_cap_mb": 100} if way == POWER_SGD else {}
        self.ddp = DistributedDataParallel(torch.nn.Sequential(*layers), **options)
        self.exchange = None
        if way == POWER_SGD:
            power = PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=True
            )
            self.ddp.register_comm_hook(power, powerSGD_hook)
        elif way == ALONE:
            self.ddp.register_comm_hook(None, _keep)
        else:
            optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
            self.exchange = Exchange(self.ddp, way, optimizer)
        self.times: list[float] = []

    def step(self) -> float:
        """Seconds of forward and backward."""
        start = time.perf_counter()
        self.ddp.zero_grad()
        self.ddp(torch.randn(BATCH, WIDTH)).square().mean().backward()
        return time.perf_counter() - start

    def turn(self) -> None:
        dist.barrier()
        for _ in range(TURN):
            seconds = torch.tensor(self.step())
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            self.times.append(seconds.item())


def measure(ways: list[str], steps: int) -> list[dict[str, Any]]:
    subjects = {way: Subject(way) for way in ways}
    for subject in subjects.values():
        for _ in range(WARM_UP):
            subject.step()
    for _ in range(-(-steps // TURN)):
        for subject in subjects.values():
            subject.turn()
    rows = []
    for way, subject in subjects.items():
        if subject.exchange is not None:
            subject.exchange.close()
        deciles = statistics.quantiles(subject.times, n=10)
        rows.append({
            "codec": way,
            "step_ms": 1000 * statistics.median(subject.times),
            "p10_ms": 1000 * deciles[0],
            "p90_ms": 1000 * deciles[-1],
            "steps": len(subject.times),
        })  # fmt: skip
    return rows


def run_link(arguments: argparse.Namespace, link: str) -> list[dict[str, Any]]:
    """No rows where the link can't be made."""
    ways = [way for way in arguments.ways.split() if way != POWER_SGD or link in POWER_SGD_LINKS]
    options = {"ways": " ".join(ways), "steps": arguments.steps}
    rows = lab_ranks.run(__file__, arguments.world, link, options, TIMEOUT_S) or []
    return [
        {"link": link, "world": arguments.world, "speedup": rows[0]["step_ms"] / row["step_ms"]}
        | row
        for row in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--links", default="1gbit,100mbit,10gbit,loopback")
    parser.add_argument("--ways", default=" ".join(ALL_WAYS), help="the first is the baseline")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each way")
    parser.add_argument("--out", type=Path, default=Path("build/bench/ddp_step.json"))
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, lambda: measure(arguments.ways.split(), arguments.steps))
    rows: list[dict[str, Any]] = []
    for link in arguments.links.split(","):
        measured = run_link(arguments, link)
        for row in measured:
            print(
                f"{row['link']:>9} {row['codec']:>18} {row['step_ms']:9.1f} ms "
                f"[{row['p10_ms']:.1f}, {row['p90_ms']:.1f}] {row['speedup']:6.2f} x",
                flush=True,
            )
        rows += measured
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
