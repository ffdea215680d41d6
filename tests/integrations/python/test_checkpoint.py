"""Residuals in checkpoints."""

import io

import pytest
import thinwire
import torch
from models import digest, gradients, make_mlp, train, wrap
from ranks import run
from thinwire.torch.advanced import merge_state_dicts


def train_through(rank: int, pause: bool):
    """Train 8 steps. With a pause, save to bytes after 5 steps and load into new objects.

    DDP does not rebuild the buckets of a model that looks for unused parameters. With a rebuild,
    the first step after the pause would have other buckets than the same step without a pause."""
    model = make_mlp()
    ddp, state = wrap(model, "int4", find_unused_parameters=True)
    train(ddp, 5)
    if pause:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "state": state.state_dict()}, file)
        state.close()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = make_mlp(seed=99)
        model.load_state_dict(saved["model"])
        ddp, state = wrap(model, "int4", find_unused_parameters=True)
        state.load_state_dict(saved["state"])
    train(ddp, 3, start=5)
    return digest(model), state.state_dict()


def closed(rank: int) -> None:
    model = make_mlp()
    ddp, state = wrap(model, "int4")
    train(ddp, 2)
    state.close()
    for call in (state.state_dict, state.gathered_state_dict):
        with pytest.raises(thinwire.Error, match=r"was closed; call state_dict\(\) or save\(\)"):
            call()


def test_a_closed_state_says_that_its_residuals_are_gone():
    run(closed)


def test_resuming_is_bitwise_never_having_stopped():
    through, paused = run(train_through, False), run(train_through, True)
    for (digest_a, state_a), (digest_b, state_b) in zip(through, paused, strict=True):
        assert digest_a == digest_b
        assert state_a["residuals"].keys() == state_b["residuals"].keys()
        for name, both in state_a["residuals"].items():
            assert torch.equal(both["first"], state_b["residuals"][name]["first"])
            assert torch.equal(both["second"], state_b["residuals"][name]["second"])


def forget(rank: int):
    """Like train_through(), but lose the residuals. The result must differ from that test's."""
    model = make_mlp()
    ddp, state = wrap(model, "int4", find_unused_parameters=True)
    train(ddp, 5)
    empty = state.state_dict() | {"residuals": {}}
    state.load_state_dict(empty)
    train(ddp, 3, start=5)
    return digest(model)


def test_losing_the_residuals_is_noticed():
    assert run(forget)[0] != run(train_through, False)[0][0]


def save(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 3)
    return state.state_dict()


def load_and_step_with_zero_gradients(rank: int, saved):
    model = make_mlp()
    ddp, state = wrap(model, "int4")
    state.load_state_dict(saved)
    (ddp(torch.zeros(1, 96)).sum() * 0.0).backward()
    result = {name: p.grad.flatten() for name, p in model.named_parameters()}
    return result, state.state_dict()


def owed(saved: list, name: str) -> torch.Tensor:
    """Return the sum over ranks of what was not delivered yet, in units of a gradient."""
    return sum(
        one["residuals"][name]["first"] + one["world"] * one["residuals"][name]["second"]
        for one in saved
    )


@pytest.mark.parametrize("worlds", [(3, 2), (2, 3), (2, 1)])
def test_another_world_size_keeps_the_sum_of_residuals(worlds):
    saved = run(save, world=worlds[0])
    merged = [merge_state_dicts(saved, worlds[1], rank) for rank in range(worlds[1])]
    after = run(load_and_step_with_zero_gradients, saved, world=worlds[1])
    for name in saved[0]["residuals"]:
        before = owed(saved, name)
        assert before.abs().max() > 0
        torch.testing.assert_close(owed(merged, name), before)
        if worlds[1] == 1:
            continue  # one rank compresses nothing, so nothing is delivered late
        delivered = worlds[1] * after[0][0][name]
        rest = owed([state for _, state in after], name)
        torch.testing.assert_close(delivered + rest, before, rtol=1e-4, atol=1e-6)


def load_wrong(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 2)
    good = state.state_dict()
    zeros = {"first": torch.zeros(3), "second": torch.zeros(3)}
    bad = {
        f"rank {1 - rank} of 2": good | {"rank": 1 - rank},
        f"rank {rank} of 5": good | {"world": 5},
        "elements": good | {"residuals": {"0.weight": zeros}},
        "no parameter": good | {"residuals": {"nobody": zeros}},
        "format": {},
        "each rank": [good],
    }
    for part, saved in bad.items():
        with pytest.raises(thinwire.InvalidArgumentError, match=part):
            state.load_state_dict(saved)
    train(ddp, 1)
    return gradients(ddp.module)


def test_a_dict_that_does_not_fit_is_refused():
    first, second = run(load_wrong)
    assert torch.equal(first, second)


def under_other_defaults(rank: int):
    """Return residuals, and those saved and loaded again under other defaults of torch."""
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 2)
    saved = [state.state_dict()["residuals"]]
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            state.load_state_dict(state.state_dict())
            saved.append(state.state_dict()["residuals"])
    return saved


def test_torchs_default_dtype_and_device_change_nothing():
    for expected, *others in run(under_other_defaults):
        for found in others:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
