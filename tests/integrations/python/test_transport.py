"""transport="ucx", "nccl" and "auto" give Gloo's results, and stats() names what is in use."""

import os

import pytest
import thinwire
import torch
from ranks import outcomes_of, run
from thinwire import _library, config, doctor
from thinwire.torch import GradientExchange

LACKING = {"THINWIRE_UCX_LIB": "/nowhere/libucp.so.0"}


def ucx_is_here() -> bool:
    try:
        _library.ucx_version(config.ucx_library())
    except thinwire.UnavailableError:
        return False
    return True


needs_ucx = pytest.mark.skipif(not ucx_is_here(), reason="libucp is not here")


def reduced(rank: int, transport: str) -> tuple[str, list[list[float]]]:
    exchange = GradientExchange("int4", transport=transport)
    generator = torch.Generator().manual_seed(rank)
    results = []
    for numel in (100, 50_000, 300_000):
        tensor = torch.randn(numel, generator=generator)
        exchange.reduce({f"x{numel}": tensor})
        results.append(tensor.tolist())
    return exchange.stats()["transport"], results


def reduced_with_own_loops(rank: int) -> None:
    os.environ["THINWIRE_LOOPS"] = str(1 + rank)
    reduced(rank, "gloo")


@needs_ucx
def test_ucx_gives_the_bits_of_gloo():
    over_gloo, over_ucx = run(reduced, "gloo"), run(reduced, "ucx")
    assert over_gloo[0][0] == over_gloo[1][0] == "gloo over TCP"
    assert over_ucx[0][0].startswith("ucx 1.") and over_ucx[0][0].endswith("over shared memory")
    assert over_ucx[0][1] == over_ucx[1][1] == over_gloo[0][1]


def test_several_loops_give_the_bits_of_one():
    one = run(reduced, "gloo")
    several = run(reduced, "gloo", environment={"THINWIRE_LOOPS": "3"})
    assert several[0][0] == several[1][0] == "gloo over TCP, 3 loops"
    assert several[0][1] == several[1][1] == one[0][1]


def reduced_again_and_again(rank: int) -> set[str]:
    return {reduced(rank, "auto")[0] for _ in range(12)}


@needs_ucx
def test_loops_are_not_connected_where_ucx_serves_all_ranks():
    """Connections that one rank closed as unused once looked like a lost peer to the other."""
    ours, theirs = run(reduced_again_and_again, environment={"THINWIRE_LOOPS": "3"})
    assert ours == theirs and len(ours) == 1 and ours.pop().startswith("ucx 1.")


def test_other_loops_on_another_rank_are_a_mismatch_on_both():
    for outcome in outcomes_of(reduced_with_own_loops):
        assert outcome.error == "MismatchError", outcome.trace
        assert "loops=1" in outcome.message and "loops=2" in outcome.message


def test_a_congestion_control_that_is_not_there_is_named():
    for outcome in outcomes_of(reduced, "gloo", environment={"THINWIRE_CONGESTION": "nonsense"}):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "'nonsense'" in outcome.message and "reno" in outcome.message


def test_the_former_automatic_choice_is_refused():
    for outcome in outcomes_of(reduced, "gloo", environment={"THINWIRE_CONGESTION": "auto"}):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "'auto'" in outcome.message and "system" in outcome.message


@needs_ucx
def test_auto_takes_ucx_on_one_host():
    assert run(reduced, "auto")[0][0].startswith("ucx 1.")


def test_auto_is_gloo_without_the_library():
    assert [words for words, _ in run(reduced, "auto", environment=LACKING)] == [
        "gloo over TCP"
    ] * 2


def test_ucx_without_the_library_is_unavailable_on_every_rank():
    for outcome in outcomes_of(reduced, "ucx", environment=LACKING):
        assert outcome.error == "UnavailableError", outcome.trace
        assert "/nowhere/libucp.so.0" in outcome.message and "gloo" in outcome.message


def test_doctor_says_which_ucx_there_is(monkeypatch):
    monkeypatch.setenv(*next(iter(LACKING.items())))
    (finding,) = doctor._ucx()
    assert finding.mark == "absent" and "libucx" in finding.detail


def test_nccl_of_tensors_on_the_host_is_unavailable_on_every_rank():
    for outcome in outcomes_of(reduced, "nccl"):
        assert outcome.error == "UnavailableError", outcome.trace
        assert "rank 0 takes no part over NCCL" in outcome.message
        assert "host memory" in outcome.message and "gloo" in outcome.message


def test_doctor_says_which_nccl_there_is(monkeypatch):
    monkeypatch.setenv("THINWIRE_NCCL_LIB", "/nowhere/libnccl.so.2")
    (finding,) = doctor._nccl()
    assert finding.mark == "absent"
    assert "/nowhere/libnccl.so.2" in finding.detail and "nvidia-nccl" in finding.detail


def test_doctor_says_that_nccl_has_no_gpu(monkeypatch):
    monkeypatch.setattr(_library, "nccl_version", lambda _: "2.30.7")
    monkeypatch.setenv("THINWIRE_CUDA_LIB", "/nowhere/libthinwire_cuda.so")
    (finding,) = doctor._nccl()
    assert finding.mark == "absent" and "2.30.7, but there is no GPU" in finding.detail
