"""The cost of compression in accuracy: every method on every task over paired seeds, each method at
its own learning rate.

    python -m bench.accuracy.run --out build/accuracy            # resumes where it was stopped
    python -m bench.accuracy.run --short --out build/accuracy    # a minute, for a look

A method's rate is chosen on a validation split, with separate seeds, by hill climbing on GRID, the
same for every method. Then it trains with seeds that were not used for choices, and is evaluated on
the test set. Each run is a file in OUT/runs; a run with the same recipe is not repeated. Writes
OUT/accuracy.json and accuracy.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.accuracy import rounds, stores
from bench.accuracy.report import write_report
from bench.accuracy.tasks import TASKS, Task
from bench.accuracy.together import Trial, can_train, train_together
from bench.accuracy.training import METHODS, NAMED, spec_of, train

Outer = tuple[float, ...]  # an outer optimizer's rate and momentum, or a server's momentum
# Methods whose outer optimizer is chosen in addition to the rate.
TWICE_CHOSEN: dict[str, Any] = {**rounds.METHODS, **stores.METHODS}
_ONE_WAY = (None,)  # the outer optimizers of all other methods

_SHORT_STEPS = 8  # --short makes this many times fewer steps
_SHORT_METHODS = ("fp32", "int4", "adaptive 2", "adaptive 1", "onebit", "topk 0.1 % DGC")
_CHOICE_SEED = 101  # the first seed for choosing rates; results have the seeds 1, 2, ...


GRID = tuple(2.0**exponent for exponent in range(-3, 4))  # factors of the task's rate
_FIRST = (0.5, 1.0, 2.0)


def best_factor(scores: Mapping[float, float]) -> float:
    """Return the factor with the highest score. The score of a run that diverged is NaN."""
    return max(scores, key=lambda f: -math.inf if math.isnan(scores[f]) else scores[f])


def missing_factors(scores: Mapping[float, float]) -> list[float]:
    """Return the factors to try next; none if both neighbours of the best one are worse, or the
    grid ends there."""
    first = [factor for factor in _FIRST if factor not in scores]
    if first:
        return first
    place = GRID.index(best_factor(scores))
    return [factor for factor in GRID[max(place - 1, 0) : place + 2] if factor not in scores]


@dataclass(frozen=True)
class Run:
    task: Task  # with this run's rate
    method: str
    seed: int
    split: str  # "validation" to choose a rate, "test" for the result
    workers: int
    outer: Outer | None = None
    device: str = "cpu"

    def recipe(self) -> dict[str, Any]:
        """Return everything that the run's result depends on, as JSON."""
        task = self.task
        common = {
            "task": task.name, "batch": task.batch, "steps": task.steps, "rate": task.rate,
            "optimizer": task.optimizer, "momentum": task.momentum,
            "parameters": sum(p.numel() for p in task.make_model().parameters()),
            "method": self.method, "seed": self.seed, "workers": self.workers, "split": self.split,
        }  # fmt: skip
        if self.outer is not None:
            special = {"outer": list(self.outer), "dirichlet": task.dirichlet}
            return common | special | TWICE_CHOSEN[self.method].recipe()
        chosen = METHODS[self.method]
        special = {"bf16": 1} if chosen.bf16 else {}
        if task.warmup:
            special["warmup"] = task.warmup
        if self.device != "cpu":
            special["device"] = self.device
        return special | common | {
            "codec": spec_of(chosen, task), "feedback": chosen.feedback,
            "owns_momentum": chosen.owns_momentum,
        }  # fmt: skip

    def file(self, folder: Path) -> Path:
        outer = () if self.outer is None else self.outer
        parts = (self.task.name, self.method, f"{self.task.rate:g}", *outer, self.seed)
        return folder / "runs" / (re.sub(r"[^\w.-]+", "_", "-".join(map(str, parts))) + ".json")

    def __call__(self, path: Path) -> str:
        """Train, and write the run's file."""
        torch.set_num_threads(1)
        task, seed = self.task, self.seed
        if self.outer is None:
            row = train(task, METHODS[self.method], seed, self.workers, self.split)
        else:
            method = TWICE_CHOSEN[self.method]
            train_by = rounds.train if isinstance(method, rounds.RoundMethod) else stores.train
            row = train_by(task, method, self.outer, seed, self.workers, self.split)
        return self.write(row, path)

    def write(self, row: dict[str, Any], path: Path) -> str:
        """Write the run's file, by renaming, so that it is never incomplete. Return a line about
        it."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"recipe": self.recipe(), "row": row}) + "\n")
        part.rename(path)
        return f"{path.stem}: {row['accuracy']:.2f} %, {row['seconds']:.1f} s"


class Results:
    """The rows of a folder's runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[Run, dict[str, Any]] = {}
        (folder / "runs").mkdir(parents=True, exist_ok=True)

    def row(self, run: Run) -> dict[str, Any] | None:
        """Return the run's row; None if there is no run with this recipe."""
        path = self.path(run)
        if run not in self._rows and path.is_file():
            found = json.loads(path.read_text())
            if found["recipe"] == run.recipe():
                self._rows[run] = found["row"]
        return self._rows.get(run)

    def path(self, run: Run) -> Path:
        return run.file(self._folder)


