"""The end of a script with work in flight: a normal exit drains the work; an exit on an exception
aborts the group and gives the reason."""

from typing import NamedTuple

import pytest
from ranks import run_scripts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("script_exits")]

# Use of freed memory finds it overwritten, instead of working by luck.
OVERWRITE_FREED = {
    "MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}  # fmt: skip

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import torch._dynamo  # by the optimizers
from thinwire.torch import all_reduce, compress

folder, ends = sys.argv[1], sys.argv[2:]

def fork():
    # Forks the ranks of each end, and returns in each; the parent waits for all and leaves.
    pids = {}
    for end in ends:
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                for descriptor, name in enumerate(("out", "err"), 1):
                    file = f"{folder}/{end}.{rank}.{name}"
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
                return end, rank
            pids[pid] = end, rank
    for _ in pids:
        pid, status = os.wait()
        print(*pids[pid], os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 600)).square().mean().backward()
    if end == "half-way" and rank == 0:
        sys.exit()
    optimizer.step()

def main():
    for _ in range(3):
        if rank == 1:
            time.sleep(0.3)  # so that rank 0 leaves first, with its last step in flight
        step()
    if rank == 0 and end == "exception":
        raise ValueError("boom")
    if rank == 0:
        all_reduce(torch.ones(100_000), name="x", async_op=True)
        return
    compression.finish()
    result = torch.ones(100_000)
    all_reduce(result, name="x")
    print("all there", round(result.mean().item()))

end, rank = fork()
dist.init_process_group("gloo", init_method=f"file://{folder}/{end}", rank=rank, world_size=2)
all_reduce(torch.ones(1), name="x")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compression = compress(model, "int4", optimizer=optimizer, policy="p3", timeout_s=100)
main()
"""
ENDS = ("normal", "exception", "half-way")


class Exited(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def exits(tmp_path_factory) -> dict[tuple[str, int], Exited]:
    """Return how ranks ended, by (end, rank). One interpreter, which has imported torch, forks them
    all, and they end like scripts."""
    folder = tmp_path_factory.mktemp("exits")
    [parent] = run_scripts(SCRIPT, str(folder), *ENDS, world=1, environment=OVERWRITE_FREED)
    assert parent.returncode == 0, parent.stderr
    return {
        (end, int(rank)): Exited(
            int(code), *((folder / f"{end}.{rank}.{name}").read_text() for name in ("out", "err"))
        )
        for end, rank, code in map(str.split, parent.stdout.splitlines())
    }


def test_a_normal_exit_drains_what_is_in_flight(exits):
    first, second = (exits["normal", rank] for rank in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == "all there 2\n"  # a sum of ones
    assert not first.stderr.strip(), first.stderr


@pytest.mark.parametrize("end, reason", [
    ("exception", "rank 0 ended on ValueError: boom"),
    ("half-way", "rank 0 left in the middle of a step"),
])  # fmt: skip
def test_an_abnormal_exit_tells_its_peers_why(exits, end, reason):
    first, second = (exits[end, rank] for rank in range(2))
    assert first.returncode == (1 if end == "exception" else 0), first.stderr
    assert second.returncode == 1 and "thinwire.errors.Error" in second.stderr
    assert reason in second.stderr, second.stderr


IN_TORCH = """
import sys, threading, time
import torch.distributed as dist
from datetime import timedelta
from thinwire import errors
from thinwire.torch.sites.meeting import unless_lost

store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
began = threading.Semaphore(0)

def wait_for(seconds):
    began.release()
    store.clone().wait(["nothing"], timedelta(seconds=seconds))

# The calls end one after the other, so one does while Python ends.
for number in range(1, 36):
    try:
        unless_lost(lambda: wait_for(number / 20), lambda: "member 1")
    except errors.PeerLostError:
        pass
for _ in range(35):
    began.acquire()
sys.exit(3)
"""


def test_a_call_of_torchs_that_was_left_behind_does_not_abort_the_exit():
    for done in run_scripts(IN_TORCH, world=1):
        assert done.returncode == 3, done.stderr


BUSY_THREADS = """
import atexit, os, sys, time, weakref

former_groups = []

@atexit.register  # before the imports register theirs, so it runs after them
def check():
    # The threads of a group that is still there may abort the rest of the exit.
    if answers and any(group() is not None for group in former_groups):
        os._exit(4)

import torch, torch.distributed as dist
from thinwire.horovod.exact import Worker
from thinwire.torch import private, works

user, answers = sys.argv[1], sys.argv[2] == "answers"
COUNT = 40
if answers:
    private._EXIT_WAIT_S = 60.0  # for all answers, however slow this machine is
dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]) for _ in range(COUNT if user == "keeper" else 0)]

class Owner:
    pass

def make_busy():
    # Calls on daemon threads that wait for rank 1.
    if user == "works":
        kept, group = works.Kept(), dist.group.WORLD
        for tag in range(COUNT):
            received = group.recv([torch.zeros(4)], 1, tag)
            yield works.GlooWork(received, errors_of, kept).get_future()
    elif user == "worker":
        for tag in range(COUNT):
            worker = Worker("busy")
            worker.submit(lambda tag=tag: dist.recv(torch.zeros(4), 1, tag=tag))
            yield worker
    else:
        while groups:
            owner, group = Owner(), groups.pop()
            dist.all_reduce(torch.ones(4), group=group, async_op=True)
            private.keep_former_group(owner, group)
            former_groups.append(weakref.ref(group))
            yield owner

def errors_of(error):
    return works.typed_error(0, "recv", error)

def answer():
    for number in range(COUNT):
        if user == "keeper":
            dist.all_reduce(torch.ones(4), group=groups.pop())
        else:
            dist.send(torch.ones(4), 0, tag=number)
        time.sleep(0.02)  # so that calls end one after the other, and one does while Python ends

if dist.get_rank() == 0:
    busy = list(make_busy())
    dist.barrier()
    dist.group.WORLD.recv([torch.zeros(1)], 1, COUNT).wait()
    if user == "keeper":
        dist.destroy_process_group()
        busy.clear()
    sys.exit(3)
dist.barrier()
dist.send(torch.ones(1), 0, tag=COUNT)
if answers:
    answer()
else:
    try:
        dist.recv(torch.zeros(1), 0)  # until rank 0 has ended
    except RuntimeError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize("user, answers", [
    ("works", "answers"), ("works", "stays silent"),
    ("worker", "answers"), ("worker", "stays silent"),
    ("keeper", "answers"), ("keeper", "stays silent"),
])  # fmt: skip
def test_threads_that_wait_for_a_peer_neither_abort_nor_keep_the_exit(user, answers):
    """The threads wait in a future of a receive, in Horovod's exact collectives, and in groups that
    a state has left."""
    first, _ = run_scripts(BUSY_THREADS, user, answers)
    assert first.returncode == 3, first.stderr
