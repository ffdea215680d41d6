"""DDP steps by bucket_cap_mb, and which of them `advise` takes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.accuracy.tasks import GPT
from bench.harness import Turn
from bench.subjects import priority

WARM_UP = 4  # steps that are not counted: DDP lays its buckets out anew in the second


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


CASES = {
    "mlp": Case(lambda: priority.make_model("mlp"), lambda: torch.randn(2, 1024)),
    "vgg": Case(lambda: priority.make_model("vgg"), lambda: torch.randn(8, 3 * 32 * 32)),
    "gpt": Case(lambda: GPT(256, 4), lambda: torch.randint(128, (4, 32))),
}


def _parts(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], None]]:
    """A model, its optimizer, and its forward and backward pass."""
    torch.manual_seed(0)
    model = CASES[name].model()

    def run(module: nn.Module) -> None:
        module(CASES[name].batch()).square().mean().backward()

    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), run


@contextlib.contextmanager
def capped(name: str, cap_mb: int, codec: str) -> Iterator[Turn]:
    """A training loop of a model of CASES, the optimizer's step included."""
    from thinwire.torch import compress
    from thinwire.torch.forecast import DDP_CAP_MB

    model, optimizer, run = _parts(name)
    # DDP's own makes the first bucket smaller, and only where nothing is said.
    options = {} if cap_mb == DDP_CAP_MB else {"bucket_cap_mb": cap_mb}
    ddp = DistributedDataParallel(model, **options)
    compression = compress(ddp, codec=codec, optimizer=optimizer)

    def turn(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            run(ddp)
            optimizer.step()
            found.append(time.perf_counter() - start)
        return found

    turn(WARM_UP)
    yield turn
    compression.close()


def advised(name: str, codec: str) -> dict[int, float]:
    """Predicted seconds of a step by bucket_cap_mb; the first is the one to take. Of those by which
    DDP makes the same buckets only one is there."""
    from thinwire.torch import advise

    model, optimizer, run = _parts(name)
    found = advise.advise(
        model, optimizer, functools.partial(run, model), codecs=[codec], allowed=[codec],
        policies=["wfbp"],
    )  # fmt: skip
    first = found.bucket_cap_mb
    distinct: dict[float, int] = {}
    for cap in (first, *found.caps):
        distinct.setdefault(found.caps[cap], cap)
    return {cap: found.caps[cap] for cap in distinct.values()}
