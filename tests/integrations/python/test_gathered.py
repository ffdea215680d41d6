"""Checkpoints that only rank 0 writes, and residuals of named collectives."""

import datetime

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, digest, make_mlp, train, wrap
from policies import Wrapped
from ranks import outcomes_of, run
from thinwire.torch import all_reduce, reduce_scatter_tensor
from thinwire.torch.advanced import GatheredState, NamedResiduals, merge_state_dicts


def through_rank_0(rank: int, saved: dict, path: str) -> dict:
    """Save and load like a framework: rank 0 writes its state dict, all ranks read that file."""
    if rank == 0:
        torch.save(saved, path)
    dist.barrier()
    return torch.load(path, weights_only=True)


def resumed(rank: int, path: str):
    ddp, state = wrap(make_mlp(), "int4", find_unused_parameters=True)
    train(ddp, 3)
    weights = {name: p.clone() for name, p in ddp.module.state_dict().items()}
    saved = GatheredState(state).state_dict()
    assert bool(saved["gathered"]) == (rank == 0)
    train(ddp, 3, start=3)
    again, other = wrap(make_mlp(), "int4", find_unused_parameters=True)
    again.module.load_state_dict(weights)
    GatheredState(other).load_state_dict(through_rank_0(rank, saved, path))
    train(again, 3, start=3)
    return digest(ddp), digest(again)


def test_every_rank_resumes_from_rank_0s_file(tmp_path):
    ends = run(resumed, str(tmp_path / "all.pt"))
    assert len({digest for end in ends for digest in end}) == 1


def resumed_without_the_others(rank: int, path: str):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 2)
    state.load_state_dict(through_rank_0(rank, state.state_dict(), path))
    train(ddp, 2)


def test_a_state_whose_rank_0_alone_was_saved_is_an_error_on_every_rank(tmp_path):
    """Rank 0 cannot tell the state from its own, and learns of the error from rank 1."""
    first, second = outcomes_of(resumed_without_the_others, str(tmp_path / "0.pt"))
    assert second.error == "InvalidArgumentError"
    assert "rank 1 of 2 got the state dict of rank 0 of 2" in second.message
    assert "register_for_checkpointing, save and load GatheredState(state)" in second.message
    assert first.error == "PeerLostError" and "rank 1 closed" in first.message


def saved_by_three(rank: int, path: str):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 2)
    through_rank_0(rank, state.gathered_state_dict(), path)
    return state.state_dict()


def loaded_by_two(rank: int, path: str):
    _, state = wrap(make_mlp(), "int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="rank 0 alone has"):
        state.load_state_dict({"format": 2, "gathered": []})
    state.load_state_dict(torch.load(path, weights_only=True))
    return state.state_dict()


def test_a_gathered_state_goes_into_another_world(tmp_path):
    path = str(tmp_path / "all.pt")
    own = run(saved_by_three, path, world=3)
    for rank, loaded in enumerate(run(loaded_by_two, path)):
        expected = merge_state_dicts(own, 2, rank)
        for name, memory in expected["residuals"].items():
            assert torch.equal(memory["first"], loaded["residuals"][name]["first"]), name
            assert memory["first"].abs().max() > 0


def of_the_optimizer(rank: int, path: str):
    def make():
        model = make_mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Wrapped(sgd, model, "int4", min_bytes=0)

    def steps(model, optimizer, start):
        for step in range(start, start + 2):
            optimizer.zero_grad()
            model(data(step, rank)).square().mean().backward()
            optimizer.step()
        return digest(model) if optimizer.finish() is None else ""

    model, optimizer = make()
    steps(model, optimizer, 0)
    saved = through_rank_0(rank, optimizer.gathered_state_dict(), path)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    end = steps(model, optimizer, 2)
    model, optimizer = make()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    return end, steps(model, optimizer, 2)


def test_the_optimizers_checkpoint_is_gathered(tmp_path):
    ends = run(of_the_optimizer, str(tmp_path / "optimizer.pt"))
    assert len({digest for end in ends for digest in end}) == 1


def named(rank: int, path: str):
    def call(step: int) -> list[torch.Tensor]:
        x = data(step, rank, 20_000)
        out = [x.clone(), x.clone(), torch.empty(4, 20_000)]
        all_reduce(out[0], codec="int4", name="loss")
        all_reduce(out[1], codec="int8", name="loss")
        reduce_scatter_tensor(out[2], x, codec="int4", name="scattered")
        return out

    call(0)
    kept = NamedResiduals()
    saved = through_rank_0(rank, kept.gathered_state_dict(), path)
    kept.save(f"{path}.{rank}")
    expected, further = call(1), call(2)
    assert not torch.equal(call(1)[0], expected[0])  # the residuals were others
    kept.load_state_dict(saved)
    again = call(1)
    kept.load(f"{path}.{rank}")
    once_more = [call(1), call(2)]
    keys = set(kept.state_dict()["residuals"])
    equal = [
        all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
        for x, y in ((expected, again), (expected, once_more[0]), (further, once_more[1]))
    ]
    return keys, equal


def test_named_collectives_go_on_from_a_checkpoint(tmp_path):
    keys = {"int4 loss", "int8 loss", "int4 scattered"}
    assert run(named, str(tmp_path / "named")) == [(keys, [True] * 3)] * 2


def restored_first(rank: int, path: str):
    """Load the residuals before any call has made connections."""
    kept = NamedResiduals()
    kept.load(f"{path}.{rank}")
    before = kept.state_dict()["residuals"]
    x = torch.zeros(160_000)
    all_reduce(x, codec="fp32", name="other")
    y = torch.zeros(8, 20_000)
    all_reduce(y, codec="int4", name="loss")
    return set(before), y.abs().max().item()


def test_residuals_are_loaded_before_the_first_call(tmp_path):
    run(named, str(tmp_path / "named"))
    for keys, owed in run(restored_first, str(tmp_path / "named")):
        assert keys == {"int4 loss", "int8 loss", "int4 scattered"}
        assert owed > 0


def on_rank_0_alone(rank: int):
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.barrier(group)  # both ranks are connected before rank 1 ends
    residuals = NamedResiduals(group)
    if rank == 0:
        residuals.gathered_state_dict()


def test_a_gathering_by_rank_0_alone_is_a_typed_error():
    first, second = outcomes_of(on_rank_0_alone)
    assert (first.error, second.error) == ("PeerLostError", "")
    assert "rank 1 did not come; make the call on all 2 ranks of the group" in first.message
