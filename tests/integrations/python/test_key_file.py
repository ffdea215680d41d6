"""THINWIRE_KEY_FILE: only ranks that hold the same key form a group."""

import os
from pathlib import Path

import torch
from ranks import outcomes_of, run
from thinwire.torch import all_reduce

KEY = "0123456789abcdef0123456789abcdef"


def reduce_with(rank: int, folder: str, keys: list[str | None], mode: int) -> list[float]:
    if keys[rank] is not None:
        path = Path(folder) / f"key{rank}"
        path.write_text(keys[rank])
        path.chmod(mode)
        os.environ["THINWIRE_KEY_FILE"] = str(path)
    tensor = torch.full((4,), float(rank))
    all_reduce(tensor, name="x")
    return tensor.tolist()


def test_ranks_with_one_key_reduce(tmp_path):
    assert run(reduce_with, str(tmp_path), [KEY, KEY + "\n"], 0o600) == [[1.0] * 4] * 2


def test_another_key_is_a_mismatch_on_every_rank(tmp_path):
    for outcome in outcomes_of(reduce_with, str(tmp_path), [KEY, KEY[::-1]], 0o600):
        assert outcome.error == "MismatchError", outcome.trace
        assert "copy one file to every rank" in outcome.message


def test_a_key_on_one_rank_only_is_a_mismatch_on_every_rank(tmp_path):
    for outcome in outcomes_of(reduce_with, str(tmp_path), [None, KEY], 0o600):
        assert outcome.error == "MismatchError", outcome.trace
        assert "rank 1 has a key file, but rank 0 has none" in outcome.message


def test_a_key_that_others_can_read_is_refused(tmp_path):
    for outcome in outcomes_of(reduce_with, str(tmp_path), [KEY, KEY], 0o644):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "expected 0600" in outcome.message
