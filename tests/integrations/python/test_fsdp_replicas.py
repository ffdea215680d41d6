"""Checkpoints of FSDP2 with two replicas of two shards: on the user's own group, where the mean
over replicas is compressed too, and on HSDP's mesh."""

from pathlib import Path

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data
from ranks import run
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

WIDTH, ROWS = 96, 97  # the last shard is padded
STEPS = 3


def sharded(own: bool, codec: str = "int4"):
    """Return (model, compression): two replicas among four ranks, or only shards among two."""
    torch.manual_seed(7)
    model = torch.nn.Linear(WIDTH, ROWS)
    if dist.get_world_size() == 2:
        return fully_shard(model), compress(model, codec)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    if own:
        replicas = mesh["replica"].get_group()
        return fully_shard(model, mesh=mesh["shard"]), compress(
            model, codec, replicas=replicas, min_bytes=0
        )
    return fully_shard(model, mesh=mesh), compress(model, codec)


def train(model: torch.nn.Module, rank: int, start: int = 0) -> torch.Tensor:
    """Train, and return the sum of this rank's gradients of the weight, which do not depend on the
    weight. SGD with a rate of 1 would change the weight by the mean of these sums over the
    ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(ROWS, WIDTH)
    for step in range(start, start + STEPS):
        x, y = data(step, rank, WIDTH), data(100 + step, rank, ROWS)
        optimizer.zero_grad()
        (model(x) * y).sum().backward()
        optimizer.step()
        total += y.T @ x
    return total


def whole(model: torch.nn.Module) -> torch.Tensor:
    return model.weight.detach().full_tensor().clone()


def resumed(rank: int, own: bool, folder: str):
    codec, gathered = "int4:rounding=stochastic", Path(folder) / "all.pt"
    model, state = sharded(own, codec)
    train(model, rank)
    kept = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
    saved = state.gathered_state_dict()
    if rank == 0:
        torch.save(saved, gathered)
    state.save(Path(folder) / f"{rank}.safetensors")
    train(model, rank, start=STEPS)
    ends = [whole(model)]
    dist.barrier()
    loads = [lambda state: state.load_state_dict(torch.load(gathered))]
    if own:
        loads.append(lambda state: state.load(Path(folder) / f"{rank}.safetensors"))
    for load in loads:
        again, other = sharded(own, codec)
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.copy_(distribute_tensor(kept[name], p.device_mesh, p.placements))
        load(other)
        train(again, rank, start=STEPS)
        ends.append(whole(again))
    return ends


@pytest.mark.parametrize("own", [True, False])
def test_training_goes_on_bit_by_bit(own, tmp_path):
    pytest.importorskip("safetensors")
    for end, *others in run(resumed, own, str(tmp_path), world=4):
        assert all(torch.equal(other, end) for other in others)


def trained(rank: int, own: bool, path: str):
    model, state = sharded(own)
    before = whole(model)
    gradients = train(model, rank)
    saved = state.gathered_state_dict()
    if rank == 0:
        torch.save(saved, path)
    return before - whole(model), gradients


def loaded(_: int, path: str) -> torch.Tensor:
    _, state = sharded(own=False)
    state.load_state_dict(torch.load(path))
    return state.state_dict()["residuals"]["weight"]["first"]


@pytest.mark.parametrize("own", [True, False])
def test_nothing_is_lost_on_the_way_into_shards_alone(own, tmp_path):
    """The applied means and the residuals add up to all gradients."""
    path = str(tmp_path / "all.pt")
    ranks = run(trained, own, path, world=4)
    applied = ranks[0][0].flatten()
    mean = sum(gradients for _, gradients in ranks).flatten() / 4
    assert (mean - applied).abs().max() > 0.1
    torch.testing.assert_close(applied + sum(run(loaded, path)) / 4, mean, rtol=0, atol=1e-3)


def refused(rank: int):
    _, state = sharded(own=True)
    saved = state.state_dict()
    for change, words in (
        ({"replicas": 4}, "with 2 replicas, got the state dict of rank . of 4, with 4"),
        ({"replicas": 3}, "3 replicas among 4 ranks"),
        ({"replicas": "x"}, "'x' replicas"),
        ({"rank": (rank + 1) % 4}, "load every rank's own"),
        ({"residuals": {"replicas:weight": dict.fromkeys(("first", "second"), torch.ones(3))}},
         "'weight' has 3 elements, expected 4704"),
    ):  # fmt: skip
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            state.load_state_dict({**saved, **change})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group=None: 8)
        with pytest.raises(thinwire.InvalidArgumentError, match="2 shards, expected all 8 ranks"):
            state.gathered_state_dict()


def test_what_does_not_fit_is_refused():
    run(refused, world=4)
