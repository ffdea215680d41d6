"""The drift of a long run by compression: the mean training loss of the last fortieth of 3,000
steps, of every codec with and without error feedback, over that of fp32 with the same seed.

    python -m bench.accuracy.drift --out build/drift    # resumes where it was stopped

Gradients are fp32 or bf16, and norms and biases go compressed or exact. All methods train at the
task's own rate, for the losses are compared step by step. Writes OUT/drift.json and drift.md."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import harness
from bench.accuracy.run import Cell, Results, carry_out
from bench.accuracy.tasks import TASKS
from bench.accuracy.training import DRIFTING

_STEPS = 3000
_TASKS = ("charlm", "gpt AdamW")


def drift_of(results: Results, cell: Cell, baseline: Cell) -> dict[str, Any] | None:
    """A row: percent of fp32's tail loss, mean and spread over seeds; None before two seeds."""
    pairs = [
        (results.row(run), results.row(exact))
        for run, exact in zip(cell.tests(results), baseline.tests(results), strict=True)
    ]
    percent = [100 * (a["train_loss"] / b["train_loss"] - 1) for a, b in pairs if a and b]
    if len(percent) < 2:
        return None
    return {
        "task": cell.task.name, "batch": cell.task.batch, "workers": cell.workers,
        "method": cell.method, "seeds": len(percent),
        "drift_percent": statistics.mean(percent),
        "standard_error": statistics.stdev(percent) / len(percent) ** 0.5,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/drift"))
    parser.add_argument("--tasks", default=",".join(_TASKS))
    parser.add_argument("--methods", default=",".join(method.name for method in DRIFTING))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch_part", type=int, default=1, help="so many times smaller batches")
    parser.add_argument("--device", default="cpu", help="cuda: a method's seeds side by side")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    arguments = parser.parse_args()
    results, rows = Results(arguments.out), []
    for name in arguments.tasks.split(","):
        task = TASKS[name]
        task = dataclasses.replace(
            task, steps=arguments.steps, batch=task.batch // arguments.batch_part
        )
        cells = {
            method: Cell(task, method, arguments.seeds, 0, arguments.workers, arguments.device)
            for method in dict.fromkeys(["fp32", *arguments.methods.split(",")])
        }
        carry_out(list(cells.values()), results, arguments.jobs)
        found = [drift_of(results, cell, cells["fp32"]) for cell in cells.values()]
        rows += [row for row in found if row and row["method"] != "fp32"]
    result = harness.write(arguments.out / "drift.json", rows)
    columns = {
        "task": "{task}", "batch": "{batch}", "workers": "{workers}", "method": "{method}",
        "seeds": "{seeds}",
        "tail loss over fp32's, %": "{drift_percent:+.3f} ± {standard_error:.3f}",
    }  # fmt: skip
    text = harness.table(rows, columns)
    head = f"# Drift over {arguments.steps} steps\n\n{harness.headline(result)}\n\n"
    (arguments.out / "drift.md").write_text(f"{head}{text}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
