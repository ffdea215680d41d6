"""thinwire.ray.Executor: train on two Ray workers; one is killed, and new ones continue from the
checkpoint.

python integrations/examples/ray_executor.py"""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
import torch
import torch.distributed as dist
from thinwire import PeerLostError
from thinwire.ray import Executor
from thinwire.torch import compress
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 128, 32


class Trainer:
    """The state of each worker between calls."""

    def __init__(self, saved: dict[str, Any] | None) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )
        if saved is not None:
            self.model.load_state_dict(saved["model"])
        self.ddp = DistributedDataParallel(self.model)
        self.state = compress(self.ddp, codec="int4", min_bytes=0, timeout_s=10)
        if saved is not None:
            self.state.load_state_dict(saved["thinwire"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        torch.manual_seed(100 + dist.get_rank())

    def train(self, steps: int, killed_in: int = -1) -> float:
        for step in range(steps):
            if (step, dist.get_rank()) == (killed_in, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(BATCH, WIDTH)
            self.optimizer.zero_grad()
            loss = (self.ddp(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def save(self) -> dict[str, Any]:
        """Return a checkpoint. All ranks call it; rank 0's has the residuals of all."""
        return {"model": self.model.state_dict(), "thinwire": self.state.gathered_state_dict()}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    executor = Executor(2, env_vars={"OMP_NUM_THREADS": "1"})
    executor.start(Trainer, [None])
    first = executor.execute(lambda trainer: trainer.train(1))[0]
    executor.execute(lambda trainer: trainer.train(30))
    saved = executor.execute(lambda trainer: trainer.save())[0]
    try:
        executor.execute(lambda trainer: trainer.train(10, killed_in=5))
    except PeerLostError as error:
        print("PeerLostError:", str(error).partition("(")[0])
    executor.shutdown()
    executor.start(Trainer, [saved])
    last = executor.execute(lambda trainer: trainer.train(30))[0]
    ranks = executor.run(dist.get_rank)
    print(f"int4: loss {first:.3f} to {last:.3f} on ranks {ranks}")
    executor.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
