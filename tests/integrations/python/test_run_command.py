"""`thinwire run`: ranks here and on other hosts, their lines, and how they end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import thinwire
from thinwire.launch.hosts import Slot, slots_of

PACKAGE = Path(thinwire.__file__).resolve().parents[1]


def started(*arguments: str, **options) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire", "run", *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
        preexec_fn=interruptible, **options,
    )  # fmt: skip


def interruptible() -> None:
    """Shells start what runs in the background with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(*arguments: str) -> tuple[int, str, str]:
    process = started(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def other_host(tmp_path) -> str:
    """Stands for ssh: runs the text in a shell of its own, as sshd does, with an empty environment
    but for the host's name. tests/frameworks/test_ssh.py names a real one."""
    if real := os.environ.get("THINWIRE_TEST_SSH"):
        return real
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nexec env -i HOME=/ ON_HOST="$1" sh -c "$2"\n')
    script.chmod(0o755)
    return str(script)


def test_slots_of_hosts():
    assert slots_of("a:2,b", 3) == [Slot("a", 0, 2), Slot("a", 1, 2), Slot("b", 0, 1)]
    assert slots_of("a:2,b:2", 3)[2] == Slot("b", 0, 1)
    assert slots_of("a,b,a", 3) == [Slot("a", 0, 2), Slot("a", 1, 2), Slot("b", 0, 1)]
    with pytest.raises(thinwire.InvalidArgumentError, match="room for 2 ranks, expected 3"):
        slots_of("a,b", 3)
    for bad in ("a:x", ":2", "a,,b"):
        with pytest.raises(thinwire.InvalidArgumentError, match="expected hosts"):
            slots_of(bad, 1)


PROGRAM = """
import thinwire.launch, torch, torch.distributed as dist
place = thinwire.launch.setup()
dist.init_process_group("gloo")
tensor = torch.full((8,), float(place.rank))
from thinwire.torch import all_reduce
all_reduce(tensor, codec="fp32")
print(f"{place}: {tensor[0].item()}", flush=True)
dist.destroy_process_group()
"""


def test_ranks_of_two_hosts_meet(other_host, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    status, out, err = ended(
        "-n", "3", "-H", "127.0.0.1:1,other:2", "-x", "THINWIRE_LIBRARY", "--ssh", other_host, "--",
        sys.executable, str(tmp_path / "program.py"),
    )  # fmt: skip
    assert status == 0, out + err
    for rank, local in enumerate(["0 of 1", "0 of 2", "1 of 2"]):
        place = rf"\[{rank}\] rank {rank} of 3, on its host {local}, .*: 3\.0"
        assert re.search(place, out), out


def test_another_host_gets_the_named_variables(other_host):
    os.environ["WANTED"], os.environ["UNWANTED"] = "it's here", "1"
    code = "import os; e = os.environ; print(e['ON_HOST'], e['WANTED'], 'UNWANTED' in e)"
    status, out, err = ended(
        "-H", "far", "-x", "WANTED", "--ssh", other_host, sys.executable, "-c", code
    )
    assert (status, out) == (0, "[0] far it's here False\n"), err


# Every rank says that it is there, and rank 1 fails once all have; the others would sleep.
FAILING = """
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
(folder / rank).write_text(str(os.getpid()))
if rank == "1":
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""


def processes_of(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.iterdir()]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def all_gone(processes: list[int]) -> bool:
    """Within some seconds; init may take a moment to bury them."""
    end = time.monotonic() + 20
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


@pytest.mark.parametrize("hosts", ["localhost:3", "localhost:1,far:2"])
def test_the_first_failure_ends_all(tmp_path, other_host, hosts):
    folder = tmp_path / "ranks"
    folder.mkdir()
    status, _, err = ended(
        "-n", "3", "-H", hosts, "--ssh", other_host, sys.executable, "-c", FAILING, str(folder)
    )
    assert status == 7
    assert "rank 1 ended with 7; ending the others" in err
    processes = processes_of(folder)
    assert len(processes) == 3 and not any(map(is_alive, processes))  # before it returned


SLEEPING = FAILING.replace('if rank == "1":', "if False:")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_command(tmp_path, other_host, number):
    folder = tmp_path / "ranks"
    folder.mkdir()
    process = started(
        "-n", "3", "-H", "localhost:2,far", "--ssh", other_host, sys.executable, "-c", SLEEPING,
        str(folder), start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while len([f for f in folder.iterdir() if f.read_text()]) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C
    _, err = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "ending all ranks" in err
    processes = processes_of(folder)
    assert len(processes) == 3 and all_gone(processes)


def test_wrong_uses():
    for arguments in (["-n", "2"], ["-n", "0", "true"]):
        status, _, err = ended(*arguments)
        assert status == 1 and "expected at least one rank and a command" in err
    for arguments, words in (
        (["--port", "99999"], "--port is 99999, expected 1 to 65535"),
        (["-x", "NO_SUCH_NAME"], "-x names ['NO_SUCH_NAME'], which this shell does not export"),
        (["--ssh", "no-such-ssh", "-H", "far:1"], "--ssh is 'no-such-ssh', expected a command"),
    ):
        status, out, err = ended(*arguments, "echo", "begun")
        assert status == 1 and words in err and "begun" not in out
    status, _, err = ended("no-such-program")
    assert status == 127
