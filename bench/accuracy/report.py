"""The accuracy benchmark's tables."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from bench import harness
from bench.harness import Row

BASELINE = "fp32"
FORMS = {"accuracy": ".2f", "loss": ".4f", "train_loss": ".4f"}
COLUMNS = {
    "task": "{task}",
    "method": "{method}",
    "rate": "{rate:g}",
    "fewer bytes": "{ratio:.1f} x",
    "seeds": "{seeds}",
    "test accuracy, %": "{accuracy}",
    "difference, paired": "{gain}",
    "over": "{against}",
    "test loss": "{loss}",
    "training loss": "{train_loss}",
}


def mean_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def spread(values: list[float], form: str = ".2f") -> str:
    """Return "mean ± standard error". form: of the mean; zero has no minus sign."""
    if not values:  # the baseline has no run with these seeds yet
        return ""
    mean, error = mean_error(values)
    digits = form.removeprefix("+")
    text = f"{round(mean, int(digits[1:-1])) + 0.0:{form}}"
    return text if math.isnan(error) else f"{text} ± {error:{digits}}"


def summarise(rows: list[Row]) -> list[Row]:
    """Return one row for each task and method, in the order of their first run, with its fields.
    accuracy, loss, train_loss: over all seeds; gain: the difference of accuracy to `against`, over
    the `pairs` of runs with the same seed."""
    by_key = {(row["task"], row["method"], row["seed"]): row for row in rows}
    summary = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        runs = [row for row in rows if (row["task"], row["method"]) == (task, method)]
        against = runs[0].get("against", BASELINE)
        pairs = [(run, by_key.get((task, against, run["seed"]))) for run in runs]
        gains = [run["accuracy"] - base["accuracy"] for run, base in pairs if base]
        summary.append(runs[0] | {
            "against": against, "seeds": len(runs), "pairs": len(gains),
            "gain": "0" if method == against else spread(gains, "+.2f"),
            "ratio": statistics.mean(run["ratio"] for run in runs),
        } | {
            field: spread([run[field] for run in runs], form)
            for field, form in FORMS.items() if field in runs[0]
        })  # fmt: skip
    return summary


def table(rows: list[Row]) -> str:
    """Return a Markdown table."""
    return harness.table(summarise(rows), COLUMNS)


def write_report(folder: Path, rows: list[Row], choices: list[Row]) -> None:
    """Write and print the table. choices: scores of the rates that were tried, for the file."""
    seeds = len({row["seed"] for row in rows})
    text = (
        f"{rows[0]['workers']} workers, up to {seeds} paired seeds. Mean ± standard error; fewer "
        f"bytes than a ring allreduce of fp32.\n\n{table(rows)}"
    )
    harness.report(folder, "accuracy", "Accuracy", rows, text, choices=choices)
