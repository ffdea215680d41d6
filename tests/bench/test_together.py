"""Runs that are trained side by side give the same results as one after the other."""

import dataclasses
import itertools

import pytest
import torch

from bench.accuracy import run
from bench.accuracy.run import Cell, Results, carry_out
from bench.accuracy.tasks import TASKS, Jargon
from bench.accuracy.together import ManyTwoHop, Trial, train_together
from bench.accuracy.training import METHODS, train
from bench.accuracy.two_hop import TwoHop

CPU = torch.device("cpu")
WORKERS = 2
NUMEL = 21 * 256 + 37  # shards of two lengths, the last one ends in a partial block


class Little(Jargon):
    """Text with a short validation set and a short test set."""

    def validation(self):
        return itertools.islice(super().validation(), 1)

    def test(self):
        return itertools.islice(super().test(), 2)


@pytest.mark.parametrize(
    ("name", "method", "near", "length"),
    [
        ("gpt AdamW", "fp32", 5e-4, 40),
        # Leaving out its bf16 gradients, or its codec, changes a loss by more than this.
        ("gpt AdamW", "adaptive 2 bf16 gradients", 5e-4, 40),
        # Using int8 for all steps, or for none, changes a loss by more than this.
        ("gpt AdamW", "adaptive 2 after int8", 5e-4, 40),
        ("gpt Muon", "fp32", 2e-3, 20),
        ("charlm", "fp32", 2e-3, 20),
    ],
)
def test_a_run_is_the_one_that_is_trained_alone(name, method, near, length):
    task, method = TASKS[name], METHODS[method]
    task = dataclasses.replace(task, steps=length, batch=4, data=Little())
    trials = [Trial(task.rate, 1, "validation"), Trial(task.rate / 2, 2, "test")]
    rows = train_together(task, method, trials, WORKERS, CPU)
    for trial, row in zip(trials, rows, strict=True):
        alone = train(
            dataclasses.replace(task, rate=trial.rate), method, trial.seed, WORKERS, trial.split
        )
        steps, losses = zip(*row["curve"], strict=True)
        assert (row["seed"], row["rate"]) == (alone["seed"], alone["rate"])
        assert list(steps) == [step for step, _ in alone["curve"]]
        assert losses == pytest.approx([loss for _, loss in alone["curve"]], rel=near)
        assert row["loss"] == pytest.approx(alone["loss"], rel=2e-3)
        assert row["ratio"] == alone["ratio"]
        assert row["accuracy"] == pytest.approx(alone["accuracy"], abs=0.3)
        assert row.keys() == alone.keys()


@pytest.mark.parametrize("method", ["fp32", "int8", "int4", "int4 without feedback", "adaptive 2"])
@pytest.mark.parametrize("numel", [NUMEL, 16 * 256])
def test_many_exchanges_have_the_bits_of_each(method, numel):
    method, generator = METHODS[method], torch.Generator().manual_seed(1)
    many = ManyTwoHop(4, numel, method.codec, method.feedback)
    alone = [TwoHop(4, numel, method.codec, feedback=method.feedback) for _ in range(3)]
    sizes = torch.logspace(-6, 0, numel)
    for _ in range(4):
        gradients = torch.randn((3, 4, numel), generator=generator) * sizes
        means = many.all_reduce(gradients)
        for mean, group, each in zip(means, alone, gradients, strict=True):
            assert torch.equal(
                mean.view(torch.int32), group.all_reduce(list(each)).view(torch.int32)
            )
    assert many.stats()["wire_bytes"] == alone[0].stats()["wire_bytes"]


def test_a_cells_runs_go_side_by_side_and_are_found_again(tmp_path, monkeypatch):
    task = dataclasses.replace(TASKS["gpt AdamW"], steps=40, batch=2, data=Little())
    cell = Cell(task, "fp32", seeds=2, choices=1, workers=2, device="meta")
    calls = []

    def train(task, method, trials, workers, device):
        calls.append((str(device), [(trial.rate, trial.seed, trial.split) for trial in trials]))
        return train_together(task, method, trials, workers, CPU)

    monkeypatch.setattr(run, "train_together", train)
    carry_out([cell], Results(tmp_path), jobs=1)
    tried = {rate for _, trials in calls for rate, _, split in trials if split == "validation"}
    assert tried >= {task.rate / 2, task.rate, task.rate * 2}
    assert calls[-1][0] == "meta"
    assert [(seed, split) for _, seed, split in calls[-1][1]] == [(1, "test"), (2, "test")]
    done = len(calls)
    carry_out([cell], Results(tmp_path), jobs=1)
    assert len(calls) == done
    on_a_processor = dataclasses.replace(cell, device="cpu")
    assert on_a_processor.missing(Results(tmp_path))  # other sums, so another recipe


def test_what_cannot_go_side_by_side_is_said(tmp_path):
    cell = Cell(TASKS["gpt AdamW"], "onebit", seeds=1, choices=0, workers=2, device="cuda")
    with pytest.raises(SystemExit, match="onebit trains its runs one by one"):
        carry_out([cell], Results(tmp_path), jobs=1)
