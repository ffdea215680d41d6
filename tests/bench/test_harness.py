"""The harness tells subjects apart, stops when its result is certain enough, and records where a
result comes from."""

import contextlib
import json
import random
import sys

import pytest
import ranks

from bench import __main__ as bench
from bench import harness


class Steps:
    """A subject whose steps take the given seconds, and that counts its turns."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.turns = seconds, 0

    def __enter__(self):
        return self._turn

    def __exit__(self, *_):
        self.turns = -self.turns  # closed

    def _turn(self, steps: int) -> list[float]:
        self.turns += 1
        return [self._seconds[self.turns % len(self._seconds)]] * steps


def measure(rank: int):
    """The ranks measure different times: the slowest rank's time counts."""
    base, half, noisy = Steps(0.2 + 0.2 * rank), Steps(0.2), Steps(0.1, 0.4)
    steady = harness.measure({"base": base, "half": half}, seconds=60.0)
    bounded = harness.measure({"half": Steps(0.2), "noisy": noisy}, seconds=0.0)
    return steady, bounded, base.turns, half.turns, noisy.turns


def test_subjects_take_turns_until_the_interval_is_narrow_or_time_is_over():
    results = ranks.run(measure)
    assert results[0] == results[1], "all ranks stop together, with the same rows"
    (base, half), (_, noisy), *turns = results[0]
    assert turns == [-harness.LEAST_TURNS] * 3, "each had its turns and was closed"
    assert base["ms"] == pytest.approx(400) and base["ratio"] == 1.0
    assert half["ratio"] == pytest.approx(2.0)
    assert noisy["ratio_low"] < noisy["ratio"] < noisy["ratio_high"] or noisy["turns"] == 5


def orders(rank: int) -> list[str]:
    """Return the pairs of subjects that had consecutive turns."""
    turns: list[str] = []

    @contextlib.contextmanager
    def subject(name: str):
        def turn(steps: int) -> list[float]:
            turns.append(name)
            return [random.random()] * steps

        yield turn

    harness.measure({name: subject(name) for name in "abc"}, seconds=0.0)
    return turns


def test_nobody_always_follows_the_baseline():
    first, second = ranks.run(orders)
    assert first == second, "the ranks' collectives match"
    rounds = ["".join(first[at : at + 3]) for at in range(0, len(first), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({each[each.index("a") :][1:2] for each in rounds}) > 1, rounds


def test_the_interval_of_a_median_holds_it():
    middle, low, high = harness.interval(range(101))
    assert (middle, low, high) == (50, 40, 61)
    assert harness.interval([3.0]) == (3.0, 3.0, 3.0)
    assert not harness.precise({"a": [1.0] * 20, "b": [1.0, 2.0] * 10})
    assert harness.precise({"a": [1.0] * 20, "b": [2.0] * 20})


def test_a_result_says_where_it_comes_from(tmp_path):
    written = harness.write(tmp_path / "new" / "rows.json", [{"ms": 1.0}], choices=[1])
    assert written == json.loads((tmp_path / "new" / "rows.json").read_text())
    assert {"commit", "machine", "versions", "argv", "rows", "choices"} == set(written)
    assert len(written["commit"].rstrip("+")) == 12
    assert written["machine"]["processor"] in harness.headline(written)


def test_tables_leave_unknown_cells_empty():
    text = harness.table([{"a": 1.234}, {"b": "x"}], {"A": "{a:.1f}", "B": "{b}"})
    assert text.splitlines()[2:] == ["| 1.2 |  |", "|  | x |"]


def test_bandwidths_are_those_of_nccl_tests():
    row = bench.network_row({"subject": "int4", "bytes": 1 << 30, "ms": 1e3}, 4)
    assert row["algbw"] == pytest.approx(1.073741824)
    assert row["busbw"] == pytest.approx(1.5 * row["algbw"])


@pytest.mark.slow
def test_each_kind_prints_rows(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    argv = ["bench", "ddp", "--links=loopback", "--ways=plain,int4", "--seconds=0", "--width=64"]
    monkeypatch.setattr(sys, "argv", [*argv, f"--out={out}"])
    assert bench.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["subject"], row["link"], row["world"]) for row in rows] == [
        ("plain", "loopback", 2), ("int4", "loopback", 2),
    ]  # fmt: skip


def test_a_table_without_columns_has_all_numbers_and_words():
    rows = [{"a": 1.23456, "b": "x", "c": [1]}, {"a": 2, "d": True, "b": None}]
    text = harness.table(rows)
    assert text.splitlines() == [
        "| a | b | d |", "| --- | --- | --- |", "| 1.235 | x |  |", "| 2 |  | True |",
    ]  # fmt: skip
