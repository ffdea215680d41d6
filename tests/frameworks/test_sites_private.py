"""integrations/examples/sites_private.py: two sites learn with Opacus, and report an epsilon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opacus")
PROGRAM = Path(__file__).resolve().parents[2] / "integrations" / "examples" / "sites_private.py"
EPOCHS, RATE, DELTA = 4, 256 / 4096, 1e-5  # for the program


def run(*arguments: str) -> tuple[float, list[float]]:
    """Return the accuracy, and the epsilon of both sites."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(PROGRAM), "--epochs", str(EPOCHS), *arguments],
        capture_output=True, text=True, timeout=150, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"accuracy ([\d.]+)", done.stdout)[1])
    return accuracy, [float(found) for found in re.findall(r"epsilon ([\d.]+)", done.stdout)]


def test_two_private_sites_learn_and_say_their_epsilon():
    from opacus.accountants import RDPAccountant

    accuracy, epsilons = run("--noise", "1.0")
    assert accuracy > 0.85  # 0.5 is chance
    accountant = RDPAccountant()  # an upper bound of the one that the program prints
    for _ in range(round(EPOCHS / RATE)):
        accountant.step(noise_multiplier=1.0, sample_rate=RATE)
    bound = accountant.get_epsilon(DELTA)
    assert len(epsilons) == 2
    assert all(0.6 * bound < epsilon <= bound + 0.01 for epsilon in epsilons)
    _, stricter = run("--noise", "2.0")
    assert max(stricter) < 0.5 * min(epsilons)
