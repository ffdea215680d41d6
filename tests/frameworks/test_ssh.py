"""`thinwire run` over a real ssh: what test_run_command.py holds with a stand-in for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "integrations" / "python" / "test_run_command.py"
OF_OTHER_HOSTS = (
    "test_ranks_of_two_hosts_meet",
    "test_another_host_gets_the_named_variables",
    "test_the_first_failure_ends_all",
    "test_no_rank_outlives_the_command",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dropbear") is None or shutil.which("ssh") is None,
        reason="needs root, and dropbear-bin and openssh-client, as `make test-frameworks` has",
    ),
]


def test_ranks_on_other_hosts_by_ssh(tmp_path):
    done = subprocess.run(
        [str(HERE / "ssh.sh"), str(tmp_path), sys.executable, "-m", "pytest", "-q",
         *(f"{TESTS}::{name}" for name in OF_OTHER_HOSTS)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    logins = (tmp_path / "log").read_text().count("auth succeeded")
    assert logins >= 7, "the stand-in was taken"