@dataclass(frozen=True)
class Cell:
    """A method on a task. choices: the number of seeds for choosing its rate; 0: use the task's
    rate."""

    task: Task
    method: str
    seeds: int
    choices: int
    workers: int
    device: str = "cpu"

    def _outers(self) -> tuple[Outer | None, ...]:
        one = TWICE_CHOSEN.get(self.method)
        return _ONE_WAY if one is None else one.outers

    def _run(self, factor: float, outer: Outer | None, seed: int, split: str) -> Run:
        task = dataclasses.replace(self.task, rate=self.task.rate * factor)
        return Run(task, self.method, seed, split, self.workers, outer, self.device)

    def _trials(self, factor: float, outer: Outer | None) -> list[Run]:
        seeds = range(_CHOICE_SEED, _CHOICE_SEED + self.choices)
        return [self._run(factor, outer, seed, "validation") for seed in seeds]

    def _score(self, results: Results, factor: float, outer: Outer | None) -> float | None:
        rows = [results.row(run) for run in self._trials(factor, outer)]
        return statistics.mean(row["accuracy"] for row in rows) if rows and all(rows) else None

    def scores(self, results: Results) -> dict[float, float]:
        """Return the mean accuracy on the validation split, by the factor of the task's rate, with
        the first of the outer optimizers."""
        found = {f: self._score(results, f, self._outers()[0]) for f in GRID}
        return {factor: score for factor, score in found.items() if score is not None}

    def outer_scores(self, results: Results) -> dict[Outer | None, float]:
        """Return the same by outer optimizer, at the best rate so far."""
        best = best_factor(self.scores(results))
        found = {outer: self._score(results, best, outer) for outer in self._outers()}
        return {outer: score for outer, score in found.items() if score is not None}

    def missing(self, results: Results) -> list[Run]:
        """Return the runs that can be made now; tests only if rate and outer optimizer are
        known."""
        scores, outers = self.scores(results), self._outers()
        wanted = []
        if self.choices:
            factors = missing_factors(scores)
            wanted = [run for factor in factors for run in self._trials(factor, outers[0])]
            if not wanted:
                best = best_factor(scores)
                wanted = [run for outer in outers for run in self._trials(best, outer)]
                wanted = [run for run in wanted if results.row(run) is None]
        wanted = wanted or self.tests(results)
        return [run for run in wanted if results.row(run) is None]

    def tests(self, results: Results) -> list[Run]:
        """Return the test runs at the best rate and outer optimizer so far; none without one."""
        scores = self.scores(results)
        if self.choices and not scores:
            return []
        factor, outer = 1.0, self._outers()[0]
        if self.choices:
            factor, tried = best_factor(scores), self.outer_scores(results)
            outer = max(tried, key=tried.__getitem__)
        return [self._run(factor, outer, seed, "test") for seed in range(1, self.seeds + 1)]


