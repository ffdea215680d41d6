"""The commands, the library's search path, and torchrun."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import thinwire
from ranks import HANG_S, started_programs, torchrun
from thinwire import _library, cli

PACKAGE = Path(thinwire.__file__).resolve().parents[1]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False,
        env=os.environ | environment,
    )  # fmt: skip


def doctor(**environment: str) -> tuple[int | None, str]:
    """Return the exit status of `thinwire doctor`, and what it prints."""
    with started_programs("thinwire", "doctor", environments=[environment]) as [program]:
        return program.exit_code(time.monotonic() + HANG_S), program.printed.read_text()


def test_doctor_of_a_good_installation():
    done = command("-m", "thinwire", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "libthinwire.so" in done.stdout and thinwire.version() in done.stdout
    assert done.stdout.rstrip().endswith("ready")


def test_doctor_starts_no_command(tmp_path):
    """It makes no network namespace, even as root."""
    for tool in ("ip", "tc", "unshare", "sudo"):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho {tool} $@ >> {tmp_path}/called\n")
        (tmp_path / tool).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    code, printed = doctor(PATH=path)
    assert code == 0, printed
    assert not (tmp_path / "called").exists(), (tmp_path / "called").read_text()


def test_doctor_says_what_is_missing_and_what_to_do():
    code, printed = doctor(THINWIRE_LIBRARY="/nowhere.so", THINWIRE_LANE="3")
    assert code == 1
    assert "/nowhere.so" in printed and "make build" in printed
    assert "THINWIRE_LANES" in printed
    assert "not ready" in printed


@pytest.mark.parametrize("name, value, words", [
    ("THINWIRE_CODEC", "int3", "unknown codec 'int3'"),
    ("THINWIRE_IFACE", "nope0", "no network interface 'nope0'"),
    ("THINWIRE_CONGESTION", "nope", "congestion is 'nope'"),
])  # fmt: skip
def test_doctor_finds_a_setting_that_can_not_be(name, value, words):
    code, printed = doctor(**{name: value})
    assert code == 1, printed
    assert words in printed and "not ready" in printed


def test_doctor_of_a_torch_that_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE)])
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from thinwire import cli; sys.exit(cli.main(['doctor']))"
    done = command("-c", code, PYTHONPATH=path)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "libtorch_cpu.so" in done.stdout and "not ready" in done.stdout


def test_importing_needs_no_library_and_using_it_is_a_typed_error():
    code = (
        "import thinwire\n"
        "try: thinwire.version()\n"
        "except thinwire.UnavailableError as error: print(error)\n"
    )
    done = command("-c", code, THINWIRE_LIBRARY="/nowhere.so")
    assert "/nowhere.so" in done.stdout and len(done.stdout.splitlines()) == 1, done.stderr


def test_a_library_that_does_not_load(tmp_path, monkeypatch):
    file = tmp_path / "libthinwire.so"
    file.write_text("no library")
    monkeypatch.setenv("THINWIRE_LIBRARY", str(file))
    with pytest.raises(thinwire.UnavailableError, match="does not load"):
        _library.load.__wrapped__()


def test_the_version_is_told():
    done = command("-m", "thinwire", "--version")
    assert done.stdout == f"thinwire {thinwire.version()}\n", done.stderr
    done = command("-m", "thinwire", "--version", THINWIRE_LIBRARY="/nowhere.so")
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("thinwire --version: libthinwire.so was not found")


def test_output_that_nobody_reads_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "thinwire", "doctor"], stdout=closed, stderr=subprocess.PIPE,
            text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.parametrize("out", ["/no/such/all.json", "/dev/full"])
def test_output_that_can_not_be_written_is_said(out, tmp_path, capsys):
    (tmp_path / "run.json").write_text("[]")
    trace = {"name": "clock", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1}
    (tmp_path / "run.json").write_text(json.dumps([trace]))
    assert cli.main(["trace", str(tmp_path / "run.json"), "--out", out]) == 1
    assert capsys.readouterr().err.startswith("thinwire trace: [Errno")


@pytest.mark.parametrize("option", ["--ranks", "--codecs", "--topologies", "--seconds"])
def test_an_option_of_the_canary_needs_the_canary(option, capsys):
    assert cli.main(["doctor", option, "3"]) == 2
    assert f"{option} is an option of --canary" in capsys.readouterr().err


TORCHRUN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from thinwire.torch import compress
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
state = compress(ddp)
for _ in range(3):
    ddp(torch.randn(4, 300)).sum().backward()
print("wire bytes", state.stats()["wire_bytes"])
dist.destroy_process_group()
"""


def test_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    assert torchrun(script).count("wire bytes") == 2
