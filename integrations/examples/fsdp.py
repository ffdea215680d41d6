"""FSDP2: sharded parameters, and gradients through a compressed reduce-scatter.

torchrun --nproc-per-node 2 integrations/examples/fsdp.py [codec]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, BATCH, WIDTH = 100, 64, 128


def main(codec: str = "int4") -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)  # the same weights on every rank
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = compress(model, codec=codec)  # the line that is new
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())  # other data on every rank
    first = loss = None
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = state.stats()
    if dist.get_rank() == 0:
        print(
            f"{codec}: loss {first:.3f} to {loss.item():.3f} in {stats['steps']} steps, "
            f"{stats['ratio']:.1f} times fewer bytes than fp32"
        )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
