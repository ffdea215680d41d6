"""Each codec's bytes and loss of precision, on real gradients and on Gaussian noise.

    python -m bench.accuracy.ratio --out build/ratio

The gradients are those of the accuracy benchmark's models on eight workers, early, half way and
late in fp32 training. The error is |x - D(x)|^2 / |x|^2 of one encoding of the first worker's
gradient, without feedback. For allreduces of 4 and 8 workers it is the error of the mean after both
hops, relative to the exact mean; DynamiQ (arXiv 2602.08923) calls it the vNMSE. Writes
OUT/ratio.json and ratio.md."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import thinwire
import torch
from tqdm import tqdm

from bench import harness
from bench.accuracy.tasks import TASKS, Task
from bench.accuracy.training import batches, gradients_of, make_optimizers
from bench.accuracy.two_hop import TwoHop

CODECS = (
    "bf16", "int8", "int8:rounding=stochastic", "int4", "int4:block=128", "int4:hadamard=1",
    "int4:rounding=stochastic", "adaptive:bits=4", "adaptive:bits=3", "adaptive:bits=2",
    "adaptive:bits=2,floor=1", "adaptive:bits=2,floor=2", "adaptive:bits=1", "adaptive:bits=0.5",
    "onebit", "topk:density=0.1", "topk:density=0.01",
    "topk:density=0.001",
)  # fmt: skip
SOURCES = ("mlp", "cnn", "charlm", "gpt AdamW")
NOISE = "Gaussian noise"
_WORKERS = 8
ALLREDUCES = ("adaptive:bits=3", "int4", "adaptive:bits=4", "adaptive:bits=5", "int8")
_POINTS = (0.05, 0.5, 0.95)  # as parts of a run
_STEPS_PART = 4  # a quarter of the benchmark's steps give the same result


def gradients(task: Task) -> list[list[torch.Tensor]]:
    """Return every worker's flat gradients at some points of a run."""
    torch.manual_seed(1)
    model = task.make_model()
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    optimizers = make_optimizers(task, parameters, task.momentum)
    steps = task.steps // _STEPS_PART
    wanted = {int(part * steps) for part in _POINTS}
    taken = []
    rows = batches(task, _WORKERS, seed=1)
    for step in tqdm(range(steps), task.name, leave=False):
        flat, _ = gradients_of(task, model, next(rows))
        if step in wanted:
            taken.append(flat)
        mean = torch.stack(flat).mean(0)
        for p, g in zip(parameters.values(), mean.split(sizes), strict=True):
            p.grad = g.view_as(p)
        for optimizer in optimizers:
            optimizer.step()
    return taken


def measure(codec: str, x: torch.Tensor) -> tuple[float, float]:
    """Return (bits per element, relative squared error)."""
    data = thinwire.encode(codec, x)
    decoded = torch.from_numpy(thinwire.decode(codec, data, x.numel()))
    return 8 * len(data) / x.numel(), _error(decoded, x)


def measure_allreduce(codec: str, workers: list[torch.Tensor]) -> tuple[float, float]:
    """Return (bits per element and hop, relative squared error of the mean)."""
    numel = workers[0].numel()
    mean = torch.stack(workers).double().mean(0)
    reduced = TwoHop(len(workers), numel, codec, feedback=False).all_reduce(workers)
    info = thinwire.codec_info(codec)
    bits = sum(thinwire.encoded_bytes(spec, numel) for spec in (info.up, info.down)) * 4 / numel
    return bits, _error(reduced, mean)


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((exact.double() - got).square().sum() / exact.double().square().sum()).item()


def _row(source: str, codec: str, measured: list[tuple[float, float]]) -> harness.Row:
    bits, error = np.mean(measured, axis=0).tolist()
    return {"source": source, "codec": codec, "bits": bits, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/ratio"))
    parser.add_argument("--tasks", default=",".join(SOURCES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = {name: gradients(TASKS[name]) for name in arguments.tasks.split(",")}
    torch.manual_seed(2)
    samples[NOISE] = [[torch.randn(1 << 20)]]
    rows = [
        _row(source, codec, [measure(codec, flat[0]) for flat in taken])
        for source, taken in samples.items()
        for codec in CODECS
    ]
    del samples[NOISE]
    for (source, taken), workers, codec in itertools.product(samples.items(), (4, 8), ALLREDUCES):
        row = _row(source, codec, [measure_allreduce(codec, flat[:workers]) for flat in taken])
        rows.append(row | {"workers": workers})
    harness.report(arguments.out, "ratio", "Bytes and errors", rows, harness.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
