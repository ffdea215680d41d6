"""A training loop without DDP: every rank computes, and a GradientExchange averages.

torchrun --nproc-per-node 2 integrations/examples/plain_loop.py [codec]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from thinwire.torch import GradientExchange

STEPS, BATCH, WIDTH = 100, 64, 128


def main(codec: str = "int4") -> None:
    exchange = GradientExchange(codec, min_bytes=0)  # ranks meet at its first use
    dist.init_process_group("gloo")
    torch.manual_seed(1)  # the same weights on every rank
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    torch.manual_seed(100 + exchange.rank)  # other data on every rank
    first = loss = None
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        exchange.reduce_gradients(parameters)  # .grad is the mean of all ranks now
        optimizer.step()
    stats = exchange.stats()
    if exchange.rank == 0:
        print(
            f"{codec}: loss {first:.3f} to {loss.item():.3f} in {stats['steps']} steps, "
            f"{stats['ratio']:.1f} times fewer bytes than fp32"
        )
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
