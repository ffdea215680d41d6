"""A script that ends without closing anything exits as soon as with plain DDP.

Both take turns in one run, and their times are compared."""

import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("exits")]

HERE = Path(__file__).resolve().parent
TURNS, MOST_TURNS = 2, 8  # a wait delays every turn, the load of a busy machine does not
RATIO = 2  # limit: a rank's fastest exit with thinwire over its slowest with plain DDP
NOISE_S = 1.0  # of a busy machine; less than rank 1's delay where the two end apart
DEADLINE_S = 1800


@pytest.fixture(scope="module")
def script():
    script = subprocess.Popen(
        [sys.executable, str(HERE / "exiting.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    alarm = threading.Timer(DEADLINE_S, script.kill)
    alarm.start()
    yield script
    alarm.cancel()
    script.kill()
    script.wait()


@pytest.mark.parametrize("end", ["return", "apart", "sys.exit", "exception", "os._exit"])
def test_an_exit_without_close_takes_as_long_as_plain_ddps(tmp_path, script, end):
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    for turn in range(MOST_TURNS):
        for how in ("plain", "thinwire"):
            seconds[how].append(lifetimes(script, how, end, tmp_path / f"{how}{turn}"))
        if turn + 1 >= TURNS and are_alike(seconds):
            break
    print(f"{end}: {dict(seconds)}")
    assert are_alike(seconds), dict(seconds)


def are_alike(seconds: dict[str, list[list[float]]]) -> bool:
    """Compare per rank: a rank that waits for the other's end is fast if the other is slow."""
    for rank in range(2):
        plain, ours = ([turn[rank] for turn in seconds[how]] for how in ("plain", "thinwire"))
        if min(ours) > RATIO * max(plain) + NOISE_S:
            return False
    return True


def lifetimes(script: subprocess.Popen[str], how: str, end: str, store: Path) -> list[float]:
    """Return the seconds of both ranks from their last line to their exit."""
    for rank in range(2):
        script.stdin.write(f"{how} {end} {store} {rank}\n")
    script.stdin.flush()
    times: dict[tuple[str, str], float] = {}
    for _ in range(4):
        rank, what, at = script.stdout.readline().split()
        times[rank, what] = float(at)
    return [times[rank, "gone"] - times[rank, "done"] for rank in "01"]
