"""Ranks that are started by the process managers of MPI libraries."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
# Debian's names. Intel MPI has MPICH's Hydra.
MANAGERS = {
    "Open MPI": ("mpirun.openmpi", "--oversubscribe"),
    "MPICH or Intel MPI": ("mpiexec.hydra",),
}


@pytest.mark.parametrize("name", MANAGERS)
def test_ranks_meet_under_mpirun(name):
    command, *options = MANAGERS[name]
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not here: `make test-frameworks` installs it")
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    done = subprocess.run(
        [command, *options, "-n", "3", sys.executable, str(HERE / "meet.py")],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3, on its host {rank} of 3, by {name}" in done.stdout
    assert done.stdout.count(": 3.00") == 3
