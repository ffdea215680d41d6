"""The harness of all Python benchmarks: subjects take turns until results are precise enough, and a
result says where it comes from.

A subject is a name and a context manager that yields its `turn`: a function that takes a number of
steps and returns the seconds of each. All subjects of a run live in the same processes and take
turns, so that they run under the same conditions; the time of a turn is its median step on the
slowest rank. Figures are ratios of successive turns, never absolute times.

Results are JSON with the same fields: commit, machine, versions, argv, rows. Timing never fails a
test."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench import lab

Turn = Callable[[int], list[float]]  # steps -> seconds of each
Subjects = Mapping[str, AbstractContextManager[Turn]]
Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "integrations/python")])
LEAST_TURNS = 5
PRECISION = 0.02  # the relative precision of a ratio at which a measurement ends
_RANK_OUT = "BENCH_RANK_OUT"  # set in a rank: the file for rank 0's rows


# Measuring; runs in the ranks.


def measure(subjects: Subjects, *, steps: int = 5, seconds: float = 20.0) -> list[Row]:
    """Measure subjects in turns of `steps` steps; the first one is the baseline. All ranks call it
    and get the same rows.

    Each round has another order, because a subject that follows the baseline finds that one's
    packets in the link's queue, which costs a tenth of a step on links with latency. It ends after
    at least LEAST_TURNS, when the 95 % interval of every ratio's median is within +- PRECISION of
    it, or after `seconds` per subject.

    Returns:
        Rows with `ms`, the median over turns; `low_ms` and `high_ms`, the middle half; `ratio`, the
        median of baseline / subject over pairs of turns of one round; and its interval `ratio_low`,
        `ratio_high`.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    with contextlib.ExitStack() as stack:
        turns = {name: stack.enter_context(subject) for name, subject in subjects.items()}
        end = time.monotonic() + seconds * len(turns)
        order, dice = [*turns], random.Random(0)  # the same on all ranks
        while True:
            dice.shuffle(order)
            for name in order:
                times[name].append(_slowest(turns[name], steps))
            done = precise(times) or time.monotonic() > end
            if _agreed(done and len(times[name]) >= LEAST_TURNS):
                return rows_of(times)


def _slowest(turn: Turn, steps: int) -> float:
    """Return the seconds of the median step on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    seconds = torch.tensor(statistics.median(turn(steps)))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _agreed(done: bool) -> bool:
    """Return rank 0's value on every rank."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor(int(done))
    dist.broadcast(answer, 0)
    return bool(answer)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of `values`, and the ends of its 95 % confidence interval by order
    statistics (Conover, Practical Nonparametric Statistics, section 3.2)."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def ratios(baseline: Sequence[float], times: Sequence[float]) -> list[float]:
    return [base / mine for base, mine in zip(baseline, times, strict=True)]


def precise(times: Mapping[str, Sequence[float]]) -> bool:
    baseline = next(iter(times.values()))
    found = (interval(ratios(baseline, each)) for each in times.values())
    return all(high - low <= 2 * PRECISION * middle for middle, low, high in found)


def rows_of(times: Mapping[str, Sequence[float]]) -> list[Row]:
    baseline = next(iter(times.values()))
    rows = []
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        ratio, ratio_low, ratio_high = interval(ratios(baseline, each))
        rows.append({
            "subject": name, "ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high,
            "ratio": ratio, "ratio_low": ratio_low, "ratio_high": ratio_high, "turns": len(each),
        })  # fmt: skip
    return rows


# Ranks. They run the benchmark's program again.


def is_rank() -> bool:
    return _RANK_OUT in os.environ


