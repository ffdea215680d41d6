"""Allreduces of every codec and of torch's own, turn by turn, so that what disturbs one disturbs
all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import thinwire.torch
from thinwire.torch.agree import from_rank_0, worst_of_ranks
from thinwire.torch.forecast.choice import PLAIN, Prediction, choose

GLOO = "gloo fp32"


def _ways(codecs: Sequence[str], tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def ours(codec: str) -> Callable[[], Any]:
        name = f"bench {codec} {tensor.numel()}"
        return lambda: thinwire.torch.all_reduce(tensor, codec=codec, name=name)

    return {GLOO: lambda: dist.all_reduce(tensor)} | {codec: ours(codec) for codec in codecs}


def _time(call: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return worst_of_ranks([time.perf_counter() - start], None)[0]


def measure(
    codecs: Sequence[str], sizes: Sequence[int], least_rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each size (in bytes of fp32) and way: milliseconds, and how many times as fast as
    Gloo, the median over the rounds of the ratio within a round. All ranks call it.

    seconds: a size has rounds for so long, but at least `least_rounds`."""
    rows = []
    for size in sizes:
        ways = _ways(codecs, torch.randn(size // 4))
        times: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():  # connects, and lays out residuals
            _time(call)
        end, going = time.perf_counter() + seconds, True
        while going:
            for way, call in ways.items():
                times[way].append(_time(call))
            enough = len(times[GLOO]) >= least_rounds and time.perf_counter() > end
            going = from_rank_0(not enough, None)
        for way, found in times.items():
            ratios = [plain / mine for plain, mine in zip(times[GLOO], found, strict=True)]
            rows.append({
                "way": way, "bytes": size, "rounds": len(found),
                "ms": 1000 * statistics.median(found), "speedup": statistics.median(ratios),
            })  # fmt: skip
    return rows


def recommend(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The most accurate way that is as good as the fastest at the largest size, by advise()'s rule,
    and its speed-up there."""
    largest = max(row["bytes"] for row in rows)
    mine = [row for row in rows if row["bytes"] == largest]
    # Gloo's fp32 is what DDP has without thinwire.
    predictions = [
        Prediction(PLAIN[0] if row["way"] == GLOO else row["way"], PLAIN[1], 1 / row["speedup"])
        for row in mine
    ]
    best = choose(predictions, [row.codec for row in predictions])
    return {"codec": None if best.codec == PLAIN[0] else best.codec, "bytes": largest,
            "speedup": 1 / best.step_s}  # fmt: skip
