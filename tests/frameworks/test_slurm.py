"""Ranks that srun starts, on a real Slurm with one node."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("slurmctld") is None,
        reason="needs root, and slurmctld, slurmd and slurm-client, as `make test-frameworks` has",
    ),
]


def by_slurm(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HERE / "slurm.sh"), str(folder), *command, sys.executable, str(HERE / "meet.py")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_ranks_meet_under_srun(tmp_path):
    done = by_slurm(tmp_path, "srun", "--ntasks=3")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3, on its host {rank} of 3, by Slurm" in done.stdout
    assert done.stdout.count(": 3.00") == 3


def test_an_allocation_without_srun_is_told_so(tmp_path):
    """A batch script that starts Python itself has such an environment."""
    done = by_slurm(tmp_path, "salloc", "--ntasks=2")
    assert done.returncode != 0
    assert "no launcher started this process" in done.stderr and "srun" in done.stderr
