"""A model under FSDP2, and what tests do with it on each rank."""

import torch
from models import data
from thinwire.torch import Compression, compress
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

WIDTH = 96  # its products are no multiples of 3, and the last layer's 10 rows are none of 3 or 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 10)
        self.spare = torch.nn.Linear(WIDTH, 10)
        self.skip = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) if self.skip else self.head(x) + self.spare(x)


def sharded(
    codec: str | dict[str, str] | None,
    mesh: DeviceMesh | None = None,
    spare: bool = False,
    **options,
) -> tuple[torch.nn.Module, Compression | None]:
    """Return (model, compression); codec None: plain FSDP2. spare: train the last part too."""
    policy = {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    model = Net()
    model.spare.requires_grad_(spare)
    model.skip = not spare
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model, None if codec is None else compress(model, codec, **options)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank, WIDTH)
    return (model(x) - torch.sin(x[:, :10])).square().mean()


def train(model: torch.nn.Module, steps: int, rank: int, start: int = 0, lr: float = 0.1) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = torch.zeros(())
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
    return loss.item()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return whole gradients. Every rank must call it."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
