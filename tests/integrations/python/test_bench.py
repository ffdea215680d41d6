"""`thinwire bench` measures what it promises, and its table shows it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import HANG_S, run
from test_cli import command
from thinwire import bench


def test_codecs_are_measured_beside_memcpy():
    int8, int4 = bench.measure_codecs(("int8", "int4"), 1 << 14)
    assert (int8["codec"], int4["codec"]) == ("int8", "int4")
    assert int8["bits"] == pytest.approx(8.06, abs=0.01)
    assert int4["bits"] == pytest.approx(4.06, abs=0.01)
    for key in ("encode_gb_s", "decode_gb_s", "encode_of_memcpy", "decode_of_memcpy"):
        assert int8[key] > 0 and int4[key] > 0


def take_turns(_rank: int) -> list[dict]:
    return bench.measure_allreduces(("int4",), (1024, 400_000), least_rounds=3, seconds=0.0)


def test_all_ranks_have_the_same_figures():
    first, second = run(take_turns)
    assert [(r["way"], r["bytes"], r["ms"]) for r in first] == [
        (r["way"], r["bytes"], r["ms"]) for r in second
    ]
    assert {(r["way"], r["bytes"], r["rounds"]) for r in first} == {
        (way, size, 3) for way in (bench.GLOO, "int4") for size in (1024, 400_000)
    }
    assert all(r["speedup"] == 1 for r in first if r["way"] == bench.GLOO)


@pytest.mark.slow
def test_the_command_starts_two_ranks_and_reports(tmp_path):
    wanted = ("--codecs", "int4", "--sizes", "512", "--rounds", "1", "--seconds", "0")
    done = command("-m", "thinwire", "bench", *wanted, "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["ranks"] == 2 and result["link"]["bytes_per_s"] > 0
    assert done.stdout.rstrip() == bench.table(result)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (("--codecs", "int3"), "unknown codec 'int3'"),
        (("--codecs", "topk:density=0.01,warmup=9,int3"), "unknown codec 'int3'"),
        (("--ranks", "1"), "2 ranks"),
        (("--sizes", "0"), "1 KiB"),
        (("--seconds", "nan"), "--seconds nan"),
        (("--json", "/no/such/folder.json"), "there is no folder '/no/such'; make it"),
        (("--json", "/"), "which is a folder; name a file"),
        (("--ranks", "9" * 20), "expected at most 256 on one machine"),
        (("--sizes", "9" * 20), "expected at most 4194304 KiB"),
        (("--seconds", "inf"), "--seconds inf"),
    ],
)
def test_a_wrong_argument_is_said(wrong, words, capsys):
    from thinwire import cli

    assert cli.main(["bench", *wrong]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("ranks_began", [False, True])
def test_ctrl_c_is_one_line_and_leaves_no_rank(ranks_began):
    """A terminal sends it to the whole group of processes."""
    again = [sys.executable, "-m", "thinwire", "bench", "--sizes", "64", "--seconds", "600"]
    bench = subprocess.Popen(
        again, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )  # fmt: skip
    end = time.monotonic() + HANG_S
    while time.monotonic() < end and len(_descendants(bench.pid)) < (2 if ranks_began else 1):
        time.sleep(0.05)
    begun = _descendants(bench.pid)
    os.killpg(bench.pid, signal.SIGINT)
    out, told = bench.communicate(timeout=HANG_S)
    assert (bench.returncode, out, told) == (130, b"", b"thinwire bench: interrupted\n")
    while any(left := [pid for pid in begun if Path(f"/proc/{pid}").exists()]):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_ctrl_c_right_after_a_fork_is_heard():
    """Python runs its fork hooks in the parent then, and drops the exceptions that they raise."""
    program = """
import os, signal, sys
from thinwire import cli
sys.argv[1:] = ["bench", "--sizes", "64", "--seconds", "600"]
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(cli.main(sys.argv[1:]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=HANG_S, check=False,
        preexec_fn=_heed_ctrl_c,
    )  # fmt: skip
    told = (ended.returncode, ended.stdout, ended.stderr)
    assert told == (130, b"", b"thinwire bench: interrupted\n")


def _heed_ctrl_c() -> None:
    """Handle SIGINT even if this process ignores it, as background jobs of a script do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *_descendants(child))]
