"""Models in rounds between sites: what all members train, what stays a member's own, and what is
refused before it reaches other members."""

from __future__ import annotations

import pytest
import torch
from models import digest
from ranks import run
from thinwire import errors
from thinwire.torch import sites
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 64


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding((x.abs() * 10).long() % WIDTH)


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))


def frozen() -> torch.nn.Sequential:
    model = two_layers()
    model[0].requires_grad_(False)
    return model


def made(make, **options) -> tuple[torch.nn.Module, sites.LocalSGD]:
    torch.manual_seed(5)
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    local = sites.LocalSGD(sites.static(), model, inner, 2, **options)
    local.optimizer = inner
    return model, local


def step(model: torch.nn.Module, local: sites.LocalSGD, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    local.optimizer.step()
    local.optimizer.zero_grad()


MODELS = {
    "tied": Tied,
    "sparse": Sparse,
    "frozen": frozen,
    "buffers": lambda: torch.nn.Sequential(*two_layers(), torch.nn.BatchNorm1d(4)),
    "bfloat16": lambda: two_layers().bfloat16(),
    "compiled": lambda: torch.compile(two_layers(), backend="eager"),
}


def trained(rank: int) -> dict[str, str]:
    bits = {}
    for name, make in MODELS.items():
        model, local = made(make)
        with local:
            for number in range(4):
                step(model, local, 2 * number + rank)
        bits[name] = digest(model)
        if name == "buffers":
            bits["running mean"] = str(model[-1].running_mean)
    return bits


def test_members_have_the_same_bits_of_all_models_and_buffers_of_their_own():
    first, second = run(trained)
    assert first.pop("running mean") != second.pop("running mean")
    assert first == second


def spoiled(rank: int):
    """Rank 1 gets a NaN in its second round."""
    model, local = made(two_layers)
    with pytest.raises(errors.Error) as raised, local:
        for number in range(6):
            if rank and number == 3:
                with torch.no_grad():
                    model[0].weight[1, 2] = torch.nan
            step(model, local, number)
    finite = all(p.isfinite().all() for p in model.parameters())
    return type(raised.value), str(raised.value), finite


def test_a_member_whose_parameters_are_not_finite_leaves_before_it_spoils_all():
    (kind, _, finite), (other, message, _) = run(spoiled)
    assert (kind, finite) == (errors.PeerLostError, True)
    assert other is errors.InvalidArgumentError
    assert "['0.weight', " in message
    assert "of this member have elements that are not finite" in message


def replaced(model: torch.nn.Sequential) -> None:
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().clone())


def unfrozen(model: torch.nn.Sequential) -> None:
    model[0].requires_grad_(True)


def added(model: torch.nn.Sequential) -> None:
    model.append(torch.nn.Linear(4, 4))


def changes(_rank: int) -> None:
    for make, change, names in (
        (two_layers, replaced, "1.weight"),
        (frozen, unfrozen, "0.weight', '0.bias"),
        (two_layers, added, "2.weight', '2.bias"),
    ):
        model, local = made(make)
        with (
            pytest.raises(errors.InvalidArgumentError, match=rf"\['{names}'\] were replaced"),
            local,
        ):
            step(model, local, 0)
            change(model)
            step(model, local, 1)


def test_parameters_that_would_train_apart_are_named():
    run(changes, world=1)


def sharded(_rank: int) -> None:
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    message = r"'0\.weight': got a DTensor, .*whole parameters"
    with pytest.raises(errors.InvalidArgumentError, match=message):
        made(lambda: model)


def test_a_site_under_fsdp_is_refused():
    run(sharded, world=1)


def pulled(_rank: int) -> None:
    model, local = made(Sparse, prox=0.1)
    message = r"prox=0.1 with the sparse gradient of 'embedding\.weight'"
    with pytest.raises(errors.InvalidArgumentError, match=message), local:
        step(model, local, 0)


def test_prox_of_sparse_gradients_is_refused():
    run(pulled, world=1)
