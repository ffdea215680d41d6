"""DistributedOptimizer around the tests' models: how it is made, steps with it, and the weights to
come to."""

from __future__ import annotations

import torch
from models import data, loss_of
from thinwire.torch.optimizer import DistributedOptimizer

POLICIES = ("p3", "wfbp", "fifo")


def make_sgd(model: torch.nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def wrapped(model, policy="p3", optimizer=None, **options) -> DistributedOptimizer:
    inner = make_sgd(model) if optimizer is None else optimizer
    options = {"codec": "fp32", "min_bytes": 0, **options}
    return DistributedOptimizer(inner, model, policy=policy, **options)


def train(model, optimizer, steps: int, rank: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()


def alone(model, optimizer, steps: int, world: int = 2) -> None:
    """The weights that all ranks together must come to, up to rounding."""
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, data(step, rank)) / world).backward()
        optimizer.step()


def close_to(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
