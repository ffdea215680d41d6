"""Models and training loops that tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import thinwire.torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 96


def make_mlp(seed: int = 7, width: int = WIDTH) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )


class Shuffled(torch.nn.Module):
    """Runs its layers in another order than the order in which it registers them, so DDP rebuilds
    its buckets.

    `skip`: the layer that forward() leaves out, if any."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.a = torch.nn.Linear(width, width)
        self.b = torch.nn.Linear(width, width)
        self.c = torch.nn.Linear(width, width)
        self.skip = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("b", "c", "a"):
            if name != self.skip:
                x = torch.tanh(getattr(self, name)(x))
        return x


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference between the model and a fixed teacher."""
    out = model(x)
    return (out - torch.sin(x[:, : out.shape[1]])).square().mean()


def wrap(model: torch.nn.Module, codec: str | None, **options) -> tuple:
    """Return (ddp, state). codec None: plain DDP, without a state. Everything is compressed."""
    ddp_options = {
        key: options.pop(key)
        for key in ("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters",
                    "process_group")
        if key in options
    }  # fmt: skip
    ddp = DistributedDataParallel(model, **ddp_options)
    if codec is None:
        return ddp, None
    return ddp, thinwire.torch.compress(ddp, codec=codec, **{"min_bytes": 0, **options})


def data(step: int, rank: int, width: int = WIDTH, batch: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * step + rank)
    return torch.randn(batch, width, generator=generator)


def train(
    ddp: DistributedDataParallel,
    steps: int,
    start: int = 0,
    lr: float = 0.05,
    on_step: Callable[[int], None] | None = None,
) -> float:
    """Train by SGD on a fixed teacher, and return the last loss."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    dtype = next(ddp.parameters()).dtype
    loss = torch.zeros(())
    for step in range(start, start + steps):
        x = data(step, dist.get_rank()).to(dtype)
        optimizer.zero_grad()
        loss = loss_of(ddp, x)
        loss.backward()
        optimizer.step()
        if on_step is not None:
            on_step(step)
    return loss.item()


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def digest(model: torch.nn.Module) -> str:
    """Return a digest of the bits of all parameters."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
