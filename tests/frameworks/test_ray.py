"""Ray Train with attach, and thinwire.ray.Executor, each with its own Ray. Ray listens on the
machine's address, so it runs in a network namespace if the system allows that."""

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


# Ray's own deadlines, raised for a busy machine. Ray may start workers ahead, and a program would
# wait for ever if these were late, so it starts none ahead.
SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # Ray takes one report per check
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
    assert never == "0" and 1 <= int(epoch) <= 2  # Ray stores checkpoints a little later
    assert again == weights
    loss, ratio = re.search(r"int4: loss ([\d.]+), ([\d.]+) times fewer", out).groups()
    assert float(loss) < 0.1 and float(ratio) > 7


def test_an_executors_workers_learn_and_are_replaced(tmp_path):
    out = output_of(tmp_path, str(EXAMPLES / "ray_executor.py"))
    assert "PeerLostError: the worker of rank 1 died" in out
    found = re.search(r"loss ([\d.]+) to ([\d.]+) on ranks \[0, 1\]", out)
    assert found is not None, out
    assert float(found[2]) < 0.3 * float(found[1])


def test_an_executors_servers_hold_what_its_workers_learn(tmp_path):
    out = output_of(tmp_path, str(EXAMPLES / "ray_servers.py"), str(tmp_path / "journal"))
    found = re.findall(r"rank (\d): loss ([\d.]+) to ([\d.]+)", out)
    assert [rank for rank, _, _ in found] == ["0", "1"], out
    assert all(float(last) < 0.5 * float(first) for _, first, last in found)


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
              {"placement": "x"}, {"env_vars": 5}, {"timeout_s": 0}, {"num_servers": -1},
              {"cpus_per_server": 0}, {"journal": "x"}, {"max_worker_restarts": 1},
              {"num_servers": 1, "max_worker_restarts": True},
              {"num_servers": 1, "max_server_restarts": 1},
              {"num_servers": 1, "journal": "x", "max_server_restarts": -1}):
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
    assert len(re.findall(r"wrong .*'InvalidArgumentError'", out)) == 13


