"""Accumulation, clipping, autocast and a loss scaler work as the frameworks do them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_precision import ACCUMULATE, BATCHES, CLIP

PROGRAM = Path(__file__).resolve().parent / "mixed_precision.py"
STEPS = BATCHES // ACCUMULATE


def ranks_of(framework: str, folder: Path, program: Path = PROGRAM) -> list[Any]:
    """Run `program` with the framework's name and the folder, and return each rank's JSON."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not here: `make test-frameworks` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(program), framework, str(folder)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_ranks_step_alike(framework, tmp_path):
    rows = ranks_of(framework, tmp_path)
    assert len(rows) == 2 and rows[0] == rows[1]
    (row, _) = rows
    assert row["losses"][1] < row["losses"][0]
    assert row["exchanges"] == STEPS and row["ratio"] > 3.5  # none while accumulating
    # Clipped after the exchange, so by the norm of the mean, and on fp32 gradients.
    assert row["norms"] == pytest.approx(len(row["norms"]) * [CLIP], rel=1e-3)
    if framework == "lightning":
        # After one rank's Inf all ranks skip the step and halve the scale.
        assert row["computed_in"] == "torch.float16"
        assert (len(row["norms"]), row["scale"]) == (STEPS - 1, 512)
        saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["thinwire"]["gathered"]
        assert len(saved) == 2
        assert all(rank["residuals"]["net.layer.weight"]["first"].any() for rank in saved)
    else:
        assert row["computed_in"] == "torch.bfloat16"
        assert len(row["norms"]) == STEPS
