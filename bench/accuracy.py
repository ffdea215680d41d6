"""The cost of compression in accuracy: every method on every task over paired seeds.

    python bench/accuracy.py --out build/accuracy            # resumes where it was stopped
    python bench/accuracy.py --short --out build/accuracy    # minutes, for a look

Each run is a file in OUT/runs; a run whose recipe is the same is not repeated. Writes
OUT/accuracy.json, accuracy.md, accuracy.png and curves.png."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from accuracy_report import write_report
from tasks import TASKS, Task
from tqdm import tqdm
from training import METHODS, spec_of, train

_SHORT_STEPS = 8  # times fewer
_SHORT_METHODS = ("fp32", "int4", "adaptive 2", "adaptive 1", "onebit", "topk 0.1 % DGC")


def recipe_of(task: Task, method: str, seed: int, workers: int) -> dict[str, Any]:
    """Everything that a run's result depends on, as JSON."""
    chosen = METHODS[method]
    delay = {"delay": 1} if chosen.delay else {}
    return delay | {
        "task": task.name, "batch": task.batch, "steps": task.steps, "rate": task.rate,
        "momentum": task.momentum,
        "parameters": sum(p.numel() for p in task.make_model().parameters()),
        "method": method, "codec": spec_of(chosen, task), "feedback": chosen.feedback,
        "owns_momentum": chosen.owns_momentum, "seed": seed, "workers": workers,
    }  # fmt: skip


def file_of(folder: Path, recipe: dict[str, Any]) -> Path:
    name = "-".join(str(recipe[key]) for key in ("task", "method", "seed"))
    return folder / "runs" / (re.sub(r"[^\w.-]+", "_", name) + ".json")


def finished(path: Path, recipe: dict[str, Any]) -> bool:
    return path.is_file() and json.loads(path.read_text())["recipe"] == recipe


def run(task: Task, method: str, seed: int, workers: int, path: Path) -> str:
    """Trains once and writes the run's file. Made whole by renaming, so a stop leaves no half."""
    torch.set_num_threads(1)
    row = train(task, METHODS[method], seed, workers)
    recipe = recipe_of(task, method, seed, workers)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"recipe": recipe, "row": row}) + "\n")
    part.rename(path)
    return f"{task.name} {method} {seed}: {row['accuracy']:.2f} %"


def machine() -> str:
    with open("/proc/cpuinfo") as info:
        models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {len(models)} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/accuracy"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(METHODS), help="fp32 is the baseline")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--short", action="store_true", help="one seed, the MLP, few steps")
    arguments = parser.parse_args()
    tasks = [TASKS[name] for name in arguments.tasks.split(",")]
    methods, seeds = arguments.methods.split(","), range(1, arguments.seeds + 1)
    if arguments.short:
        mlp = TASKS["mlp"]
        tasks = [dataclasses.replace(mlp, steps=mlp.steps // _SHORT_STEPS)]
        methods, seeds = list(_SHORT_METHODS), range(1, 2)
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    # Seed by seed, so that a stop leaves complete pairs.
    wanted = [(t, m, s, arguments.workers) for s in seeds for t in tasks for m in methods]
    paths = {job: file_of(arguments.out, recipe_of(*job)) for job in wanted}
    todo = [job for job in wanted if not finished(paths[job], recipe_of(*job))]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        jobs = [pool.submit(run, *job, paths[job]) for job in todo]
        bar = tqdm(as_completed(jobs), "accuracy", len(jobs), unit="run", disable=not jobs)
        for job in bar:
            bar.set_postfix_str(job.result())
    rows = [json.loads(paths[job].read_text())["row"] for job in wanted]
    command = "python bench/accuracy.py " + " ".join(sys.argv[1:])
    print(write_report(arguments.out, rows, machine(), command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
