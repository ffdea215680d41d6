"""Ray Train with attach, and thinwire.ray.Executor, on a Ray of their own: in a network namespace
where the system lets anybody have one, since Ray listens on the machine's address."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not here: `make test-frameworks` installs it",
    ),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "integrations" / "examples"
ALONE = ("unshare", "--user", "--map-root-user", "--net", "sh", "-c",
         'ip link set lo up && exec "$@"', "sh")  # fmt: skip


# Ray's own deadlines, raised for a busy machine. A program would wait for ever for workers that Ray
# starts ahead if these are late, so it starts none ahead.
SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # it takes one report at each of them
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
}


def output_of(folder: Path, code: str, *arguments: str) -> str:
    can = subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    done = subprocess.run(
        [*(ALONE if can else ()), sys.executable, code, *arguments],
        capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | SETTINGS | {"HOME": str(folder)},  # Ray writes a token there
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_killed_worker_of_ray_train_changes_no_bit(tmp_path):
    out = output_of(tmp_path, str(EXAMPLES / "train_ray.py"), str(tmp_path))
    (weights, never), (again, epoch) = re.findall(r"weights (\S+), begun at epoch (\d)", out)
    assert never == "0" and 1 <= int(epoch) <= 2  # Ray takes checkpoints a little later
    assert again == weights
    loss, ratio = re.search(r"int4: loss ([\d.]+), ([\d.]+) times fewer", out).groups()
    assert float(loss) < 0.1 and float(ratio) > 7


def test_an_executors_workers_learn_and_are_replaced(tmp_path):
    out = output_of(tmp_path, str(EXAMPLES / "ray_executor.py"))
    assert "PeerLostError: the worker of rank 1 died" in out
    found = re.search(r"loss ([\d.]+) to ([\d.]+) on ranks \[0, 1\]", out)
    assert found is not None, out
    assert float(found[2]) < 0.3 * float(found[1])


ERRORS = """
import os, ray, torch, thinwire, thinwire.torch, torch.distributed as dist
from thinwire.ray import Executor

def lose():
    for step in range(100):
        if (step, dist.get_rank()) == (2, 1):
            os._exit(3)
        thinwire.torch.all_reduce(torch.ones(100_000))

def refuse(rank):
    if dist.get_rank() == rank:
        raise thinwire.MismatchError("refused")

def kind(call):
    try:
        call()
    except Exception as error:
        return [k for k in thinwire.__all__ if isinstance(error, getattr(thinwire, k, int)
                if isinstance(getattr(thinwire, k), type) else int)]

ray.init(num_cpus=2, include_dashboard=False)
executor = Executor(2)
print("not started", kind(lambda: executor.run(len)))
executor.start()
print("typed", kind(lambda: executor.run(refuse, args=[1])))
print("twice", kind(executor.start))
references = executor.run_remote(lose)
print("survivor", kind(lambda: ray.get(references[0])))
print("run", kind(lambda: executor.run(dist.get_rank)))
executor.shutdown()
print("too many", kind(Executor(3, timeout_s=2).start))
executor.start()
print("again", executor.run(dist.get_rank), executor.execute(lambda mine: mine))
executor.shutdown()
for wrong in ({"num_workers": 0}, {"cpus_per_worker": -1}, {"gpus_per_worker": 2.5},
              {"placement": "x"}, {"env_vars": 5}, {"timeout_s": 0}):
    print("wrong", kind(lambda: Executor(**{"num_workers": 1} | wrong)))
"""


def test_errors_are_typed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ERRORS)
    out = output_of(tmp_path, str(program))
    assert re.findall(r"not started .*'Error'", out)
    assert re.findall(r"typed .*'MismatchError'", out)
    assert re.findall(r"twice .*'InvalidArgumentError'", out)
    assert re.findall(r"survivor .*'PeerLostError'", out)
    assert re.findall(r"run .*'PeerLostError'", out)
    assert re.findall(r"too many .*'TimeoutError'", out)
    assert "again [0, 1] [None, None]" in out
    assert len(re.findall(r"wrong .*'InvalidArgumentError'", out)) == 6
