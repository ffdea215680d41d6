"""Checkpoints of FSDP2 with compressed reduce-scatters."""

import torch
import torch.distributed as dist
from fsdp_models import sharded, train, weights
from ranks import run
from torch.distributed.tensor import distribute_tensor


def resumed(rank: int, path: str):
    model, state = sharded("int4:rounding=stochastic")
    train(model, 3, rank)
    kept, saved = weights(model), state.state_dict()
    gathered = state.gathered_state_dict()
    if rank == 0:
        torch.save(gathered, path)
    train(model, 3, rank, start=3)
    ends = [weights(model)]
    dist.barrier()
    for source in (saved, torch.load(path)):
        again, other = sharded("int4:rounding=stochastic")
        with torch.no_grad():
            for name, p in again.named_parameters():
                mesh = p.device_mesh
                p.copy_(distribute_tensor(kept[name], mesh, p.placements))
        other.load_state_dict(source)
        train(again, 3, rank, start=3)
        ends.append(weights(again))
    return ends


def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    for ends in run(resumed, str(tmp_path / "all.pt")):
        for end in ends[1:]:
            assert all(torch.equal(end[name], value) for name, value in ends[0].items())


def loaded(rank: int, path: str):
    _, state = sharded("int4")
    state.load_state_dict(torch.load(path))
    return state.state_dict()["residuals"]


def saved_by(rank: int, path: str):
    model, state = sharded("int4")
    train(model, 2, rank)
    gathered = state.gathered_state_dict()
    if rank == 0:
        torch.save(gathered, path)
    return state.state_dict()["residuals"]


def test_a_checkpoint_goes_into_another_world(tmp_path):
    path = str(tmp_path / "all.pt")
    old, new = run(saved_by, path, world=3), run(loaded, path, world=2)
    for name in old[0]:
        sums = [sum(rank[name]["first"] for rank in ranks) for ranks in (old, new)]
        torch.testing.assert_close(*sums)
        assert sums[0].abs().max() > 0
