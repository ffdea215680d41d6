"""scripts/gpu_run.sh reports «failed» for every step that has not done its work. Its programs are
fakes here, since the real ones need a GPU."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PASSED = "echo '[  PASSED  ] 3 tests.'"
SKIPPED = """echo 'kernel_test.cc:50: Skipped'
echo 'no CUDA device can be used here'
echo '[  SKIPPED ] On/KernelTest.ReduceInRankOrder/cuda (0 ms)'
echo '[  PASSED  ] 2 tests.'"""
# OP/SPEC/BYTES of the figures that the table compares with thresholds.
KEYS = [
    f"{key}/{size << 20}"
    for key, size in (
        ("encode_ef/int8", 512), ("encode_ef/int4", 512), ("encode_ef/onebit", 512),
        ("decode/int8", 512), ("decode/int4", 512), ("decode_add/int4", 512),
        ("reduce8/int8", 512), ("encode_ef/topk", 512), ("chunks_to_one/int4", 4),
    )
]  # fmt: skip


def kernels_json(device="NVIDIA H100 80GB HBM3", copy="3.000", omit="", **changed) -> str:
    """Return kernel_bench's output. changed: figures of the row that `omit` names, if any."""
    rows = []
    for key in KEYS:
        figures = {"ratio_to_twin": "1.0500", "terabytes_per_second": "2.800"}
        if key == omit:
            if not changed:
                continue
            figures |= changed
        rows.append(
            f'  {{"name": "{key}", "milliseconds": 0.5, "twin_milliseconds": 0.5, "ratio_to_twin": '
            f'{figures["ratio_to_twin"]}, "spread": [1.0, 1.1], "terabytes_per_second": '
            f'{figures["terabytes_per_second"]}, "twin_terabytes_per_second": {copy}}}'
        )
    return f'{{\n "device": "{device}",\n "benchmarks": [\n' + ",\n".join(rows) + "\n ]\n}"


def bench(output: str) -> str:
    return f"[[ ${{1:-}} == --device ]] && echo NVIDIA && exit\ncat <<'END'\n{output}\nEND"


SANITIZER = """echo '[  PASSED  ] 3 tests.'
echo '========= ERROR SUMMARY: 0 errors'"""
PROGRAMS = {
    "kernel_test": PASSED,
    "cuda_graph_test": PASSED,
    "device_test": PASSED,
    "kernel_bench": bench(kernels_json()),
    "nccl_bench": "echo 'NCCL 2.30.7'; echo 'plane beyond the library: 4.6 us'",
}
# Writes as many kernels as it is given.
NCU = """while [[ $1 != --log-file ]]; do shift; done
for i in {1..%d}; do echo "\\"$i\\",\\"EncodeKernel\\"" >>"$2"; done"""
# A Python that finds every module and NCCL; pytest prints its summary.
PYTHON = """case "$*" in
  *pytest\\ -q*) echo '4 passed, 2 deselected in 1.00s' ;;
  *nccl.py*) echo '2.30.7 /somewhere/libnccl.so.2' | tee "$2" ;;
esac"""
SMI = """
cat <<END
    Clocks Event Reasons
        SW Power Cap                      : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : {hw}
        SW Thermal Slowdown               : {sw}
    Clocks
        Graphics                          : 1980 MHz
        SM                                : 1755 MHz
        Memory                            : 2619 MHz
    Max Clocks
        Graphics                          : 1980 MHz
        SM                                : 1980 MHz
END"""


def script(path: pathlib.Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(
    folder: pathlib.Path,
    programs: dict[str, str],
    tools: dict[str, str],
    budget: int = 60,
    only: str = "",
):
    """Return (exit status, result by step, remark by step) of a pack with these programs."""
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
        "ONLY": only,
    }
    done = subprocess.run(["bash", folder / "run.sh"], env=environment, capture_output=True)
    steps = json.loads((folder / "out/steps.json").read_text())
    results = {step["step"]: step["result"] for step in steps}
    return done.returncode, results, {step["step"]: step["remark"] for step in steps}


