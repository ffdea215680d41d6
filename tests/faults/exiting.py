"""Ranks that train with DDP and end without closing anything, one line of output each.

  python exiting.py     reads lines "HOW END STORE RANK" and forks a rank for each

HOW is plain or thinwire. END is how the script ends; "apart" means that both return, rank 1 later
than rank 0. A rank prints when its last line ran, and its parent when the rank was gone, both by
time.monotonic. Ranks are forked so that torch is imported once. Each ends as a script does, by the
interpreter's normal exit."""

import gc
import os
import sys
import threading
import time

import torch
import torch._dynamo  # else the first DDP of each rank imports it
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
from thinwire.torch import compress
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
APART_S = 3.5


def train(how: str, store: str, rank: int) -> DistributedDataParallel:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(600, 600))
    if how == "thinwire":
        compress(ddp, codec="int4", min_bytes=0)
    for _ in range(STEPS):
        ddp(torch.ones(2, 600)).square().mean().backward()
    dist.barrier()
    return ddp


def say(rank: str, what: str) -> None:
    """Print in one write, since the ranks share their parent's output."""
    os.write(1, f"{rank} {what} {time.monotonic()}\n".encode())


def announce(pid: int, rank: str) -> None:
    os.waitpid(pid, 0)
    say(rank, "gone")


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each rank's last collection copies its parent's memory
    for line in sys.stdin:
        how, end, store, rank = line.split()
        pid = os.fork()
        if pid > 0:
            threading.Thread(target=announce, args=(pid, rank)).start()
            continue
        global model  # lives until the end, as in a script
        model = train(how, store, int(rank))
        if end == "apart" and rank == "1":
            time.sleep(APART_S)
        say(rank, "done")
        if end == "sys.exit":
            sys.exit(0)
        if end == "exception":
            raise ValueError("boom")
        if end == "os._exit":
            os._exit(0)
        return


main()
