"""The accuracy and ratio benchmarks run, resume, and tell methods apart. The published figures come
from the full run (make accuracy); these tests check only what holds for every method."""

import dataclasses
import json
import math
import pathlib

import pytest
import torch
from ranks import run_program

from bench.accuracy import report as accuracy_report
from bench.accuracy import rounds, stores
from bench.accuracy import run as accuracy
from bench.accuracy.tasks import TASKS

# One worker runs them all, since they share the benchmark's run.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("accuracy")]


# The methods that the tests run, and enough steps to tell them apart.
FEWER = """
from bench.accuracy import run

run._SHORT_STEPS = 12
run._SHORT_METHODS = ("fp32", "int4", "onebit", "topk 0.1 % DGC")
raise SystemExit(run.main())
"""


def run_short(folder: pathlib.Path) -> None:
    (folder / "fewer.py").write_text(FEWER)
    run_program(folder / "fewer.py", "--short", "--out", str(folder), world=1)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("accuracy")
    run_short(folder)
    return folder


def test_every_method_learns(short):
    rows = {row["method"]: row for row in json.loads((short / "accuracy.json").read_text())["rows"]}
    assert rows["fp32"]["accuracy"] > 80
    for method, ratio in {"int4": 7.7, "onebit": 12, "topk 0.1 % DGC": 20}.items():
        assert rows[method]["accuracy"] > rows["fp32"]["accuracy"] - 6, method
        assert rows[method]["ratio"] > ratio


def test_finished_runs_are_not_repeated(short):
    files = {path: path.stat().st_mtime_ns for path in (short / "runs").iterdir()}
    spoilt = next(iter(files))
    whole = spoilt.read_text()
    spoilt.write_text(json.dumps(json.loads(whole) | {"recipe": {}}))
    run_short(short)
    for path, before in files.items():
        assert (path.stat().st_mtime_ns == before) == (path != spoilt)
    row, again = (json.loads(text)["row"] for text in (whole, spoilt.read_text()))
    assert row["accuracy"] == again["accuracy"], "the same seed gives the same run"


def rows_of(method: str, accuracies: list[float]) -> list[dict]:
    return [
        {"task": "t", "method": method, "seed": seed, "accuracy": accuracy, "loss": 1.0,
         "train_loss": 1.0, "ratio": 8.0, "rate": 0.1}
        for seed, accuracy in enumerate(accuracies)
    ]  # fmt: skip


def test_the_table_pairs_seeds():
    rows = rows_of("fp32", [80.0, 90.0]) + rows_of("int4", [79.9, 89.7])
    summary = accuracy_report.summarise(rows)[1]
    assert (summary["pairs"], summary["gain"]) == (2, "-0.20 ± 0.10")
    assert "-0.20 ± 0.10" in accuracy_report.table(rows)


def test_the_table_of_a_method_whose_baseline_is_still_to_run():
    assert "| int4 |" in accuracy_report.table(rows_of("int4", [79.9]))


def test_a_method_is_tested_at_the_rate_that_validation_chose(tmp_path):
    task = accuracy.TASKS["mlp"]
    cell = accuracy.Cell(task, "int4", seeds=2, choices=1, workers=4)
    results = accuracy.Results(tmp_path)

    def finish(heights: dict[float, float]) -> None:
        for run in cell.missing(results):
            row = {"accuracy": heights[run.task.rate / task.rate], "seed": run.seed}
            text = json.dumps({"recipe": run.recipe(), "row": row})
            run.file(tmp_path).write_text(text)

    heights = {0.25: 70.0, 0.5: 80.0, 1.0: 75.0, 2.0: math.nan}
    assert {run.split for run in cell.missing(results)} == {"validation"}
    finish(heights)
    assert [run.task.rate for run in cell.missing(results)] == [0.25 * task.rate]
    finish(heights)
    tests = cell.missing(results)
    assert [(run.task.rate, run.seed) for run in tests] == [(0.5 * task.rate, s) for s in (1, 2)]
    assert {run.split for run in tests} == {"test"}
    choosing = {run.seed for factor in heights for run in cell._trials(factor, None)}
    assert choosing.isdisjoint({1, 2}), "no choice has seen the seeds of the results"


