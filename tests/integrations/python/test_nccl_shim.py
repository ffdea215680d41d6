"""libthinwire_nccl_shim.so preloaded into unmodified programs: a C program (nccl_program/), linked
against a fake libnccl.so.2, with CPU threads instead of GPUs; and torch, if there are GPUs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from ranks import HANG_S

ROOT = pathlib.Path(__file__).parents[3]
LIBRARY = os.environ.get("THINWIRE_LIBRARY", ROOT / "build/integrations/c/libthinwire.so")
LIBRARIES = pathlib.Path(LIBRARY).parent
BUILD = LIBRARIES.parent.parent
STAND_IN = BUILD / "tests/host_device/libthinwire_host_device_plugin.so"
SHIM = LIBRARIES / "libthinwire_nccl_shim.so"
PROGRAM = BUILD / "tests/integrations/nccl_program"
CALLS = (
    "sum in place", "mean", "grouped sum", "sum of a split communicator", "sum of ncclCommInitAll's"
)  # fmt: skip
COMPRESSED = {"sum in place", "mean"}

pytestmark = pytest.mark.skipif(
    not (SHIM.is_file() and PROGRAM.is_file()), reason="the shim and its program are not built"
)


def run(preload=True, command=(), **variables):
    """Return the program's errors by call, equal on all ranks, and its stderr."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")
    }
    environment |= {"THINWIRE_CUDA_LIB": str(STAND_IN), **variables}
    if preload:
        environment["LD_PRELOAD"] = str(SHIM)
    done = subprocess.run(
        command or [PROGRAM],
        env=environment, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    errors = dict(re.findall(r"(.+): error ([\d.]+), alike\n", done.stdout))
    return {call: float(error) for call, error in errors.items()}, done.stderr


def test_without_an_opt_in_nothing_changes():
    plain, _ = run(preload=False)
    errors, said = run()
    assert errors == plain and set(errors) == set(CALLS)
    assert said == ""
    assert max(errors.values()) < 1e-6


def test_allreduces_of_communicators_that_opt_in_are_compressed():
    errors, said = run(THINWIRE_NCCL_CODEC="int8", THINWIRE_NCCL_MIN_BYTES="65536")
    for call in CALLS:
        assert (1e-4 < errors[call] < 0.06) == (call in COMPRESSED), (call, errors[call])
        assert call in COMPRESSED or errors[call] < 1e-6, (call, errors[call])
    words = "allreduces of 65536 bytes and more on this communicator go as int8, flat"
    assert {f"thinwire's NCCL shim: rank {r} of 3: {words}" for r in range(3)} == set(
        said.splitlines()
    )


def test_a_wrong_codec_is_said_on_every_rank_and_changes_nothing():
    errors, said = run(THINWIRE_NCCL_CODEC="int9", THINWIRE_NCCL_MIN_BYTES="65536")
    assert max(errors.values()) < 1e-6
    for rank in range(3):
        assert f"rank {rank} of 3: UnavailableError: this communicator goes on uncompressed" in said
    assert "unknown codec 'int9'" in said


def test_without_a_device_nothing_changes():
    errors, said = run(THINWIRE_NCCL_CODEC="int8", THINWIRE_CUDA_LIB="/nowhere/libcuda.so",
                       THINWIRE_NCCL_MIN_BYTES="65536")  # fmt: skip
    assert max(errors.values()) < 1e-6
    assert said.count("the CUDA part does not load") == 3


def test_an_observer_says_at_exit_what_would_be_gained():
    plain, _ = run(preload=False)
    errors, said = run(THINWIRE_NCCL_OBSERVE="1", THINWIRE_NCCL_MIN_BYTES="65536")
    assert errors == plain
    # Each of three ranks makes 5 sums, a mean, a sum on each of two other communicators, a maximum
    # of integers, and a sum in a group.
    for words in (
        "24 could go compressed", "3 in group calls", "3 of other elements",
        "27 of f32, 64 KiB to 1 MiB: 10.8 MB", "as int4 (7.88 x less)",
    ):  # fmt: skip
        assert words in said, said


@pytest.mark.parametrize("variables", [{}, {"THINWIRE_NCCL_CODEC": "int8"}], ids=["off", "on"])
def test_programs_without_nccl_run_as_ever(variables):
    _, said = run(command=[sys.executable, "-c", "import json"], THINWIRE_NCCL_OBSERVE="1",
                  **variables)  # fmt: skip
    assert said == ""


TORCH = """
import sys
import torch
import torch.distributed as dist

rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
values = torch.linspace(-1, 1, 1 << 20, device="cuda") * (rank + 1)
exact = torch.linspace(-1, 1, 1 << 20, device="cuda") * 3
dist.all_reduce(values)
error = (values - exact).abs().max().item()
bits = [torch.zeros_like(values) for _ in range(2)]
dist.all_gather(bits, values)
assert torch.equal(bits[0], bits[1])
assert 1e-4 < error < 0.1, error
dist.destroy_process_group()
"""


def gpus():
    torch = pytest.importorskip("torch")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def test_torch_on_gpus_is_compressed(tmp_path):
    if gpus() < 2:
        pytest.skip("needs two GPUs: NCCL's ranks have one each")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TORCH, str(rank), str(tmp_path / "meet")],
            env={**os.environ, "LD_PRELOAD": str(SHIM), "THINWIRE_NCCL_CODEC": "int8"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        _, said = rank.communicate(timeout=HANG_S)
        assert rank.returncode == 0 and "go as int8" in said, said
