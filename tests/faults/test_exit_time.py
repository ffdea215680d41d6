"""A script that ends without closing anything is gone as soon as it is with plain DDP."""

import os
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import thinwire

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("exits")]

HERE = Path(__file__).resolve().parent
PACKAGE = Path(thinwire.__file__).resolve().parents[1]
REPETITIONS = 1
ATTEMPTS = 5  # another process may take the processors during any one
BEYOND_S = 0.5  # what thinwire may cost, in medians of the same run
DEADLINE_S = 300


@pytest.fixture(scope="module")
def script():
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    script = subprocess.Popen(
        [sys.executable, str(HERE / "exiting.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    alarm = threading.Timer(DEADLINE_S, script.kill)
    alarm.start()
    yield script
    alarm.cancel()
    script.kill()
    script.wait()


@pytest.mark.parametrize("end", ["return", "apart", "sys.exit", "exception", "os._exit"])
def test_an_exit_without_close_takes_as_long_as_plain_ddps(tmp_path, script, end):
    tried = []
    for attempt in range(ATTEMPTS):
        plain, ours = medians(script, end, tmp_path / str(attempt))
        tried.append(f"plain DDP {plain:.2f} s, thinwire {ours:.2f} s")
        if ours <= plain + BEYOND_S:
            print(f"{end}: {tried[-1]}")
            return
    pytest.fail(f"{end}: {tried}")


def medians(script: subprocess.Popen[str], end: str, folder: Path) -> tuple[float, float]:
    """The lifetimes with plain DDP and with thinwire, in turns."""
    folder.mkdir()
    seconds: dict[str, list[float]] = defaultdict(list)
    for repetition in range(REPETITIONS):
        for how in ("plain", "thinwire"):
            seconds[how] += lifetimes(script, how, end, folder / f"{how}{repetition}")
    return statistics.median(seconds["plain"]), statistics.median(seconds["thinwire"])


def lifetimes(script: subprocess.Popen[str], how: str, end: str, store: Path) -> list[float]:
    """Seconds of both ranks from their last line to their ends."""
    for rank in range(2):
        script.stdin.write(f"{how} {end} {store} {rank}\n")
    script.stdin.flush()
    times: dict[tuple[str, str], float] = {}
    for _ in range(4):
        rank, what, at = script.stdout.readline().split()
        times[rank, what] = float(at)
    return [times[rank, "gone"] - times[rank, "done"] for rank in "01"]
