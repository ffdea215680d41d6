"""Optimizers of compressed plain modules around the tests' models: making one, stepping with it,
and the expected weights."""

from __future__ import annotations

from typing import Any

import torch
from models import data, loss_of
from thinwire.torch.optimizer.module_compression import OptimizedCompression

POLICIES = ("p3", "wfbp", "fifo")


class Wrapped:
    """An optimizer and the compression of its model as one object. Attributes that the compression
    does not have are the optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer, model: torch.nn.Module, codec=None, **options):
        self.inner = inner
        self.exchange = OptimizedCompression(model, codec, inner, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "exchange"):
            raise AttributeError(name)
        return getattr(self.exchange if hasattr(self.exchange, name) else self.inner, name)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "thinwire": self.exchange.state_dict()}

    def gathered_state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "thinwire": self.exchange.gathered_state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict({k: v for k, v in saved.items() if k != "thinwire"})
        self.exchange.load_state_dict(saved["thinwire"])


def make_sgd(model: torch.nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def wrapped(model, policy="p3", optimizer=None, **options) -> Wrapped:
    inner = make_sgd(model) if optimizer is None else optimizer
    options = {"codec": "fp32", "min_bytes": 0, **options}
    return Wrapped(inner, model, policy=policy, **options)


def train(model, optimizer, steps: int, rank: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()


def alone(model, optimizer, steps: int, world: int = 2) -> None:
    """Train the weights that all ranks together must reach, up to rounding."""
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, data(step, rank)) / world).backward()
        optimizer.step()


def close_to(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