TOOLS = {
    "python": PYTHON,
    "compute-sanitizer": SANITIZER,
    "ncu": NCU % 6,
    "nvidia-smi": SMI.format(hw="Not Active", sw="Not Active"),
}
FIRST = ["programs", "device"]
PARTS = {
    "cpp": ["parity", "graph", "engine"],
    "speed": [
        "clocks_before", "bandwidth", "clocks_after", "copy",
        *(key.rpartition("/")[0] for key in KEYS), "ncu",
    ],
    "nccl": ["nccl_find", "nccl_self", "nccl"],
    "sanitize": ["memcheck", "racecheck", "synccheck"],
    "python": ["ddp"],
}  # fmt: skip


def test_all_steps_pass_with_ddp_last(tmp_path):
    status, results, _ = run(tmp_path, PROGRAMS, TOOLS)
    assert list(results) == [*FIRST, *(step for steps in PARTS.values() for step in steps)]
    assert set(results.values()) == {"passed"}
    assert status == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_part_by_itself(tmp_path, part):
    status, results, _ = run(tmp_path, PROGRAMS, TOOLS, only=part)
    assert (status, list(results)) == (0, [*FIRST, *PARTS[part]])


def test_several_parts_keep_the_order(tmp_path):
    _, results, _ = run(tmp_path, PROGRAMS, TOOLS, only="python cpp")
    assert list(results) == [*FIRST, *PARTS["cpp"], *PARTS["python"]]


