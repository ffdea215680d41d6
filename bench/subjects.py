"""Subjects of the scheduling benchmarks: models on random data, under a policy and a codec."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from thinwire.torch.optimizer import DistributedOptimizer
from torch import nn

ALONE = "alone"  # in place of a policy: no exchange at all
CLASSES = 10


def _vgg() -> nn.Module:
    """VGG-like: convolutions that take most of the time and have few parameters, then fully
    connected layers with most of them. 32 x 32 images."""
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32))]
    channels = 3
    for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
    layers += [nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, CLASSES))


def _mlp() -> nn.Module:
    """Equal layers: as many bytes as computing everywhere."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


def _conv() -> nn.Module:
    """Few parameters for much computing."""
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32))]
    channels = 3
    for width in (32, 64, 64, 128, 128):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, stride=1 + (width > channels)),
            nn.ReLU(),
        ]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the width of an input
    "vgg": (_vgg, 3 * 32 * 32),
    "mlp": (_mlp, 1024),
    "conv": (_conv, 3 * 32 * 32),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch_of(name: str, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(size, MODELS[name][1], generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


class Subject:
    """A model that is trained under one policy, or alone."""

    def __init__(self, model: str, batch: int, policy: str, codec: str, **options: Any) -> None:
        self._name, self._batch = model, batch
        self.model = make_model(model)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if policy != ALONE:
            self.optimizer = DistributedOptimizer(
                self.optimizer, self.model, codec=codec, policy=policy, timeout_s=120, **options
            )
        self._steps = 0
        self.turns: list[float] = []

    def loss(self) -> torch.Tensor:
        """The loss of the next batch."""
        x, y = batch_of(self._name, self._batch, self._steps)
        self._steps += 1
        return nn.functional.cross_entropy(self.model(x), y)

    def run(self) -> None:
        """A forward and a backward pass."""
        self.loss().backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.run()
            self.optimizer.step()
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.finish()

    def turn(self, steps: int = 8) -> None:
        """Notes the slowest rank's mean step, with the last exchange waited for."""
        dist.barrier()
        start = time.perf_counter()
        self.train(steps)
        seconds = torch.tensor((time.perf_counter() - start) / steps)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.turns.append(seconds.item())

    def digest(self) -> str:
        """A digest of the weights."""
        hashed = hashlib.sha256()
        for parameter in self.model.parameters():
            hashed.update(parameter.detach().numpy().tobytes())
        return hashed.hexdigest()[:16]

    def close(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.close()
