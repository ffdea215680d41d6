"""The accuracy benchmark's table and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import harness

Row = dict[str, Any]

BASELINE = "fp32"
# Points of accuracy that a method may lose, on the mean of a task's paired differences. With unlike
# labels a poisoner may cost 3.
MUST = {
    "int8": 0.1,
    "int4": 0.1,
    "adaptive 3": 0.1,
    "adaptive 2": 0.1,
    "adaptive 1": 0.3,
    "onebit": 0.3,
    "onebit both ways": 0.5,
    "topk 1 %": 0.4,
    "topk 0.1 % DGC": 0.7,
    "DiLoCo fp32": 0.3,
    "DiLoCo int4": 0.1,
    "DiLoCo adaptive 2": 0.1,
    "DiLoCo adaptive 0.5": 0.3,
    "SparseLoCo": 0.3,
    "FedAvg int4": 0.3,
    "FedAvg adaptive 2": 0.3,
    "FedAvg adaptive 0.5": 0.3,
    "store sync int4": 0.1,
    "store ssp": 0.5,
    "store ssp int4": 0.5,
    "centered_clip clean": 1.0,
    "centered_clip sign": 1.0,
    "centered_clip noise": 1.0,
    "centered_clip little": 1.0,
}


def mean_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def _form(values: list[float], digits: int = 2) -> str:
    if not values:  # no run of the baseline has the seed yet
        return ""
    mean, error = mean_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def summarise(rows: list[Row]) -> list[Row]:
    """One row for each task and method, in the order of their first run."""
    by_key = {(row["task"], row["method"], row["seed"]): row for row in rows}
    summary = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        runs = [row for row in rows if (row["task"], row["method"]) == (task, method)]
        against = runs[0].get("against", BASELINE)
        pairs = [(run, by_key.get((task, against, run["seed"]))) for run in runs]
        summary.append(
            {
                "task": task,
                "method": method,
                "against": against,
                "rate": runs[0]["rate"],
                "accuracy": [run["accuracy"] for run in runs],
                "difference": [run["accuracy"] - base["accuracy"] for run, base in pairs if base],
                "loss": [run["loss"] for run in runs],
                "train_loss": [run["train_loss"] for run in runs],
                "ratio": statistics.mean(run["ratio"] for run in runs),
            }
        )
    return summary


def _verdict(row: Row) -> str:
    if row["method"] not in MUST or not row["difference"]:
        return ""
    lost = -statistics.mean(row["difference"])
    must = MUST[row["method"]]
    if "Dirichlet" in row["task"] and must == 1.0:
        must = 3.0
    return f"≤ {must}: {'yes' if lost <= must else 'NO'}"


def table(rows: list[Row]) -> str:
    """Markdown."""
    body = []
    for row in summarise(rows):
        against = row["against"]
        difference = _form(row["difference"]) if row["method"] != against else ""
        if difference and against != BASELINE:
            difference += f" ({against})"
        body.append([
            row["task"], row["method"], f"{row['rate']:g}", f"{row['ratio']:.1f} x",
            str(len(row["accuracy"])), _form(row["accuracy"]), difference, _verdict(row),
            _form(row["loss"], 4), _form(row["train_loss"], 4),
        ])  # fmt: skip
    head = (
        "task", "method", "rate", "fewer bytes", "seeds", "test accuracy, %",
        "minus fp32 (or another method), paired", "within", "test loss", "training loss",
    )  # fmt: skip
    return harness.markdown(head, body)


def _panels(tasks: list[str], draw: Callable[[Any, str], None], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(tasks), figsize=(5 * len(tasks), 4.2), layout="constrained", squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        draw(axis, task)
        axis.set_title(task)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    shown = {}  # not every method is on every task
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    columns = 5 if len(tasks) > 1 else 3  # as many as fit
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _colours(rows: list[Row]) -> dict[str, str]:
    """By method: the same in every panel."""
    methods = dict.fromkeys(row["method"] for row in rows)
    return {method: f"C{number % 10}" for number, method in enumerate(methods)}


def plot_accuracy(path: Path, rows: list[Row]) -> None:
    """Accuracy against how many times fewer bytes, with standard errors."""
    summary, colours = summarise(rows), _colours(rows)

    def draw(axis: Any, task: str) -> None:
        for row in summary:
            if row["task"] != task:
                continue
            mean, error = mean_error(row["accuracy"])
            axis.errorbar(row["ratio"], mean, error, fmt="o", capsize=3, label=row["method"],
                          color=colours[row["method"]])  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("times fewer bytes than fp32")
        axis.set_ylabel("test accuracy, %")

    _panels(list(dict.fromkeys(row["task"] for row in rows)), draw, path)


def plot_curves(path: Path, rows: list[Row]) -> None:
    """Training loss over steps, mean of the seeds."""

    def draw(axis: Any, task: str) -> None:
        for method, colour in _colours(rows).items():
            curves = [r["curve"] for r in rows if (r["task"], r["method"]) == (task, method)]
            if not curves:
                continue
            steps = [step for step, _ in curves[0]]
            means = [
                statistics.mean(losses)
                for losses in zip(*([p[1] for p in c] for c in curves), strict=True)
            ]
            axis.plot(steps, means, label=method, linewidth=1.2, color=colour)
        axis.set_yscale("log")
        axis.set_xlabel("step")
        axis.set_ylabel("training loss")

    _panels(list(dict.fromkeys(row["task"] for row in rows)), draw, path)


def pooled(rows: list[Row]) -> str:
    """A line a method: its paired differences on all tasks together."""
    differences: dict[str, list[float]] = {}
    for row in summarise(rows):
        if row["method"] != row["against"]:
            differences.setdefault(row["method"], []).extend(row["difference"])
    body = [
        [name, _form(points), str(len(points))] for name, points in differences.items() if points
    ]
    return harness.markdown(["method", "minus fp32, all tasks", "pairs"], body)


def choices_table(choices: list[Row]) -> str:
    """Which rates were tried, with their accuracy on the validation split."""
    body = []
    for choice in choices:
        tried = sorted(choice["validation"].items(), key=lambda pair: float(pair[0]))
        tried += choice.get("outers", {}).items()
        scores = ", ".join(f"{rate}: {accuracy:.2f}" for rate, accuracy in tried)
        body.append([choice["task"], choice["method"], scores])
    return harness.markdown(["task", "method", "accuracy by rate, %"], body)


def write_report(folder: Path, rows: list[Row], choices: list[Row]) -> str:
    """Writes all of it; returns the table. choices: scores of the rates that were tried."""
    text = table(rows)
    result = harness.write(folder / "accuracy.json", rows, choices=choices)
    seeds = len({row["seed"] for row in rows})
    (folder / "accuracy.md").write_text(
        f"# Accuracy\n\n{harness.headline(result)}; {rows[0]['workers']} workers, up to {seeds} "
        f"paired seeds\n\nMean ± standard error; fewer bytes than a ring allreduce of fp32.\n\n"
        f"{text}\n\n{pooled(rows)}\n\n## Learning rates\n\nChosen on a validation split, with "
        f"seeds of their own.\n\n{choices_table(choices)}\n"
    )
    plot_accuracy(folder / "accuracy.png", rows)
    plot_curves(folder / "curves.png", rows)
    return text
