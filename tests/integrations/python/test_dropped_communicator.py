"""A communicator that is not closed ends by itself: when the last reference goes, after the work in
flight, and at the interpreter's exit."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import thinwire
import torch
import torch.distributed as dist
from ranks import run, run_scripts
from thinwire.comm import Communicator
from thinwire.config import Config

NUMEL = 300_000  # several chunks
DEADLINE_S = 200.0


def pair(group: str) -> list[Communicator]:
    """Return both ranks of a group in this process."""
    ranks: list[Communicator | None] = [None, None]
    config = Config(codec="int8", local_group=group, timeout_s=DEADLINE_S)

    def connect(rank: int) -> None:
        ranks[rank] = Communicator(rank, 2, None, group, config)

    other = threading.Thread(target=connect, args=(1,))
    other.start()
    connect(0)
    other.join()
    return ranks


def start(communicator: Communicator, tensor: np.ndarray):
    return communicator.start(tensor.ctypes.data, len(tensor), "float32", "sum", "tensor")


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def await_threads(count: int) -> None:
    """Wait for threads to go: joined threads leave /proc a moment later."""
    end = time.monotonic() + DEADLINE_S
    while threads() > count:
        assert time.monotonic() < end, f"{threads() - count} threads are left"
        time.sleep(0.01)


def test_a_dropped_communicator_ends_its_engine():
    before = threads()
    first, second = pair("ends")
    assert threads() > before
    del first, second
    await_threads(before)


def test_one_that_has_failed_ends_as_well():
    before = threads()
    first, second = pair("fails")
    first.fail(thinwire.Error("enough"))
    tensor = np.ones(NUMEL, np.float32)
    with pytest.raises(thinwire.Error, match="enough"):
        second.all_reduce(tensor.ctypes.data, NUMEL, "float32", "sum")
    del first, second
    await_threads(before)


def test_what_is_in_flight_keeps_it():
    tensors = [np.ones(NUMEL, np.float32) for _ in range(2)]
    first, second = pair("works")
    work, kept = start(first, tensors[0]), weakref.ref(first)
    del first
    gc.collect()
    assert kept() is not None
    start(second, tensors[1]).wait()
    work.wait()
    assert all(np.abs(tensor - 2).max() < 0.05 for tensor in tensors)
    assert kept() is None  # a work that was waited for keeps nothing alive


def test_a_bucket_keeps_it_and_is_refused_after_its_close():
    tensors = [np.ones(NUMEL, np.float32) for _ in range(2)]
    first, second = pair("buckets")
    bucket = first.bucket(NUMEL, "float32", "sum", "tensor")
    del first
    gc.collect()
    work = bucket.start(tensors[0].ctypes.data, tensors[0].ctypes.data)
    start(second, tensors[1]).wait()
    work.wait()
    assert np.abs(tensors[0] - 2).max() < 0.05
    closed = second.bucket(NUMEL, "float32", "sum", "tensor")
    second.close()
    with pytest.raises(thinwire.Error, match="was closed"):
        closed.start(tensors[1].ctypes.data, tensors[1].ctypes.data)


def drop(rank: int, folder: str) -> tuple[int, int]:
    """Return the number of threads before and during the use of a torch Communicator. It must fall
    again afterwards."""
    from thinwire.torch.advanced import Communicator

    def use() -> int:
        communicator = Communicator(dist.FileStore(f"{folder}/s"), rank, 2, "k", "int8")
        communicator.all_reduce(torch.ones(NUMEL))
        return threads()

    before = threads()
    during = use()
    gc.collect()
    await_threads(before)
    return before, during


def test_so_does_that_of_torch(tmp_path):
    for before, during in run(drop, str(tmp_path)):
        assert during > before


SCRIPT = """
import os, sys
import numpy as np
from bench.folder_store import FolderStore
from thinwire.comm import Communicator
from thinwire.config import Config

end, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
config = Config(codec="int8", timeout_s=60)
communicator = Communicator(rank, 2, FolderStore(folder), "exit", config)
tensor = np.ones(100_000, np.float32)
for _ in range(1 + rank):  # rank 1 goes on alone
    communicator.all_reduce(tensor.ctypes.data, len(tensor), "float32", "sum")
if end == "exception":
    raise ValueError("boom")
"""


@pytest.mark.parametrize("end, code, reason", [
    ("return", 0, "rank 0 closed its communicator after 1 collective"),
    ("exception", 1, "rank 0 ended on ValueError: boom"),
])  # fmt: skip
def test_the_end_of_a_script_is_told_its_peers(tmp_path, end, code, reason):
    first, second = run_scripts(SCRIPT, end, str(tmp_path))
    assert first.returncode == code, first.stderr
    assert first.stderr == "" or end == "exception"
    assert second.returncode == 1 and reason in second.stderr, second.stderr


OWNED = """
import sys
from thinwire import comm
from thinwire.config import Config

comm._leave = lambda *_: print("ended by itself")
communicator = comm.Communicator(0, 1, None, "owned", Config())
if sys.argv[1] == "owned":
    communicator.leave_exit_to_owner()
"""


@pytest.mark.parametrize("whose, said", [("nobody's", "ended by itself\n"), ("owned", "")])
def test_an_owner_ends_it_after_what_is_in_flight(whose, said):
    [done] = run_scripts(OWNED, whose, world=1)
    assert (done.stdout, done.stderr) == (said, "")
