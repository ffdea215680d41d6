"""Loss over time between two sites: DDP, plain and int4, and DiLoCo with several codecs.

    python -m bench.sites_loss [--link 100mbit] [--delay_ms 20] [--seconds 90] [--sync_every 16]
                               [--out FILE.json] [--plot FILE.png]

The demo's MLP (1.9 M parameters) on Fashion-MNIST, batches of 64 a site, the same SGD inside
everywhere; the ways run one after another from one seed. Plain DDP trains for `seconds`, and its
last loss is what the others are to reach; each of them ends a while after it has, or after the same
time. The loss is that of 2,000 test images, and the clock stands still while it is computed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench import harness
from demo import data
from demo.exchange import Exchange
from demo.train import Recipe, batches, make_model


class Way(NamedTuple):
    codec: str  # of compress() under DDP, "plain" for DDP's own; else of a round
    rounds: bool = False  # DiLoCo in place of DDP


WAYS = {
    "DDP fp32": Way("plain"),
    "DDP int4": Way("int4"),
    "DiLoCo fp32": Way("fp32", True),
    "DiLoCo int4": Way("int4", True),
    "DiLoCo adaptive, 2 bits": Way("adaptive", True),
}
RATE, MOMENTUM = 0.02, 0.9
SHOWN = 2000  # test images
LOOKS = 8  # at the loss, the last of which must be at the target on average
MORE = 1.5  # times the time to the target, until a way ends


class Point(NamedTuple):
    seconds: float
    loss: float
    steps: int


def ddp(way: Way, inner: torch.optim.Optimizer, model: torch.nn.Module, step: Callable) -> Iterator:
    """Yields whenever there is something new to look at."""
    wrapped = DistributedDataParallel(model)
    exchange = Exchange(wrapped, way.codec, inner)
    try:
        while True:
            for _ in range(5):
                step(wrapped)
            yield
    finally:
        exchange.close()


def diloco(way: Way, inner: torch.optim.Optimizer, model: torch.nn.Module, step: Callable,
           every: int) -> Iterator:  # fmt: skip
    from thinwire.torch import sites

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with sites.DiLoCo(sites.static(), [model], inner, outer, every, codec=way.codec):
        while True:
            for _ in range(every):
                step(model)
            yield


def endless(images: int, seed: int) -> Iterator[torch.Tensor]:
    """This site's row numbers, epoch after epoch."""
    while True:
        yield from batches(images, Recipe(1, 64, RATE, seed))
        seed += 1


def curve(
    way: Way, every: int, seconds: float, target: float | None,
    train: data.Images, shown: tuple[torch.Tensor, torch.Tensor],
) -> list[Point]:  # fmt: skip
    """The loss over time. target: a loss at which the way may end; None: it takes all its time."""
    torch.manual_seed(1)
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    rows = endless(len(train), 1)
    steps = 0

    def step(called: torch.nn.Module) -> None:
        nonlocal steps
        pixels, labels = train.batch(next(rows))
        inner.zero_grad()
        cross_entropy(called(pixels), labels).backward()
        inner.step()
        steps += 1

    points: list[Point] = []
    passed, reached = 0.0, float("inf")
    turns = diloco(way, inner, model, step, every) if way.rounds else ddp(way, inner, model, step)
    dist.barrier()
    start = time.monotonic()
    for _ in turns:
        passed += time.monotonic() - start
        with torch.no_grad():
            loss = cross_entropy(model(shown[0]), shown[1]).item()
        points.append(Point(passed, loss, steps))
        if target is not None and reached == float("inf") and last_loss(points) <= target:
            reached = passed
        over = torch.tensor([float(passed >= min(seconds, MORE * reached + 1))])
        dist.broadcast(over, 0)  # sites end together
        if over.item():
            break
        dist.barrier()
        start = time.monotonic()
    turns.close()
    return points


def smoothed(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Each (when, loss) with the mean of the last losses."""
    losses = [point[1] for point in points]
    return [
        (points[end - 1][0], statistics.mean(losses[max(0, end - LOOKS) : end]))
        for end in range(1, len(losses) + 1)
    ]


def last_loss(points: list[Point]) -> float:
    return smoothed(points[-LOOKS:])[-1][1]


def measure(every: int, seconds: float) -> dict[str, Any]:
    """In a rank."""
    train, test = data.load("train"), data.load("t10k")
    shown = test.batch(torch.arange(SHOWN))
    rows, target = [], None
    for name, way in WAYS.items():
        points = curve(way, every, seconds, target, train, shown)
        target = last_loss(points) if target is None else target
        rows.append({"subject": name, "codec": way.codec, "points": points})
        if dist.get_rank() == 0:
            print(f"{name}: {points[-1].steps} steps in {points[-1].seconds:.1f} s", flush=True)
    for row in rows:
        reached = (when for when, loss in smoothed(row["points"]) if loss <= target)
        row["seconds_to_target"] = next(reached, None)
    return {"target": target, "rows": rows}


def plot(result: dict, path: Path) -> None:
    with harness.picture(path, figsize=(7.5, 4)) as axis:
        for row in result["rows"]:
            style = "-" if row["subject"].startswith("DiLoCo") else "--"
            seconds, losses = zip(*smoothed(row["points"]), strict=True)
            axis.plot(seconds, losses, style, label=row["subject"])
        axis.axhline(result["target"], color="black", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_xlabel("seconds of training, two sites")
        axis.set_ylabel(f"test loss, mean of {LOOKS} looks")
        axis.set_title(f"{result['link']}, {result['delay_ms']:g} ms one way", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def main() -> int:
    parser = harness.lab_parser("bench.sites_loss", __doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="the most for each way")
    parser.add_argument("--sync_every", type=int, default=16, help="steps between rounds")
    parser.add_argument("--plot", type=Path, default=Path("build/sites_loss.png"))
    given = parser.parse_args()
    if harness.is_rank():
        return harness.be_rank(lambda: measure(given.sync_every, given.seconds))
    timeout_s = (len(WAYS) + 1) * given.seconds + 120
    found = harness.run_in_lab(given, 2, timeout_s, "bench.sites_loss")
    result = harness.write(
        given.out, found["rows"], target=found["target"], link=given.link, delay_ms=given.delay_ms
    )
    plot(result, given.plot)
    print(harness.table(found["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