def test_ratio_measures_real_gradients(tmp_path):
    run_program("bench.accuracy.ratio", "--tasks", "mlp", "--out", str(tmp_path), world=1)
    rows = json.loads((tmp_path / "ratio.json").read_text())["rows"]
    once = [row for row in rows if "workers" not in row]
    error = {(row["source"], row["codec"]): row["error"] for row in once}
    assert error["Gaussian noise", "onebit"] == pytest.approx(0.363, abs=0.005)  # 1 - 2 / pi
    assert error["mlp", "adaptive:bits=2"] < error["mlp", "int4"]
    assert error["mlp", "int8"] < error["mlp", "int4:hadamard=1"] < error["mlp", "int4"]
    mean = {(row["workers"], row["codec"]): row["error"] for row in rows if "workers" in row}
    for workers in (4, 8):
        assert mean[workers, "int8"] < mean[workers, "adaptive:bits=4"] < mean[workers, "int4"]
        assert mean[workers, "int4"] < 0.1


def test_a_poisoner_spoils_the_mean_and_not_centered_clipping():
    task = dataclasses.replace(TASKS["mlp Dirichlet 0.5"], steps=96)
    found = {
        name: rounds.train(task, rounds.METHODS[name], (1.0, 0.0), 1, 5, "validation")["accuracy"]
        for name in ("mean clean", "mean sign", "centered_clip sign")
    }
    assert found["mean sign"] < 30 < 55 < found["centered_clip sign"], found
    assert found["mean clean"] > 55, found


def test_workers_of_a_server_learn_in_ssp():
    task = dataclasses.replace(TASKS["mlp"], steps=60)
    row = stores.train(task, stores.METHODS["store ssp int4"], (0.6,), 1, 2, "validation")
    assert row["accuracy"] > 65 and 7 < row["ratio"] < 8, row


def test_members_have_all_rows_and_unlike_labels():
    parts = rounds.split_of(TASKS["mlp Dirichlet 0.1"], 8, 3)
    rows = torch.cat(parts)
    task = TASKS["mlp"].data
    assert len(rows.unique()) == len(rows) == task.train_size
    shares = [task.batch(part)[1].bincount(minlength=10).max() / len(part) for part in parts]
    assert max(shares) > 0.4, shares  # of its most frequent label
    even = [task.batch(part)[1].bincount(minlength=10).max() / len(part)
            for part in rounds.split_of(TASKS["mlp"], 8, 3)]  # fmt: skip
    assert max(even) < 0.12, even


def test_rates_and_outer_optimizers_are_chosen_before_the_tests(tmp_path):
    """Outer optimizers are tried only at the best rate, and the best pair is then tested."""
    results = accuracy.Results(tmp_path)
    cell = accuracy.Cell(TASKS["mlp"], "DiLoCo int4", seeds=2, choices=1, workers=4)
    asked = []
    while wanted := cell.missing(results):
        for run in wanted:
            asked.append((run.task.rate, run.outer, run.split))
            score = 80 - abs(run.task.rate - 0.05) * 100 + 3 * (run.outer == (0.7, 0.5))
            row = {"accuracy": score}
            results.path(run).write_text(json.dumps({"recipe": run.recipe(), "row": row}))
    outers = rounds.METHODS["DiLoCo int4"].outers
    assert [a for a in asked if a[2] == "test"] == [(0.05, (0.7, 0.5), "test")] * 2
    tried = [a[:2] for a in asked if a[2] == "validation"]
    assert sorted(tried) == sorted(
        [(rate, outers[0]) for rate in (0.025, 0.05, 0.1, 0.2)]
        + [(0.05, outer) for outer in outers[1:]]
    )
