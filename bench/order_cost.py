"""The cost of the leader's order: a small tensor as a chunk, which is reported and announced before
its two exchanges, against the same tensor raw, which is one exchange and no more.

    python bench/order_cost.py [--worlds 2,4,8] [--out build/bench/order_cost.json]

A burst is 32 such tensors submitted at once, as backward does: reports and announcements then share
frames, and travel beside other chunks' bytes. Over loopback; medians of all repetitions, and the
slowest rank's."""

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
from thinwire import config
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Membership

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab

NUMEL = 1024
BURST = 32
REPEATS = 60
TIMEOUT_S = 300.0


def seconds(session: Session, tensors: list[torch.Tensor]) -> float:
    """Seconds of an allreduce of all of them, each under its own name."""
    buckets = [Bucket(f"tensor {i}", tensor.numel(), "float32") for i, tensor in enumerate(tensors)]
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        works = [
            session.submit(bucket, tensor) for bucket, tensor in zip(buckets, tensors, strict=True)
        ]
        for work in works:
            session.complete(work)
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times)


def measure() -> dict[str, float]:
    tensors = [torch.randn(NUMEL) for _ in range(BURST)]
    found = {}
    for name, min_bytes in {"chunk": 0, "raw": 1 << 30}.items():
        settings = config.resolve(codec="fp32", policy="p3", min_bytes=min_bytes)
        session = Session(Membership(None, "order"), settings)
        found[f"{name}_s"] = seconds(session, tensors[:1])
        found[f"{name}_of_a_burst_s"] = seconds(session, tensors) / BURST
        session.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--out", type=Path, default=Path("build/bench/order_cost.json"))
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, measure)
    rows: list[dict[str, Any]] = []
    for world in map(int, arguments.worlds.split(",")):
        found = lab_ranks.run(__file__, world, lab.LOOPBACK, {}, TIMEOUT_S)
        rows.append({"ranks": world, **found})
        order = found["chunk_s"] - 2 * found["raw_s"]
        print(
            f"{world} ranks: a chunk {1e3 * found['chunk_s']:.2f} ms, raw "
            f"{1e3 * found['raw_s']:.2f} ms, so the order about {1e3 * order:.2f} ms; in a burst "
            f"{1e3 * found['chunk_of_a_burst_s']:.2f} and {1e3 * found['raw_of_a_burst_s']:.2f} ms"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
