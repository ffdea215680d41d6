"""A program for Horovod that rank 0 saves and resumes: warm-up of the learning rate, several
backward passes a step, clipping, and a checkpoint each epoch. One line differs.

torchrun --nproc-per-node 2 horovod_checkpoints.py FOLDER [--compression int4]"""

from __future__ import annotations

import argparse
from pathlib import Path

import thinwire.horovod as hvd  # was: import horovod.torch as hvd
import torch
from torch import nn

WIDTH, BATCH, STEPS, PASSES = 128, 32, 20, 2


class Metric:
    """The mean of a value over batches and ranks."""

    def __init__(self, name: str) -> None:
        self._name, self._sum, self._count = name, torch.tensor(0.0), 0

    def update(self, value: torch.Tensor) -> None:
        self._sum += hvd.allreduce(value.detach(), name=self._name)
        self._count += 1

    @property
    def mean(self) -> float:
        return (self._sum / self._count).item()


def rate(epoch: int, step: int, warm_up: float = 1.0) -> float:
    """From that of one rank to that of all, in the first epochs."""
    passed = min(1.0, (epoch + step / STEPS) / warm_up)
    return 1.0 / hvd.size() * (passed * (hvd.size() - 1) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--compression", default="none", help="none, fp16, int8, int4")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = str(arguments.folder / "checkpoint-{}.pt")

    hvd.init()
    found = 0
    for epoch in range(arguments.epochs, 0, -1):
        if Path(file.format(epoch)).exists():
            found = epoch
            break
    # Only rank 0 looks for the files, and sends the result to the others.
    first = hvd.broadcast(torch.tensor(found), root_rank=0, name="first epoch").item()

    torch.manual_seed(1 + hvd.rank())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, arguments.compression),
        backward_passes_per_step=PASSES,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    if first > 0 and hvd.rank() == 0:
        checkpoint = torch.load(file.format(first))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first, arguments.epochs):
        loss = Metric("loss")
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * hvd.size() * rate(epoch, step)
            optimizer.zero_grad()
            for _ in range(PASSES):
                x = torch.randn(BATCH, WIDTH)
                part = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
                (part / PASSES).backward()
                loss.update(part)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} of {arguments.epochs}: loss {loss.mean:.3f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, file.format(epoch + 1))


if __name__ == "__main__":
    main()
