"""The accuracy of programs that differ by one word: what a row says of the runs."""

import pytest

from bench import harness
from bench.accuracy import one_word

ACCURACIES = {"gloo": [90.0, 80.0], "compress()": [89.0, 81.0], "thinwire": [89.5, 81.1]}
BITS = {"gloo": ["a", "b"], "compress()": ["c", "d"], "thinwire": ["c", "e"]}


def runs_of(program: str) -> list[dict]:
    return [
        {"program": program, "way": way, "seed": seed + 1, "accuracy": ACCURACIES[way][seed],
         "ratio": None if way == "gloo" else 7.9, "sha256": BITS[way][seed]}
        for seed in (0, 1) for way in one_word.WAYS
    ]  # fmt: skip


def test_a_row_pairs_the_seeds_of_its_program():
    row = one_word.summary_of("FSDP2", runs_of("FSDP2") + runs_of("HSDP"))
    assert row["difference"] == pytest.approx(0.3)  # of 0.5 and 0.1
    assert row["standard_error"] == pytest.approx(0.2)
    assert row["spread"] == pytest.approx(32**0.5)  # of 89 and 81
    assert (row["same_bits"], row["seeds"]) == (1, 2)
    line = harness.table([row], one_word.COLUMNS).splitlines()[-1]
    assert "| 85.00 | 85.00 | 85.30 | +0.300 ± 0.200 | 5.657 | 1 of 2 | 7.9 x |" in line
