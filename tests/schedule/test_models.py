"""Model checks with spin of rules that are pure logic, over every interleaving: order.pml (the
order of announced chunks and their lanes), predicted.pml (predicted chunks besides announced ones)
and ledger.pml (the store's ledger)."""

import pathlib
import re
import shutil
import subprocess

import pytest

ANNOUNCED, PREDICTED, LEDGER = "order.pml", "predicted.pml", "ledger.pml"
NOBODY = 9
DEFAULTS = {
    ANNOUNCED: {"LANES": 1, "NEVER": 0, "DIES": NOBODY, "LOCAL_ORDER": 0},
    PREDICTED: {
        **{"P": 4, "A": 0, "LANES": 1, "FAULT": 0},
        **{"NO_OLDEST": 0, "LOCAL_ORDER": 0, "SHARED_LANES": 0, "STARTS_AGAIN": 0},
        "NEVER_WITHDRAWS": 0,
    },
    LEDGER: {"STALENESS": 1, "QUORUM": 0, "MISTAKE": 0},
}
NEVER, DIES, WITHDRAWN, WAITS = 1, 2, 3, 4  # FAULT of predicted.pml
# MISTAKE of ledger.pml
BLIND, ALONE, LATE, ANY_CALL, ANY_PUSH, IN_CALL, LATE_WAITS = range(1, 8)
ROUNDS = {"STALENESS": 0, "QUORUM": 2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed"),
]


def errors(
    folder: pathlib.Path,
    model: str = ANNOUNCED,
    *,
    ltl: bool = False,
    large: bool = False,
    search: tuple[str, ...] = (),
    **settings: int,
) -> tuple[int, int, str]:
    """Return (errors, states, the verifier's text) of an exhaustive search. ltl: check the model's
    formula, with workers that each act again and again (weak fairness). large: optimise the
    verifier, which pays for its longer compile time. search: options of the verifier."""
    chosen = DEFAULTS[model] | settings
    assert chosen.keys() == DEFAULTS[model].keys()
    defines = [f"-D{name}={value}" for name, value in chosen.items()]
    if ltl:
        defines.append("-DLTL")
    source = pathlib.Path(__file__).parent / model
    subprocess.run(["spin", "-a", *defines, source], cwd=folder, check=True, capture_output=True)
    options = ["-O1" if large else "-O0", *([] if ltl else ["-DSAFETY"])]
    compiler = ["gcc", *options, "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    verifier = ["./pan", "-m1000000", *(["-a", "-f"] if ltl else []), *search]
    words = subprocess.run(
        verifier, cwd=folder, check=False, capture_output=True, text=True, timeout=300
    ).stdout
    assert "max search depth too small" not in words
    found = int(re.search(r"errors: (\d+)", words).group(1))
    return found, int(re.search(r"(\d+) states, stored", words).group(1)), words


@pytest.mark.parametrize("lanes", [1, 2])
def test_without_a_fault_all_chunks_finish(tmp_path, lanes):
    found, states, words = errors(tmp_path, LANES=lanes)
    assert found == 0, words
    assert states > 10_000  # the search was not empty


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
    assert "assertion violated" in words  # a deadline passed, and no rank was at fault


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


@pytest.mark.parametrize("chunks", [{"P": 3}, {"P": 2, "A": 1}], ids=str)
@pytest.mark.parametrize("fault", [WITHDRAWN, WAITS])
def test_all_chunks_finish_where_a_step_is_not_as_predicted(tmp_path, fault, chunks):
    found, states, words = errors(tmp_path, PREDICTED, large=True, FAULT=fault, **chunks)
    assert found == 0, words
    assert states > 100_000


def test_the_model_finds_a_withdrawn_chunk_that_starts_twice(tmp_path):
    found, _, words = errors(tmp_path, PREDICTED, FAULT=WITHDRAWN, P=2, STARTS_AGAIN=1)
    assert found > 0
    assert "assertion violated (state[off]" in words


def test_the_model_finds_the_deadlock_of_ranks_that_wait_against_the_predicted_order(tmp_path):
    found, _, words = errors(tmp_path, PREDICTED, FAULT=WAITS, P=3, NEVER_WITHDRAWS=1)
    assert found > 0
    assert "assertion violated (dead||" in words  # a deadline passed, and no rank was at fault


@pytest.mark.parametrize(
    "mistake",
    [{"NO_OLDEST": 1, "P": 3}, {"LOCAL_ORDER": 1, "P": 3}, {"SHARED_LANES": 1, "P": 2, "A": 1}],
    ids=str,
)
def test_the_model_finds_the_deadlock_of_a_mistaken_predicted_order(tmp_path, mistake):
    found, _, words = errors(tmp_path, PREDICTED, **mistake)
    assert found > 0
    assert "assertion violated (dead||" in words  # a deadline passed, and no rank was at fault


# The search for the formula checks the assertions too.
@pytest.mark.parametrize(("staleness", "ltl"), [(1, True), (2, False)])
def test_no_gradient_is_too_old_and_every_held_push_is_applied(tmp_path, staleness, ltl):
    found, states, words = errors(tmp_path, LEDGER, ltl=ltl, STALENESS=staleness)
    assert found == 0, words
    assert states > 30_000


def test_an_update_of_sync_is_one_push_of_each_and_no_pull_is_left_waiting(tmp_path):
    found, states, words = errors(tmp_path, LEDGER, STALENESS=0)
    assert found == 0, words
    assert states > 5_000


def test_rounds_with_a_quorum_never_stand_still_and_have_every_push(tmp_path):
    found, states, words = errors(tmp_path, LEDGER, ltl=True, **ROUNDS)
    assert found == 0, words
    assert states > 50_000


@pytest.mark.parametrize(
    ("settings", "violated"),
    [
        ({"MISTAKE": BLIND}, ".left>0"),  # a gradient is too old
        ({"MISTAKE": ALONE}, ".held"),  # held pushes wait for one another
        ({"MISTAKE": LATE}, ".held"),
        ({"MISTAKE": ANY_CALL}, ".held"),
        ({"MISTAKE": ANY_PUSH, "STALENESS": 0}, "given"),  # two pushes of one worker
        (ROUNDS | {"MISTAKE": IN_CALL}, ".late"),  # a round that no event ends
        (ROUNDS | {"MISTAKE": LATE_WAITS}, ".late"),
    ],
    ids=str,
)
def test_the_model_finds_a_mistaken_ledger(tmp_path, settings, violated):
    found, _, words = errors(tmp_path, LEDGER, **settings)
    assert found > 0
    assert violated in re.search(r"assertion violated (.*)", words).group(1), words


@pytest.mark.parametrize("settings", [{"MISTAKE": ALONE}, ROUNDS | {"MISTAKE": IN_CALL}], ids=str)
def test_the_formula_finds_pushes_that_are_never_applied(tmp_path, settings):
    # Without assertions, which would stop the search earlier.
    found, _, words = errors(tmp_path, LEDGER, ltl=True, search=("-A",), **settings)
    assert found > 0
    assert "acceptance cycle" in words
