"""Orders of chunks, simulated: step times relative to a bound for any order (Jackson's preemptive
bound), and to fifo with a barrier.

    python -m bench.sched_bench [--short] [--out build/bench/sched.json]

Chunks have the default size in every world: they grow only because of the cost of messages, which
this model does not have. Prints a table, and writes every setting."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

from bench import harness
from bench.harness import Row

FLOPS = 30e12  # per second, as a GPU reaches on these models
MERGE = (1 << 20) // 4  # elements; neighbours of less than 1 MiB are one unit
NEAR_MS = 1.0  # ms of latency; below it the order is announced, from it on predicted
LATENCIES_MS = (0.02, 0.1, 1.0, 5.0, 15.0, 30.0)
COLUMNS = {
    "latency, ms": "{latency_ms:g}",
    "announced over the bound: median, p90": "{announced}",
    "predicted": "{predicted}",
    "fifo with a barrier over p3: least, median, most": "{fifo}",
}


class Model:
    """Each tensor's elements, and the compute time of its layer (backward: twice the forward's).

    batch: samples per step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.units: list[list[float]] = []  # elements, forward_s, backward_s

    def layer(self, numel: int, arithmetic: float) -> None:
        """Add a layer. arithmetic: floating-point operations of one sample's forward pass."""
        if not self.units or self.units[-1][0] >= MERGE:
            self.units.append([0, 0.0, 0.0])
        unit, seconds = self.units[-1], arithmetic * self.batch / FLOPS
        unit[0], unit[1], unit[2] = unit[0] + numel, unit[1] + seconds, unit[2] + 2 * seconds

    def conv(self, kernel: int, channels: int, out: int, side: int) -> None:
        """Add a convolution with its bias or normalisation, whose output is `out` images of side x
        side."""
        weights = kernel * kernel * channels * out
        self.layer(weights + 2 * out, 2.0 * weights * side * side)

    def linear(self, inputs: int, out: int, tokens: int = 1) -> None:
        """Add a matrix that is applied to `tokens` rows of each sample."""
        self.layer(inputs * out + out, 2.0 * inputs * out * tokens)


def resnet50() -> Model:
    """He et al., arXiv 1512.03385, table 1, 224 x 224."""
    model, channels = Model(64), 64
    model.conv(7, 3, 64, 112)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 56 >> stage
        for block in range(blocks):
            model.conv(1, channels, width, side)
            model.conv(3, width, width, side)
            model.conv(1, width, 4 * width, side)
            if block == 0:
                model.conv(1, channels, 4 * width, side)  # the shortcut's projection
            channels = 4 * width
    model.linear(2048, 1000)
    return model


def vgg19() -> Model:
    """Simonyan and Zisserman, arXiv 1409.1556, table 1, configuration E."""
    model, channels = Model(32), 3
    for count, width, side in ((2, 64, 224), (2, 128, 112), (4, 256, 56), (4, 512, 28),
                               (4, 512, 14)):  # fmt: skip
        for _ in range(count):
            model.conv(3, channels, width, side)
            channels = width
    for inputs, out in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        model.linear(inputs, out)
    return model


def bert_large() -> Model:
    """Devlin et al., arXiv 1810.04805, section 3, 512 tokens."""
    model, hidden, tokens = Model(4), 1024, 512
    # Look-ups take hardly any time, but the table's gradient is dense.
    model.layer((30522 + tokens + 2) * hidden, 10.0 * tokens * hidden)
    for _ in range(24):
        for _ in range(3):
            model.linear(hidden, hidden, tokens)
        # Scores and their sums have no parameters; they count for the output projection.
        attention = 2.0 * hidden * hidden * tokens + 4.0 * tokens * tokens * hidden
        model.layer(hidden * hidden + hidden, attention)
        model.linear(hidden, 4 * hidden, tokens)
        model.linear(4 * hidden, hidden, tokens)
    model.linear(hidden, hidden)
    return model


MODELS = {"ResNet-50": resnet50, "VGG-19": vgg19, "BERT-Large": bert_large}
# Policy, order, barrier, lanes (0: as many as keep the link busy), steps of the warm-up, all steps.
ORDERS = ("p3 announced 0 0 2 6", "p3 predicted 0 4 10 14", "fifo announced 1 0 2 6")


def measure(ranks: tuple[int, ...]) -> list[Row]:
    """Return a row for each setting. jitter: layers take up to 1 + 2 * jitter times as long;
    straggling: rank 1 takes 1 + straggling times as long."""
    axes = itertools.product(
        MODELS, ranks, (1.0, 5.0, 10.0, 25.0), LATENCIES_MS, (0.0, 0.1, 0.2), (0.0, 0.3)
    )
    fields = ("profile", "ranks", "gbit", "latency_ms", "jitter", "straggling")
    rows = [dict(zip(fields, values, strict=True)) for values in axes]
    units = {name: " ".join(f"{x!r}" for unit in make().units for x in unit)
             for name, make in MODELS.items()}  # fmt: skip
    lines = [
        "{ranks} {rate} {latency_s} {jitter} {straggling} {seed}".format_map(row | {
            "rate": row["gbit"] * 1e9 / 8, "latency_s": row["latency_ms"] * 1e-3,
            "seed": 1 + int(row["ranks"] * 1000 + row["gbit"] * 10),
        }) + f" {order} {units[row['profile']]}"
        for row in rows for order in ORDERS
    ]  # fmt: skip
    steps = iter(harness.simulate("steps", lines))
    for row, announced, predicted, fifo in zip(rows, steps, steps, steps, strict=True):
        best = announced if row["latency_ms"] < NEAR_MS else predicted
        row |= {
            "announced": announced["ratio"], "predicted": predicted["ratio"],
            "fifo_over_p3": fifo["mean_s"] / best["mean_s"],
        }  # fmt: skip
    return rows


def quantiles(rows: list[Row], field: str, *parts: float) -> str:
    """Return the quantiles `parts` of the values as text."""
    found = np.quantile([row[field] for row in rows], parts, method="closest_observation")
    return ", ".join(f"{value:.3f}" for value in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.sched_bench", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--short", action="store_true", help="2 and 8 ranks, not 64")
    parser.add_argument("--out", type=Path, default=Path("build/bench/sched.json"))
    given = parser.parse_args()
    rows, table = measure((2, 8) if given.short else (2, 8, 64)), []
    for latency in LATENCIES_MS:
        mine = [row for row in rows if row["latency_ms"] == latency]
        table.append({
            "latency_ms": latency, "announced": quantiles(mine, "announced", 0.5, 0.9),
            "predicted": quantiles(mine, "predicted", 0.5, 0.9),
            "fifo": quantiles(mine, "fifo_over_p3", 0.0, 0.5, 1.0),
        })  # fmt: skip
    print(harness.table(table, COLUMNS))
    chosen = [
        {"over": row["announced" if row["latency_ms"] < NEAR_MS else "predicted"]} for row in rows
    ]
    print(
        f"\n{len(rows)} settings, announced below 1 ms, predicted from there: "
        f"{quantiles(chosen, 'over', 0.5, 0.9, 1.0)} of the bound (median, p90, most)"
    )
    harness.write(given.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