SERVED = """
import os, signal, sys, time
from pathlib import Path
import ray, torch, thinwire
from thinwire.ray import Executor
from thinwire.torch import ParameterServerOptimizer

def server_of(journal):
    "The process that has the file open."
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(journal):
                return int(link.parts[2])
        except OSError:
            pass

class Training:
    def __init__(self, mode, timeout_s=60):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.target = torch.randn(50, 4)
        self.model = torch.nn.Sequential(torch.nn.Linear(50, 64), torch.nn.Linear(64, 4))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03)
        self.served = ParameterServerOptimizer(
            optimizer, self.model, mode=mode, codec="int4", timeout_s=timeout_s)
        self.rank = self.served.store.rank
        torch.manual_seed(self.rank)

    def step(self):
        x = torch.randn(64, 50)
        self.served.zero_grad()
        loss = (self.model(x) - x @ self.target).square().mean()
        loss.backward()
        self.served.step()
        return loss.item()

    def digest(self):
        self.served.wait()
        return sum(p.double().abs().sum() for p in self.model.parameters()).item()

def train(journal, kills):
    training, servers = Training("sync"), []
    for step in range(60):
        if kills and training.rank == 0 and step in (20, 22):
            servers.append(server_of(journal))
            if step == 20:
                os.kill(servers[0], signal.SIGKILL)
        loss = training.step()
    digest = training.digest()
    training.served.close()
    return loss, digest, len({*servers, None}) - 1

def kill_again(journal):
    training = Training("sync", timeout_s=20)
    for step in range(60):
        if training.rank == 0 and step in (20, 40):
            os.kill(server_of(journal), signal.SIGKILL)
        training.step()

def lose(journal):
    training = Training("sync", timeout_s=20)
    for step in range(60):
        if (step, training.rank) == (20, 0):
            server = server_of(journal)
            journal.unlink()
            os.kill(server, signal.SIGKILL)
        training.step()

def come_back(folder):
    "Each rank dies once, rank 0 first, and trains on when it is back."
    training = Training("async")
    mine, died = training.rank, [folder / "died-0", folder / "died-1"]
    back = [folder / "back-0", folder / "back-1"]
    for step in range(10_000):
        loss = training.step()
        if training.served.store.has_joined:
            if step == 20:
                back[mine].touch()
        elif step > 20 and not died[mine].exists() and (mine == 0 or back[0].exists()):
            died[mine].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if back[0].exists() and back[1].exists():
            break
        time.sleep(0.01)
    training.served.close()
    return mine, training.served.store.has_joined, loss

def die_in_sync():
    training = Training("sync", timeout_s=5)
    for step in range(60):
        if (step, training.rank) == (20, 1) and not training.served.store.has_joined:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()

def die_each_time(folder):
    if os.environ["RANK"] == "1":
        with (folder / "deaths").open("a") as deaths:
            deaths.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

class Gate:
    "An argument that reaches rank 1's next process when the driver lets it."
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return gate, (self.folder,)

def gate(folder):
    while (folder / "died").exists() and not (folder / "over").exists():
        time.sleep(0.01)
    return Gate(folder)

def die_at_the_end(gate):
    training = Training("async")
    training.step()
    training.served.wait()
    if training.rank == 1:
        (gate.folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    training.served.store.barrier()  # worker 1 is here no more
    training.served.close()

def kinds(error):
    return [k for k in thinwire.__all__ if isinstance(getattr(thinwire, k), type)
            and isinstance(error, getattr(thinwire, k))]

def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{kinds(error)} because of {kinds(error.__cause__)}: {str(error).splitlines()[-1]}"

folder, name = Path(sys.argv[1]), sys.argv[2]
ray.init(num_cpus=3, include_dashboard=False)
journal = folder / "journal" / "server-0.journal"
if name == "server":
    for kills in (False, True):
        executor = Executor(2, 1, journal=journal.parent)
        executor.start()
        print(f"kills {kills}", *executor.run(train, [journal, kills]))
        executor.shutdown()
    executor = Executor(2, 1, journal=journal.parent)
    executor.start()
    print("lost", error_of(executor.run, lose, [journal]))
    executor.shutdown()
    executor = Executor(2, 1, journal=journal.parent, max_server_restarts=1)
    executor.start()
    try:
        executor.run(kill_again, [journal])
    except thinwire.Error as error:
        print("again", kinds(error.__cause__), *str(error.__cause__).splitlines())
    executor.shutdown()
else:
    executor = Executor(2, 1, max_worker_restarts=2)
    executor.start()
    print("back", *executor.run(come_back, [folder]))
    executor.shutdown()
    executor.start()
    print("sync", error_of(executor.run, die_in_sync))
    executor.shutdown()
    executor.start()
    first, second = executor.run_remote(die_at_the_end, [Gate(folder)])
    ray.get([first, *executor._serving])
    (folder / "over").touch()
    print("over", error_of(ray.get, second))
    executor.shutdown()
    executor.start()
    try:
        executor.run(die_each_time, [folder])
    except thinwire.PeerLostError as error:
        print("always", len((folder / "deaths").read_text()), "deaths:", *str(error).splitlines())
    executor.shutdown()
"""


@pytest.fixture
def served(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SERVED)
    return lambda name: output_of(tmp_path, str(program), str(tmp_path), name)


def test_a_killed_server_comes_back_with_the_same_bits(served):
    """Ray restarts it, and workers wait. If its journal is gone, or it dies more often than it may
    be restarted, all workers get a typed error."""
    out = served("server")
    peace, kill = (
        re.findall(r"\(([\de.-]+), ([\d.]+), (\d)\)", line) for line in re.findall(r"kills .*", out)
    )
    assert {digest for _, digest, _ in peace + kill} == {peace[0][1]}, out
    assert float(peace[0][0]) < 10, "the first loss is about 50"
    assert kill[0][2] == "2", "another process serves"
    assert re.findall(r"lost .*'DataLossError'.*", out), out  # a worker's own error, or the cause
    assert re.findall(r"again .*'PeerLostError'.*server 0 died 2 .*max_server_restarts=1", out), out


def test_killed_workers_come_back_in_async_and_are_an_error_in_sync(served):
    out = served("worker")
    back = re.findall(r"\((\d), (True|False), ([\de.-]+)\)", out)
    assert [words[:2] for words in back] == [("0", "True"), ("1", "True")], out
    assert all(float(loss) < 10 for _, _, loss in back), "the first loss is about 50"
    assert re.findall(r"sync .*'(?:PeerLostError|MismatchError)'", out), out
    assert re.findall(r"over .*'PeerLostError'.*the other workers had left", out), out
    assert re.findall(r"always 3 deaths: .*rank 1 died 3 times.*max_worker_restarts=2", out), out
