"""A loop for Horovod: images, a sampler for each rank, epochs with validation. One line differs.

torchrun --nproc-per-node 2 integrations/examples/horovod_digits.py [--compression int4]"""

from __future__ import annotations

import argparse

import thinwire.horovod as hvd  # was: import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIDE, CLASSES, IMAGES = 16, 8, 1024


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * (SIDE // 4) ** 2, 128)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x)), 4)
        x = functional.dropout(functional.relu(self.hidden(x.flatten(1))), 0.2, self.training)
        return functional.log_softmax(self.out(x), dim=1)


def images(seed: int) -> TensorDataset:
    """A bright bar in noise; its place is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    x = torch.rand(IMAGES, 1, SIDE, SIDE, generator=generator)
    for image, label in zip(x, labels.tolist(), strict=True):
        rows = slice(2 * label, 2 * label + 2)
        image[0, rows] += 0.6
    return TensorDataset(x, labels)


def average(value: torch.Tensor, name: str) -> float:
    return hvd.allreduce(value, name=name).item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int
) -> None:
    model.train()
    loader.sampler.set_epoch(epoch)
    for number, (x, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(x), labels)
        loss.backward()
        optimizer.step()
        if number % 8 == 0 and hvd.rank() == 0:
            done = number * len(x)
            print(f"epoch {epoch} [{done}/{len(loader.sampler)}] loss {loss.item():.3f}")


def validate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Loss and accuracy over the samples of all ranks."""
    model.eval()
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for x, labels in loader:
            out = model(x)
            loss += functional.nll_loss(out, labels, reduction="sum").item()
            right += (out.argmax(1) == labels).float().sum().item()
    count = len(loader.sampler)
    return (
        average(torch.tensor(loss / count), "validation loss"),
        average(torch.tensor(right / count), "validation accuracy"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--compression", default="none", help="none, fp16, int8, int4")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    loaders = []
    for seed in (1, 2):
        data = images(seed)
        sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
        loaders.append(DataLoader(data, arguments.batch, sampler=sampler))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, arguments.compression),
        op=hvd.Average,
    )
    for epoch in range(1, arguments.epochs + 1):
        train(model, optimizer, loaders[0], epoch)
        loss, accuracy = validate(model, loaders[1])
        if hvd.rank() == 0:
            print(f"epoch {epoch}: validation loss {loss:.3f}, accuracy {100 * accuracy:.0f} %")


if __name__ == "__main__":
    main()
