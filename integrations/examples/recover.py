"""Three ranks train with DDP; one is killed during a step, and the other two continue.

python integrations/examples/recover.py"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import torch
import torch.distributed as dist
from thinwire.torch import check_replicas, compress, hook
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, KILLED_IN, WIDTH, BATCH = 3, 60, 20, 128, 32
SETTLE_S = 3.0  # seconds; all ranks get the error of a failure well within this time


def join(store: dist.Store, generation: int, ranks: list[int], me: int) -> None:
    place = dist.PrefixStore(f"generation {generation}", store)
    dist.init_process_group("gloo", store=place, rank=ranks.index(me), world_size=len(ranks))


def who_is_left(store: dist.Store, generation: int, ranks: list[int], me: int) -> list[int]:
    """Find the ranks that are alive, by their own reports; a launcher may know better."""
    store.set(f"alive {generation} {me}", "")
    time.sleep(SETTLE_S)
    return [rank for rank in ranks if store.check([f"alive {generation} {rank}"])]


def make_model(me: int) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    torch.manual_seed(100 + me)  # different data on every rank
    return model


def train(me: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks, generation = list(range(RANKS)), 0
    join(store, generation, ranks, me)
    model = make_model(me)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp = DistributedDataParallel(model)
    state = compress(ddp, codec="int4", min_bytes=0, timeout_s=10, recoverable=True)
    step, loss = 0, torch.zeros(())
    while step < STEPS:
        if me == 1 and step == KILLED_IN:
            model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            loss = (ddp(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
        except RuntimeError as error:  # of thinwire, or of torch's own collectives
            print(f"rank {me}, step {step}: {type(error).__name__}: {error}", flush=True)
            generation += 1
            ranks = who_is_left(store, generation, ranks, me)
            dist.destroy_process_group()
            join(store, generation, ranks, me)
            recovery = state.recover(module=model, optimizer=optimizer)
            step = recovery.step
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(state, hook)
            print(f"rank {me} goes on at step {step} as one of {ranks}", flush=True)
    check_replicas(model)
    print(f"rank {me}: {step} steps, loss {loss.item():.4f}, replicas equal", flush=True)
    state.close()
    dist.destroy_process_group()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=train, args=(me, store.port)) for me in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes:", [process.exitcode for process in processes])


if __name__ == "__main__":
    main()