def carry_out(cells: list[Cell], results: Results, jobs: int) -> None:
    """Make all missing runs, task by task and seed by seed, so that after an interruption runs are
    paired. If the device is not the CPU, the runs of a cell are made together."""
    if any(cell.device != "cpu" for cell in cells):
        _carry_out_together(cells, results)
        return
    order = list(dict.fromkeys(cell.task.name for cell in cells))
    flying: dict[Future[str], Run] = {}
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            wanted = [run for cell in cells for run in cell.missing(results)]
            wanted = [run for run in wanted if run not in flying.values()]
            wanted.sort(key=lambda run: (order.index(run.task.name), run.split == "test", run.seed))
            for run in wanted[: jobs - len(flying)]:
                flying[pool.submit(run, results.path(run))] = run
            if not flying:
                return
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                del flying[future]
                print(future.result(), flush=True)


def _carry_out_together(cells: list[Cell], results: Results) -> None:
    for cell in cells:
        if cell.method in TWICE_CHOSEN or not can_train(METHODS[cell.method]):
            raise SystemExit(f"{cell.method} trains its runs one by one: take --device cpu")
    for cell in cells:
        while wanted := cell.missing(results):
            trials = [Trial(run.task.rate, run.seed, run.split) for run in wanted]
            method, device = METHODS[cell.method], torch.device(cell.device)
            rows = train_together(cell.task, method, trials, cell.workers, device)
            for run, row in zip(wanted, rows, strict=True):
                line = run.write(row, results.path(run))
            print(f"{len(wanted)} runs, the last {line}", flush=True)


def choices_of(cell: Cell, results: Results) -> dict[str, Any]:
    """Return a cell's scores by rate, as JSON."""
    scores = cell.scores(results)
    tried = {f"{cell.task.rate * factor:g}": round(scores[factor], 3) for factor in scores}
    outers = {
        "outer " + ", ".join(f"{number:g}" for number in outer): round(score, 3)
        for outer, score in cell.outer_scores(results).items()
        if outer is not None
    }
    return {"task": cell.task.name, "method": cell.method, "validation": tried, "outers": outers}


def runs_together(task: Task, method: str) -> bool:
    """Return whether the method applies to the task: momentum of the exchange requires SGD, and
    splits by labels require rounds."""
    if method in rounds.METHODS:
        return task.optimizer != "muon"
    if method in stores.METHODS:
        return task.optimizer == "sgd" and task.dirichlet is None
    return task.dirichlet is None and (task.optimizer == "sgd" or not METHODS[method].owns_momentum)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs that make runs; drift.py has other
    defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/accuracy"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--choices", type=int, default=2, help="seeds that choose a rate; 0: none")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(NAMED), help="fp32 is the baseline")
    parser.add_argument("--steps_part", type=int, default=1, help="so many times fewer steps")
    parser.add_argument("--batch_part", type=int, default=1, help="so many times smaller batches")
    parser.add_argument("--rate_part", type=float, default=1, help="so many times smaller rates")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--device", default="cpu", help="cuda: a cell's runs side by side")
    return parser


def cells_of(arguments: argparse.Namespace, **of_task: Any) -> list[Cell]:
    """Return every method on every task that it applies to. of_task: fields of all tasks."""
    tasks = [
        dataclasses.replace(
            task, steps=task.steps // arguments.steps_part,
            batch=task.batch // arguments.batch_part, rate=task.rate / arguments.rate_part,
        )
        for task in (TASKS[name] for name in arguments.tasks.split(","))
    ]  # fmt: skip
    return [
        Cell(dataclasses.replace(task, **of_task), method, arguments.seeds, arguments.choices,
             arguments.workers, arguments.device)
        for task in tasks for method in arguments.methods.split(",") if runs_together(task, method)
    ]  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--report", action="store_true", help="of the runs that are there")
    parser.add_argument("--short", action="store_true", help="one seed, the MLP, few steps")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.tasks, arguments.methods = "mlp", ",".join(_SHORT_METHODS)
        arguments.seeds, arguments.choices, arguments.steps_part = 1, 0, _SHORT_STEPS
    cells, results = cells_of(arguments), Results(arguments.out)
    if not arguments.report:
        carry_out(cells, results, arguments.jobs)
    found = [results.row(run) for cell in cells for run in cell.tests(results)]
    rows = [row for row in found if row is not None]
    with_rows = {(row["task"], row["method"]) for row in rows}
    chosen = [
        choices_of(cell, results)
        for cell in cells
        if (cell.task.name, cell.method) in with_rows and cell.choices
    ]
    write_report(arguments.out, rows, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
