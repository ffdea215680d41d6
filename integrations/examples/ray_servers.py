"""thinwire.ray.Executor with a parameter server: two Ray workers train with bounded staleness. Ray
restarts the server and workers that die.

python integrations/examples/ray_servers.py FOLDER_OF_THE_JOURNAL"""

from __future__ import annotations

import sys

import ray
import torch
from thinwire.ray import Executor
from thinwire.torch import ParameterServerOptimizer

WIDTH, BATCH, STEPS = 128, 32, 100


def train(steps: int) -> tuple[float, float]:
    """Called on each worker, and again on a restarted worker, which joins the run."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    served = ParameterServerOptimizer(optimizer, model, mode="ssp:staleness=2", codec="int4")
    torch.manual_seed(100 + served.store.rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH)
        served.zero_grad()
        loss = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
        loss.backward()
        served.step()
        losses.append(loss.item())
    served.close()
    return losses[0], losses[-1]


def main(folder: str) -> None:
    ray.init(num_cpus=3, include_dashboard=False)
    executor = Executor(
        2,
        num_servers=1,
        cpus_per_server=1,
        journal=folder,  # without a journal, a server that dies ends the run
        max_worker_restarts=10,  # for modes async and ssp
        env_vars={"OMP_NUM_THREADS": "1", "THINWIRE_TIMEOUT_S": "60"},  # of workers and servers
    )
    executor.start()
    for rank, (first, last) in enumerate(executor.run(train, [STEPS])):
        print(f"int4, rank {rank}: loss {first:.3f} to {last:.3f}")
    executor.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