def test_an_unknown_part_is_refused(tmp_path):
    shutil.copy(ROOT / "scripts/gpu_run.sh", tmp_path / "run.sh")
    environment = os.environ | {"OUT": str(tmp_path / "out"), "ONLY": "cpp gpu"}
    done = subprocess.run(
        ["bash", tmp_path / "run.sh"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "'gpu'" in done.stderr and "sanitize" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_nine_minutes_at_most(tmp_path, part):
    """Steps get their time limits by `timeout`, which writes them down here."""
    limits = tmp_path / "limits"
    noted = f"""[[ $1 != -k ]] || shift 2
echo "$1" >>"{limits}"
shift
exec "$@\""""
    status, _, _ = run(tmp_path, PROGRAMS, TOOLS | {"timeout": noted}, budget=9999, only=part)
    assert status == 0
    assert 60 < sum(int(limit) for limit in limits.read_text().split()) <= 9 * 60


def test_what_the_machine_lacks_is_absent(tmp_path):
    status, results, _ = run(
        tmp_path, PROGRAMS, {"python": "exit 1", "compute-sanitizer": "exit 9"}
    )
    steps = ("ddp", *PARTS["nccl"])
    assert [results[step] for step in steps] == ["absent"] * 4
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
        ("nccl_bench", "echo 'plane beyond the library: 20.1 us'", "nccl_self", "at most 20 us"),
        ("nccl_bench", "echo 'NCCL 2.30.7'", "nccl_self", "no figure"),
        ("nccl_bench", "echo other bytes came; exit 1", "nccl_self", "other bytes came"),
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


def test_no_nccl_beside_a_torch_for_cuda_has_failed(tmp_path):
    python = PYTHON.replace(
        "echo '2.30.7 /somewhere/libnccl.so.2' | tee \"$2\"", "echo torch is for CUDA; exit 1"
    )
    status, results, remarks = run(tmp_path, PROGRAMS, TOOLS | {"python": python}, only="nccl")
    assert [results[step] for step in PARTS["nccl"]] == ["failed"] * 3
    assert "torch is for CUDA" in remarks["nccl_find"]
    assert status == 1


def test_no_nccl_beside_a_torch_without_cuda_is_absent(tmp_path):
    python = PYTHON.replace(
        "echo '2.30.7 /somewhere/libnccl.so.2' | tee \"$2\"", "echo absent: torch has no CUDA"
    )
    status, results, _ = run(tmp_path, PROGRAMS, TOOLS | {"python": python}, only="nccl")
    assert [results[step] for step in PARTS["nccl"]] == ["absent"] * 3
    assert status == 0


def test_the_tests_of_nccl_get_the_copy_that_was_found(tmp_path):
    seen = tmp_path / "seen"
    python = PYTHON.replace("echo '4 passed", f"echo $THINWIRE_NCCL_LIB >>{seen}; echo '4 passed")
    status, _, _ = run(tmp_path, PROGRAMS, TOOLS | {"python": python})
    assert status == 0
    over_nccl, ddp = seen.read_text().split("\n")[:2]
    assert (over_nccl, ddp) == ("/somewhere/libnccl.so.2", "")


THRESHOLDS = [
    ("encode_ef/int8", {"ratio_to_twin": "1.1761"}, "1.17 of the twin's time", True),
    ("encode_ef/int8", {"ratio_to_twin": "1.1771"}, "expected 1.17 or less", False),
    ("decode/int4", {"terabytes_per_second": "2.250"}, "0.75 of a copy", True),
    ("decode/int4", {"terabytes_per_second": "2.240"}, "0.74 of a copy", False),
    ("reduce8/int8", {"ratio_to_twin": "1.3340"}, "expected 1.33 or less", False),
    ("encode_ef/topk", {"ratio_to_twin": "1.3600"}, "expected 1.35 or less", False),
    ("encode_ef/topk", {"terabytes_per_second": "1.000"}, "1.00 TB/s", True),
    ("chunks_to_one/int4", {"ratio_to_twin": "1.3010"}, "expected 1.30 or less", False),
    ("encode_ef/onebit", {}, "has no figures", False),
    ("decode_add/int4", {"ratio_to_twin": "nan"}, "has no figures", False),
]


@pytest.mark.parametrize(("row", "changed", "words", "good"), THRESHOLDS)
def test_figures_are_held_against_thresholds(tmp_path, row, changed, words, good):
    key = next(key for key in KEYS if key.startswith(f"{row}/"))
    programs = PROGRAMS | {"kernel_bench": bench(kernels_json(omit=key, **changed))}
    status, results, remarks = run(tmp_path, programs, TOOLS, only="speed")
    assert words in remarks[row]
    assert (status, results.pop(row)) == ((0, "passed") if good else (1, "failed"))
    assert set(results.values()) == {"passed"}, "the others stay what they are"


@pytest.mark.parametrize(
    ("device", "copy", "good"),
    [
        ("NVIDIA H100 80GB HBM3", "2.510", True),
        ("NVIDIA H100 80GB HBM3", "2.500", False),
        ("NVIDIA H200", "3.000", False),
        ("NVIDIA RTX 4090", "0.900", True),
    ],
)
def test_a_copy_that_is_slow_for_its_gpu_has_failed(tmp_path, device, copy, good):
    programs = PROGRAMS | {"kernel_bench": bench(kernels_json(device, copy))}
    _, results, remarks = run(tmp_path, programs, TOOLS, only="speed")
    assert results["copy"] == ("passed" if good else "failed")
    assert f"{copy[:4]} TB/s" in remarks["copy"]


def test_figures_without_a_copy_have_failed(tmp_path):
    output = kernels_json(omit=next(key for key in KEYS if key.startswith("reduce8")))
    programs = PROGRAMS | {"kernel_bench": bench(output)}
    status, results, _ = run(tmp_path, programs, TOOLS, only="speed")
    assert (status, results["copy"], results["reduce8/int8"]) == (1, "failed", "failed")


@pytest.mark.parametrize("kind", ["hw", "sw"])
def test_a_gpu_that_is_slowed_down_has_failed(tmp_path, kind):
    states = {"hw": "Not Active", "sw": "Not Active"} | {kind: "Active"}
    tools = TOOLS | {"nvidia-smi": SMI.format(**states)}
    status, results, remarks = run(tmp_path, PROGRAMS, tools, only="speed")
    assert (status, results["clocks_before"], results["clocks_after"]) == (1, "failed", "failed")
    assert f"{kind.upper()} Thermal Slowdown" in remarks["clocks_after"]


def test_clocks_are_told_and_kept(tmp_path):
    _, _, remarks = run(tmp_path, PROGRAMS, TOOLS, only="speed")
    assert remarks["clocks_before"] == "SM 1755 MHz, at most 1980 MHz"
    assert (tmp_path / "out/log.txt").read_text().count("Memory                            :") == 2


def test_a_machine_without_nvidia_smi_has_no_clocks(tmp_path):
    tools = {name: text for name, text in TOOLS.items() if name != "nvidia-smi"}
    status, results, _ = run(tmp_path, PROGRAMS, tools, only="speed")
    assert (status, results["clocks_before"], results["clocks_after"]) == (0, "absent", "absent")


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


class Search:
    """Runs scripts/gpu_nccl.py with a torch of the test."""

    def __init__(self, folder: pathlib.Path) -> None:
        _library = pytest.importorskip("thinwire._library")
        self.folder = folder
        self.fake = pathlib.Path(_library.path()).parents[2] / "tests/fake_nccl.so"
        if not self.fake.is_file():
            pytest.skip(f"{self.fake} is not built")

    def run(self, cuda: str | None, load: pathlib.Path | None = None, **variables: str):
        """Return (exit status, last line, what was written), with a torch for this CUDA that loads
        that library."""
        package = self.folder / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(
            "import ctypes, types\n__version__ = '2.13.0'\n"
            f"version = types.SimpleNamespace(cuda={cuda!r})\n"
            + ("" if load is None else f"ctypes.CDLL({str(load)!r})\n")
        )
        paths = [str(self.folder), str(ROOT / "integrations/python")]
        written = self.folder / "written"
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/gpu_nccl.py", written],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        text = written.read_text() if written.exists() else None
        return done.returncode, done.stdout.splitlines()[-1], text

    def copy(self, folder: str) -> pathlib.Path:
        target = self.folder / folder / "libnccl.so.2"
        target.parent.mkdir(parents=True)
        shutil.copy(self.fake, target)
        return target

    def wheel(self) -> pathlib.Path:
        """Install a wheel of NCCL where this Python looks for one."""
        library = self.copy("nvidia/nccl/lib")
        metadata = self.folder / "nvidia_nccl_cu13-2.30.7.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: nvidia-nccl-cu13\nVersion: 2.30.7\n")
        (metadata / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
        return library


@pytest.fixture
def search(tmp_path) -> Search:
    return Search(tmp_path)


def test_the_copy_that_torch_has_loaded_is_found(search):
    search.wheel()
    loaded = search.copy("torch_lib")
    assert search.run("13.0", loaded) == (0, f"2.30.7 {loaded}", f"2.30.7 {loaded}")


def test_the_wheels_copy_is_found(search):
    library = search.wheel()
    assert search.run("13.0") == (0, f"2.30.7 {library}", f"2.30.7 {library}")


def test_a_named_copy_comes_first(search):
    search.wheel()
    named = search.copy("mine")
    found = search.run("13.0", THINWIRE_NCCL_LIB=str(named))
    assert found == (0, f"2.30.7 {named}", f"2.30.7 {named}")


def test_a_torch_for_cuda_without_nccl_is_a_failure(search):
    status, line, written = search.run("13.0", THINWIRE_NCCL_LIB="/nowhere/libnccl.so.2")
    assert (status, written) == (1, None)
    assert "built for CUDA 13.0" in line and "/nowhere" in line


def test_a_torch_without_cuda_lacks_nccl(search):
    status, line, written = search.run(None)
    assert (status, written) == (0, None)
    assert re.match("absent: torch 2.13.0", line)
