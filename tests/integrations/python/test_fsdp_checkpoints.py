"""Checkpoints of FSDP2 with compressed reduce-scatters and gathers of parameters."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Net, loss_of, sharded, train, weights
from ranks import run
from thinwire.torch.advanced import DistributedState
from torch.distributed.tensor import distribute_tensor


def resumed(rank: int, folder: str, gather: str | None, reference: str | None):
    path = f"{folder}/all.pt"
    model, state = sharded("int4:rounding=stochastic", gather=gather, reference=reference)
    train(model, 3, rank)
    kept, saved = weights(model), state.state_dict()
    gathered = state.gathered_state_dict()
    if rank == 0:
        torch.save(gathered, path)
    dcp.save({"thinwire": DistributedState(state)}, checkpoint_id=f"{folder}/dcp")
    train(model, 3, rank, start=3)
    ends = [weights(model)]
    dist.barrier()
    for source in (saved, torch.load(path), None):
        again, other = sharded("int4:rounding=stochastic", gather=gather, reference=reference)
        with torch.no_grad():
            for name, p in again.named_parameters():
                mesh = p.device_mesh
                p.copy_(distribute_tensor(kept[name], mesh, p.placements))
        if source is None:
            dcp.load({"thinwire": DistributedState(other)}, checkpoint_id=f"{folder}/dcp")
        else:
            other.load_state_dict(source)
        train(again, 3, rank, start=3)
        ends.append(weights(again))
    return ends


@pytest.mark.parametrize(
    ("gather", "reference"), [(None, None), ("int4", None), ("adaptive", "bf16")]
)
def test_training_goes_on_from_a_checkpoint_bit_by_bit(gather, reference, tmp_path):
    for ends in run(resumed, str(tmp_path), gather, reference):
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


def computed(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return the weight of the first layer that the next forward pass uses."""
    seen = []
    layer = model.layers[0]
    handle = layer.register_forward_pre_hook(lambda *_: seen.append(layer.weight.detach().clone()))
    loss_of(model, 0, rank)
    handle.remove()
    return seen[0]


def saved_with_references(rank: int, folder: str):
    model, state = sharded("int4", gather="int4")
    train(model, 3, rank)
    torch.save(state.state_dict(), f"{folder}/{rank}.pt")
    return weights(model)


def goes_on(rank: int, folder: str, kept: dict, source: str):
    """Return the loaded residuals, the next forward pass's weight, and the count of exact
    gathers."""
    model, state = sharded("int4", gather="int4")
    computed(model, rank)  # makes references of its own
    model.reshard()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(kept[name], p.device_mesh, p.placements))
    dicts = [torch.load(f"{folder}/{other}.pt") for other in range(3)]
    if source == "none":  # as saved without gather=
        for one in dicts:
            one["residuals"] = {
                name: memory
                for name, memory in one["residuals"].items()
                if not name.startswith("reference:")
            }
    state.load_state_dict(dicts)
    loaded = state.state_dict()["residuals"]
    return loaded, computed(model, rank), state.stats()["gather"]["exact"]


def references(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Return whole references, from all ranks' residuals."""
    sizes = {name: p.numel() for name, p in Net().named_parameters()}
    return {
        name: torch.cat([rank[name]["first"] for rank in ranks])[: sizes[name.partition(":")[2]]]
        for name in ranks[0]
        if name.startswith("reference:")
    }


@pytest.mark.parametrize("source", ["references", "none"])
def test_references_go_into_another_world(source, tmp_path):
    old = run(saved_with_references, str(tmp_path), world=3)
    before = references([torch.load(tmp_path / f"{rank}.pt")["residuals"] for rank in range(3)])
    assert before.keys() == {f"reference:{name}" for name, _ in Net().named_parameters()}
    kept = old[0]
    lost = (before["reference:layers.0.weight"] - kept["layers.0.weight"].flatten()).abs().max()
    assert lost > 0  # the checkpoint is not exact
    new = run(goes_on, str(tmp_path), kept, source, world=2)
    after = references([loaded for loaded, _, _ in new])
    for _, computed_with, exact in new:
        assert torch.equal(computed_with, new[0][1])
        error = (computed_with - kept["layers.0.weight"]).abs().max()
        if source == "none":
            assert not after and error == 0 and exact == 6  # three of them before the load
        else:
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert 0 < error < lost and exact == 6
