"""The examples for frameworks run with the frameworks themselves: they learn, fewer bytes are sent,
and a resumed run ends with the same bits (`make test-frameworks`)."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "integrations" / "examples"
# Each run has its own port, since several tests run at a time.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def python(
    framework: str, *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run an example, and return it if it succeeded."""
    package = "lightning" if framework == "fabric" else framework
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not here: `make test-frameworks` installs it")
    program = str(EXAMPLES / f"train_{framework}.py")
    done = subprocess.run(
        [sys.executable, *launcher, program, *arguments], capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(framework: str, *arguments: str) -> tuple[float, float, int, float, str]:
    """Return (first loss, last loss, steps, ratio, weights) of an example's two ranks."""
    starts_ranks_itself = framework in ("lightning", "fabric")
    done = python(framework, *arguments, launcher=() if starts_ranks_itself else TORCHRUN)
    found = re.search(
        r"int4: loss ([\d.]+) to ([\d.]+) in (\d+) steps, ([\d.]+) times .* weights (\S+)",
        done.stdout,
    )
    assert found is not None, done.stdout + done.stderr
    first, last, steps, ratio, weights = found.groups()
    return float(first), float(last), int(steps), float(ratio), weights


# The argument that resumes an example in the middle of its steps; {}: the folder it was given.
RESUME = {
    "lightning": "{}/epoch=3.ckpt", "fabric": "{}/epoch=3.ckpt", "accelerate": "resume",
    "transformers": "resume",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("framework", RESUME)
def test_an_example_learns_and_resumes_bit_by_bit(framework, tmp_path):
    folder = str(tmp_path / "run")
    first, last, steps, ratio, weights = run(framework, folder)
    assert last < 0.3 * first and ratio > 7
    if framework == "lightning":
        check_that_the_logger_has_statistics(Path(folder))
    _, _, all_steps, _, again = run(framework, folder, RESUME[framework].format(folder))
    assert (all_steps, again) == (steps, weights)


def check_that_the_logger_has_statistics(folder: Path) -> None:
    (log,) = folder.glob("lightning_logs/*/metrics.csv")
    header, *rows = log.read_text().splitlines()
    ratios = [row.split(",")[header.split(",").index("thinwire/ratio")] for row in rows]
    assert any(ratio and float(ratio) > 7 for ratio in ratios)


@pytest.mark.slow
def test_torchfts_survivor_goes_on():
    done = python("torchft")
    found = re.search(
        r"int8: loss ([\d.]+) to ([\d.]+) in 40 steps of \[1, 2\] replicas, ([\d.]+)", done.stdout
    )
    assert found is not None, done.stdout + done.stderr
    first, last, ratio = map(float, found.groups())
    assert last < 0.3 * first and ratio > 3.5
    assert "exit codes: [0, -9]" in done.stdout
