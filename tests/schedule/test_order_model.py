"""The orders of chunks and their lanes, model-checked with spin: every interleaving of order.pml
(announced chunks) and of predicted.pml (predicted ones, beside announced ones)."""

import pathlib
import re
import shutil
import subprocess

import pytest

ANNOUNCED, PREDICTED = "order.pml", "predicted.pml"
NOBODY = 9
DEFAULTS = {
    ANNOUNCED: {"LANES": 1, "NEVER": 0, "DIES": NOBODY, "LOCAL_ORDER": 0},
    PREDICTED: {
        **{"P": 4, "A": 0, "LANES": 1, "FAULT": 0},
        **{"NO_OLDEST": 0, "LOCAL_ORDER": 0, "SHARED_LANES": 0},
    },
}
NEVER, DIES = 1, 2  # FAULT of predicted.pml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed"),
]


def errors(folder: pathlib.Path, model: str = ANNOUNCED, **settings: int) -> tuple[int, int, str]:
    """(errors, states, the verifier's words) of an exhaustive search."""
    chosen = DEFAULTS[model] | settings
    assert chosen.keys() == DEFAULTS[model].keys()
    defines = [f"-D{name}={value}" for name, value in chosen.items()]
    source = pathlib.Path(__file__).parent / model
    subprocess.run(["spin", "-a", *defines, source], cwd=folder, check=True, capture_output=True)
    # These state spaces are small: compiling with optimisation takes longer than it saves.
    compiler = ["gcc", "-O0", "-DSAFETY", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    search = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, check=False, capture_output=True, text=True, timeout=300
    )
    words = search.stdout
    assert "max search depth too small" not in words
    found = int(re.search(r"errors: (\d+)", words).group(1))
    return found, int(re.search(r"(\d+) states, stored", words).group(1)), words


@pytest.mark.parametrize("lanes", [1, 2])
def test_without_a_fault_all_chunks_finish(tmp_path, lanes):
    found, states, words = errors(tmp_path, LANES=lanes)
    assert found == 0, words
    assert states > 10_000  # it looked at something


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("fault", [{"NEVER": 1}, {"DIES": 0}, {"DIES": 1}], ids=str)
def test_a_chunk_that_never_comes_and_a_dying_rank_end_on_all_ranks(tmp_path, lanes, fault):
    found, states, words = errors(tmp_path, LANES=lanes, **fault)
    assert found == 0, words
    assert states > 10_000


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_model_finds_the_deadlock_of_a_local_order(tmp_path, lanes):
    found, _, words = errors(tmp_path, LANES=lanes, LOCAL_ORDER=1)
    assert found > 0
    assert "assertion violated" in words  # a deadline passed, and nobody was at fault


@pytest.mark.parametrize("chunks", [{"P": 4}, {"P": 2, "A": 2}], ids=str)
def test_without_a_fault_all_predicted_and_announced_chunks_finish(tmp_path, chunks):
    found, states, words = errors(tmp_path, PREDICTED, **chunks)
    assert found == 0, words
    assert states > 100_000


@pytest.mark.parametrize(
    "settings",
    [
        {"FAULT": NEVER, "P": 3},
        {"FAULT": NEVER, "P": 2, "A": 1},
        {"FAULT": DIES, "P": 3},
        {"FAULT": DIES, "P": 2, "A": 1},
    ],
    ids=str,
)
def test_a_fault_in_the_predicted_order_ends_on_all_ranks(tmp_path, settings):
    found, states, words = errors(tmp_path, PREDICTED, **settings)
    assert found == 0, words
    assert states > 25_000


@pytest.mark.parametrize(
    "mistake",
    [{"NO_OLDEST": 1, "P": 3}, {"LOCAL_ORDER": 1, "P": 3}, {"SHARED_LANES": 1, "P": 2, "A": 1}],
    ids=str,
)
def test_the_model_finds_the_deadlock_of_a_mistaken_predicted_order(tmp_path, mistake):
    found, _, words = errors(tmp_path, PREDICTED, **mistake)
    assert found > 0
    assert "assertion violated (dead||" in words  # a deadline passed, and nobody was at fault
