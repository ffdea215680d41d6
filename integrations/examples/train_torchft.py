"""torchft: two replicas train with a compressed allreduce; one is killed, and the other continues.

python integrations/examples/train_torchft.py"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist
from thinwire.torchft import ThinwireProcessGroup
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

REPLICAS, STEPS, KILLED_IN, WIDTH, BATCH = 2, 40, 20, 128, 64


def train(replica: int, lighthouse: str, all_are_here: Barrier) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ThinwireProcessGroup(codec="int8", min_bytes=0, timeout_s=10)
    manager = Manager(
        pg=group, min_replica_size=1, rank=0, world_size=1, replica_id=f"replica_{replica}",
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=model.state_dict, lighthouse_addr=lighthouse, hostname="localhost",
        store_addr="127.0.0.1", store_port=store.port, timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    torch.manual_seed(100 + replica)  # different data on every replica
    losses, ratio, sizes = [], 1.0, set()
    all_are_here.wait()  # else the first might finish before the second has started
    while manager.current_step() < STEPS:
        if replica == 1 and manager.current_step() == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
        loss.backward()
        optimizer.step()  # only if all replicas have got all gradients
        losses.append(loss.item())
        sizes.add(group.size())
        ratio = max(ratio, group.stats()["ratio"] if group.size() > 1 else 1.0)
    print(
        f"int8: loss {losses[0]:.3f} to {losses[-1]:.3f} in {manager.current_step()} steps of "
        f"{sorted(sizes)} replicas, {ratio:.1f} times fewer bytes than fp32",
        flush=True,
    )
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(REPLICAS)
    replicas = [spawn.Process(target=train, args=(r, address, start)) for r in range(REPLICAS)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    lighthouse.shutdown()
    print("exit codes:", [replica.exitcode for replica in replicas])


if __name__ == "__main__":
    main()
