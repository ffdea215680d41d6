"""scripts/gpu_run.sh says «failed» whenever a step has not done what it is there for. Its programs
are fakes here: the real ones need a GPU."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PASSED = "echo '[  PASSED  ] 3 tests.'"
SKIPPED = """echo 'kernel_test.cc:50: Skipped'
echo 'no CUDA device can be used here'
echo '[  SKIPPED ] On/KernelTest.ReduceInRankOrder/cuda (0 ms)'
echo '[  PASSED  ] 2 tests.'"""
BENCH = """[[ ${1:-} == --device ]] && echo NVIDIA && exit
echo '{"ratio_to_twin": 1.1}'"""
SANITIZER = """echo '[  PASSED  ] 3 tests.'
echo '========= ERROR SUMMARY: 0 errors'"""
PROGRAMS = {
    "kernel_test": PASSED,
    "cuda_graph_test": PASSED,
    "device_test": PASSED,
    "kernel_bench": BENCH,
}
# Writes as many kernels as it is told to.
NCU = """while [[ $1 != --log-file ]]; do shift; done
for i in {1..%d}; do echo "\\"$i\\",\\"EncodeKernel\\"" >>"$2"; done"""
# A Python that finds every module; pytest prints its summary.
PYTHON = """case "$*" in
  *pytest\\ -q*) echo '4 passed, 2 deselected in 1.00s' ;;
  *nccl_version*) echo 2.30.7 ;;
esac"""


def script(path: pathlib.Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(folder: pathlib.Path, programs: dict[str, str], tools: dict[str, str], budget: int = 60):
    """(exit status, result by step, remark by step) of a pack with these programs."""
    (folder / "bin").mkdir()
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "scripts/gpu_run.sh", folder / "run.sh")
    for name, text in programs.items():
        script(folder / "bin" / name, text)
    for name, text in tools.items():
        script(folder / "tools" / name, text)
    environment = {
        "PATH": f"{folder}/tools:{os.environ['PATH']}",
        "OUT": str(folder / "out"),
        "PYTHON": str(folder / "tools/python"),
        "BUDGET": str(budget),
    }
    done = subprocess.run(["bash", folder / "run.sh"], env=environment, capture_output=True)
    steps = json.loads((folder / "out/steps.json").read_text())
    results = {step["step"]: step["result"] for step in steps}
    return done.returncode, results, {step["step"]: step["remark"] for step in steps}


TOOLS = {"python": PYTHON, "compute-sanitizer": SANITIZER, "ncu": NCU % 6}


def test_all_steps_pass(tmp_path):
    status, results, _ = run(tmp_path, PROGRAMS, TOOLS)
    assert results == dict.fromkeys(
        ("programs", "device", "parity", "graph", "engine", "bandwidth", "ncu", "ddp", "nccl_self",
         "nccl", "memcheck", "racecheck", "synccheck"),
        "passed",
    )  # fmt: skip
    assert status == 0


def test_what_the_machine_lacks_is_absent(tmp_path):
    status, results, _ = run(
        tmp_path, PROGRAMS, {"python": "exit 1", "compute-sanitizer": "exit 9"}
    )
    assert [results[step] for step in ("ddp", "nccl_self", "nccl")] == ["absent"] * 3
    assert results["memcheck"] == "failed", "it is there, and found something"
    assert status == 1


@pytest.mark.parametrize(
    ("program", "text", "step", "words"),
    [
        ("kernel_test", SKIPPED, "parity", "1 skipped: no CUDA device"),
        ("cuda_graph_test", SKIPPED, "graph", "1 skipped"),
        ("device_test", "echo '[  PASSED  ] 0 tests.'", "engine", "0 tests"),
        ("device_test", "[[ $1 == --help ]] || exit 3", "engine", "exit 3"),
        ("kernel_bench", "echo '{}'", "bandwidth", "0 rows"),
        ("device_test", None, "programs", "device_test does not start"),
        ("kernel_bench", "[[ $1 == --help ]] || (echo no GPU && exit 1)", "device", "no GPU"),
    ],
)
def test_a_step_that_does_not_do_its_work_has_failed(tmp_path, program, text, step, words):
    programs = {name: body for name, body in (PROGRAMS | {program: text}).items() if body}
    status, results, remarks = run(tmp_path, programs, TOOLS)
    assert status == 1
    assert results[step] == "failed"
    assert words in remarks[step]


@pytest.mark.parametrize(
    "summary", ["3 passed, 1 skipped in 1s", "5 skipped in 1s", "no tests ran in 1s"]
)
def test_skipped_python_tests_have_failed(tmp_path, summary):
    python = PYTHON.replace("4 passed, 2 deselected in 1.00s", summary)
    status, results, _ = run(tmp_path, PROGRAMS, TOOLS | {"python": python})
    assert (status, results["ddp"], results["nccl"]) == (1, "failed", "failed")


def test_an_old_nccl_is_absent(tmp_path):
    python = PYTHON.replace("2.30.7", "2.28.9")
    status, results, remarks = run(tmp_path, PROGRAMS, TOOLS | {"python": python})
    assert (status, results["nccl_self"], results["nccl"]) == (0, "passed", "absent")
    assert "2.28.9" in remarks["nccl"]


def test_a_profile_of_too_few_kernels_has_failed(tmp_path):
    status, results, remarks = run(tmp_path, PROGRAMS, TOOLS | {"ncu": NCU % 5})
    assert (status, results["ncu"], remarks["ncu"]) == (1, "failed", "5 kernels in ncu.csv")


def test_counters_that_nobody_may_read_are_absent(tmp_path):
    refused = "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1"
    status, results, remarks = run(tmp_path, PROGRAMS, TOOLS | {"ncu": refused})
    assert (status, results["ncu"]) == (0, "absent")
    assert "administrators" in remarks["ncu"]


def test_a_step_ends_when_all_time_is_up(tmp_path):
    hangs = "[[ $1 == --help ]] || sleep 60"
    status, results, remarks = run(tmp_path, PROGRAMS | {"kernel_test": hangs}, TOOLS, budget=2)
    assert (status, results["parity"], results["graph"]) == (1, "failed", "failed")
    assert "did not end within" in remarks["parity"]
    assert "time of all steps is up" in remarks["graph"]
