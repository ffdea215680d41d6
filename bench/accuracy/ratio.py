"""Each codec's bytes and loss of precision, on real gradients and on Gaussian noise.

    python -m bench.accuracy.ratio --out build/ratio

Gradients of the accuracy benchmark's models, of one worker, taken during fp32 training: early, half
way and late. The error is |x - D(x)|^2 / |x|^2 of one encoding without feedback. Beside our codecs
stand formats and rules of others (references.py). Writes OUT/ratio.json, ratio.md and ratio.png."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import thinwire
import torch
from tqdm import tqdm

from bench import harness
from bench.accuracy.references import REFERENCES
from bench.accuracy.tasks import TASKS, Task, loss_of
from bench.accuracy.training import batches, make_optimizer

CODECS = (
    "bf16", "int8", "int8:rounding=stochastic", "int4", "int4:block=128", "int4:hadamard=1",
    "int4:rounding=stochastic", "adaptive:bits=4", "adaptive:bits=3", "adaptive:bits=2",
    "adaptive:bits=2,floor=1", "adaptive:bits=2,floor=2", "adaptive:bits=1", "adaptive:bits=0.5",
    "onebit", "topk:density=0.1", "topk:density=0.01",
    "topk:density=0.001",
)  # fmt: skip
SOURCES = ("mlp", "cnn", "charlm", "gpt AdamW")
NOISE = "Gaussian noise"
_POINTS = (0.05, 0.5, 0.95)  # of a run
_STEPS_PART = 4  # a quarter of the benchmark's steps show the same


def gradients(task: Task) -> list[torch.Tensor]:
    """One worker's flat gradients at a few points of a run."""
    torch.manual_seed(1)
    model = task.make_model()
    optimizer = make_optimizer(task, list(model.parameters()), task.momentum)
    steps = task.steps // _STEPS_PART
    wanted = {int(part * steps) for part in _POINTS}
    taken = []
    rows = batches(task, 1, seed=1)
    for step in tqdm(range(steps), task.name, leave=False):
        loss = loss_of(model, task.data.batch(next(rows)[0]))
        optimizer.zero_grad()
        loss.backward()
        if step in wanted:
            taken.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        optimizer.step()
    return taken


def measure(codec: str, x: torch.Tensor) -> tuple[float, float]:
    """(bits an element, relative squared error)."""
    if codec in REFERENCES:
        return REFERENCES[codec].bits, REFERENCES[codec].error(x.numpy())
    data = thinwire.encode(codec, x)
    decoded = torch.from_numpy(thinwire.decode(codec, data, x.numel()))
    error = (x - decoded).double().square().sum() / x.double().square().sum()
    return 8 * len(data) / x.numel(), error.item()


def table(rows: list[dict]) -> str:
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines = [
        "| codec | bits an element | fewer bytes | "
        + " | ".join(f"error², {s}" for s in sources)
        + " |",
        "|" + "---|" * (3 + len(sources)),
    ]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        errors = {row["source"]: row["error"] for row in rows if row["codec"] == codec}
        bits = statistics.mean(row["bits"] for row in rows if row["codec"] == codec)
        name = codec if codec in REFERENCES else f"`{codec}`"
        cells = [name, f"{bits:.2f}", f"{32 / bits:.1f} x"]
        lines.append("| " + " | ".join(cells + [f"{errors[s]:.2g}" for s in sources]) + " |")
    return "\n".join(lines)


def plot(path: Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    sources = list(dict.fromkeys(row["source"] for row in rows))
    for source, marker in zip(sources, "osD^x", strict=False):
        mine = [row for row in rows if row["source"] == source]
        axis.scatter([32 / r["bits"] for r in mine], [r["error"] for r in mine], marker=marker,
                     label=source, alpha=0.8)  # fmt: skip
    for codec in dict.fromkeys(row["codec"] for row in rows):
        first = next(row for row in rows if row["codec"] == codec)
        highest = max(row["error"] for row in rows if row["codec"] == codec)
        axis.annotate(codec, (32 / first["bits"], highest), xytext=(3, 5),
                      textcoords="offset points", fontsize=7)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("times fewer bytes than fp32, one hop")
    axis.set_ylabel("relative squared error of one encoding")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/ratio"))
    parser.add_argument("--tasks", default=",".join(SOURCES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    samples = {name: gradients(TASKS[name]) for name in arguments.tasks.split(",")}
    torch.manual_seed(2)
    samples[NOISE] = [torch.randn(1 << 20)]
    rows = []
    for source, taken in samples.items():
        for codec in (*CODECS, *REFERENCES):
            bits, errors = zip(*(measure(codec, x) for x in taken), strict=True)
            rows.append({"source": source, "codec": codec, "bits": statistics.mean(bits),
                         "error": statistics.mean(errors)})  # fmt: skip
    text = table(rows)
    result = harness.write(arguments.out / "ratio.json", rows)
    head = f"# Bytes and errors\n\n{harness.headline(result)}\n\n"
    (arguments.out / "ratio.md").write_text(f"{head}{text}\n")
    plot(arguments.out / "ratio.png", rows)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
