"""Steps of a plain training loop under each order of chunks: fifo and wfbp with a barrier in
step(), and p3, where the next forward pass overlaps with communication, with every chunk announced
("p3") and with the order predicted ("p3 planned"). For comparison, FSDP2, which keeps parameters
after the forward pass and sends as many bytes: gradients by reduce-scatters, and the changes of
parameters by gathers.

The model is VGG-like: convolutions that take most of the time and have few parameters, then fully
connected layers with most of the parameters. Choose batch and link so that communication takes
about as long as computation, which `alone` (no exchange) measures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness import Turn
from bench.subjects.steps import shard

TURN = 24  # steps; so many that the last exchange, which overlaps with nothing, hardly counts
WARM_UP, BATCH, CLASSES = 2, 40, 10
CODEC = "int4"
OPTIONS = {"chunk_bytes": 1 << 20, "lanes": 4, "timeout_s": 120.0}


def make_model() -> nn.Module:
    """Return a model for 32 x 32 images, the same on every rank."""
    torch.manual_seed(0)
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


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and classes, which differ between ranks."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(BATCH, 3 * 32 * 32, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


@contextlib.contextmanager
def order(name: str) -> Iterator[Turn]:
    """Yield a turn of "fifo", "wfbp", "p3" or "p3 planned"; "fsdp2": reshard_after_forward=False,
    with both halves compressed; or "alone": no exchange. Each step's time is the turn's mean,
    including the wait for the last exchange."""
    from thinwire.torch import compress

    net, compression, step = make_model(), None, 0
    sharded = _shard(net) if name == "fsdp2" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if name not in ("fsdp2", "alone"):
        policy, _, planned = name.partition(" ")
        settings: Any = OPTIONS | {"policy": policy, "planned": bool(planned)}
        compression = compress(net, CODEC, optimizer=optimizer, **settings)

    def turn(steps: int) -> list[float]:
        nonlocal step
        start = time.perf_counter()
        for _ in range(steps):
            x, y = batch_of(step)
            step += 1
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        if compression is not None:
            compression.finish()
        return [(time.perf_counter() - start) / steps]

    turn(WARM_UP)
    yield turn
    for each in (compression, sharded):
        if each is not None:
            each.close()


def _shard(net: nn.Module) -> Any:
    """Call fully_shard() on a model, and compress its reduce-scatters and gathers."""
    from thinwire.torch import compress
    from torch.distributed.device_mesh import init_device_mesh

    layers = [layer for layer in net.children() if any(True for _ in layer.parameters())]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(net, layers, mesh, reshard_after_forward=False)
    return compress(net, CODEC, gather=CODEC)
