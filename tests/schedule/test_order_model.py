"""The order of chunks and the lanes, model-checked: every interleaving of order.pml, with spin."""

import pathlib
import re
import shutil
import subprocess

import pytest

MODEL = pathlib.Path(__file__).parent / "order.pml"
NOBODY = 9

pytestmark = pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed")


def errors(folder: pathlib.Path, **settings: int) -> tuple[int, int, str]:
    """(errors, states, the verifier's words) of an exhaustive search."""
    chosen = {"LANES": 1, "NEVER": 0, "DIES": NOBODY, "LOCAL_ORDER": 0} | settings
    defines = [f"-D{name}={value}" for name, value in chosen.items()]
    subprocess.run(["spin", "-a", *defines, MODEL], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
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