def be_rank(rows: Callable[[], Any]) -> int:
    """In a rank: join torch's group, measure on one thread, and pass rank 0's rows (or any other
    JSON value) to the parent."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = rows()
    if dist.get_rank() == 0:
        hand_over(found)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def hand_over(found: Any) -> None:
    """In rank 0: pass a JSON value to the parent."""
    Path(os.environ[_RANK_OUT]).write_text(json.dumps(found))


def run_ranks(
    place: lab.Lab,
    argv: Sequence[str],
    timeout_s: float,
    module: str = "bench",
    python: str = sys.executable,
    **settings: object,
) -> Any:
    """Run `python -m bench`, or another module, with the arguments `argv` as every rank of a lab.
    Return rank 0's rows. settings: environment variables. RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        settings |= {_RANK_OUT: out, "PYTHONPATH": PYTHONPATH}
        words = [f"{name}={value}" for name, value in settings.items()]
        place.run(["env", *words, python, "-m", module, *argv], timeout_s)
        return json.loads(out.read_text())


def simulate(kind: str, lines: Iterable[str]) -> list[Row]:
    """Run bench/simulate.cc; return a row for each line of its input."""
    done = subprocess.run(
        [ROOT / "build/bench/simulate", kind], input="\n".join(lines), stdout=subprocess.PIPE,
        check=True, text=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


# Results.


def commit() -> str:
    """Return the measured commit, followed by + if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))


def machine() -> dict[str, Any]:
    information = Path("/proc/cpuinfo").read_text()
    models = re.findall(r"model name\s*: (.*)", information)
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [re.findall(r"Model:\s*(.*)", gpu.read_text()) for gpu in gpus]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    } | ({"gpus": [name for found in names for name in found]} if names else {})


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, torch and the installed `packages`."""
    found = {"python": platform.python_version()}
    for package in ("torch", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def source(*packages: str) -> dict[str, Any]:
    """Return a result's fields other than `rows`: commit, machine, versions and command line."""
    argv = [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    return {
        "commit": commit(), "machine": machine(), "versions": versions(*packages), "argv": argv,
    }  # fmt: skip


def headline(result: Mapping[str, Any]) -> str:
    """Return a result's source as one line, for tables made from it."""
    return (
        f"{place(result['machine'])}, torch {result['versions'].get('torch')}; "
        f"`{' '.join(result['argv'])}` at {result['commit']}"
    )


def place(machine: Mapping[str, Any]) -> str:
    """Return a result's machine as text."""
    return ", ".join([machine["processor"], f"{machine['cores']} cores", *machine.get("gpus", ())])


def write(out: Path, rows: Iterable[Row], *packages: str, **more: Any) -> dict[str, Any]:
    """Write a result file, and return its contents. more: other fields."""
    result = source(*packages) | more | {"rows": [*rows]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def report(
    folder: Path, name: str, title: str, rows: Iterable[Row], text: str, **more: Any
) -> None:
    """Write NAME.json, as write() does, and NAME.md with its source and the text. Print the
    text."""
    result = write(folder / f"{name}.json", rows, **more)
    (folder / f"{name}.md").write_text(f"# {title}\n\n{headline(result)}\n\n{text}\n")
    print(text)


@contextlib.contextmanager
def picture(path: Path, *shape: int, **options: Any) -> Iterator[Any]:
    """Yield the axes of a picture, as pyplot.subplots() makes them; write it at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, **options)
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(rows: Sequence[Row], columns: Mapping[str, str] | None = None) -> str:
    """Return a Markdown table. columns: a format of a row's fields ("{ms:.1f}") by its heading; a
    row that lacks a field has an empty cell. None: all fields that are numbers or words."""
    if columns is None:
        fields = dict.fromkeys(
            field for row in rows for field, value in row.items()
            if isinstance(value, int | float | str)
        )  # fmt: skip

        def word(value: Any) -> str:
            return (
                f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
            )

        return markdown(fields, ([word(row.get(field)) for field in fields] for row in rows))

    def cell(row: Row, form: str) -> str:
        with contextlib.suppress(KeyError):
            return form.format_map(row)
        return ""

    return markdown(columns, ([cell(row, form) for form in columns.values()] for row in rows))


def markdown(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Return the lines of a table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
