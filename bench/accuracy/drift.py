"""The drift of a long run by compression: the mean training loss of the last 1/40 of 3,000 steps,
of every codec with and without error feedback, relative to that of fp32 with the same seed.

    python -m bench.accuracy.drift --out build/drift    # resumes where it was stopped

Gradients are fp32 or bf16, and norms and biases are sent compressed or exact. All methods train at
the task's own rate, because losses are compared step by step. Writes OUT/drift.json and
drift.md."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import harness
from bench.accuracy.report import mean_error
from bench.accuracy.run import Cell, Results, carry_out, cells_of, make_parser
from bench.accuracy.training import DRIFTING


def drift_of(results: Results, cell: Cell, baseline: Cell) -> harness.Row | None:
    """Return a row with percent of fp32's tail loss, mean and spread over seeds; None with fewer
    than two seeds."""
    pairs = [
        (results.row(run), results.row(exact))
        for run, exact in zip(cell.tests(results), baseline.tests(results), strict=True)
    ]
    percent = [100 * (a["train_loss"] / b["train_loss"] - 1) for a, b in pairs if a and b]
    if len(percent) < 2:
        return None
    mean, error = mean_error(percent)
    return {
        "task": cell.task.name, "batch": cell.task.batch, "workers": cell.workers,
        "method": cell.method, "seeds": len(percent), "drift_percent": mean,
        "standard_error": error,
    }  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.set_defaults(
        out=Path("build/drift"), tasks="charlm,gpt AdamW", seeds=3, choices=0,
        methods=",".join(method.name for method in DRIFTING),
    )  # fmt: skip
    arguments = parser.parse_args()
    methods = dict.fromkeys(["fp32", *arguments.methods.split(",")])
    arguments.methods = ",".join(methods)
    results, cells = Results(arguments.out), cells_of(arguments, steps=arguments.steps)
    carry_out(cells, results, arguments.jobs)
    exact = {cell.task.name: cell for cell in cells if cell.method == "fp32"}
    found = (drift_of(results, cell, exact[cell.task.name]) for cell in cells)
    rows = [row for row in found if row and row["method"] != "fp32"]
    title = f"Drift over {arguments.steps} steps"
    harness.report(arguments.out, "drift", title, rows, harness.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
