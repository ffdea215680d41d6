"""torch.distributed.checkpoint keeps every rank's residuals, in any world size."""

from __future__ import annotations

import pytest
import thinwire
import thinwire.torch as tw
import torch
import torch.distributed.checkpoint as dcp
from fsdp_models import loss_of, sharded
from ranks import run
from thinwire.torch.advanced import DistributedState

CODECS = ["int4", "onebit", "topk:density=0.1,masking=0", {"a": "int8", "*": "int4"}]


def made(codec) -> tw.GradientExchange:
    momentum = 0.9 if isinstance(codec, str) and codec != "int4" else 0.0
    return tw.GradientExchange(codec, min_bytes=0, momentum=momentum)


def stepped(exchange: tw.GradientExchange, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    named = {name: torch.randn(600, generator=generator) for name in ("a", "b")}
    exchange.reduce(named)
    return torch.cat(list(named.values()))


def prepared(exchange: tw.GradientExchange) -> None:
    """The exchange owns an optimizer's momentum."""
    if exchange.config.momentum:
        exchange.take_momentum(torch.optim.SGD([torch.zeros(1)], lr=0.1), lambda _: None)


def save(rank: int, codec, folder: str):
    exchange = made(codec)
    prepared(exchange)
    for step in range(3):
        stepped(exchange, rank, step)
    dcp.save({"thinwire": DistributedState(exchange)}, checkpoint_id=folder)
    return exchange.state_dict(), stepped(exchange, rank, 3)


def load(rank: int, codec, folder: str):
    exchange = made(codec)
    prepared(exchange)
    dcp.load({"thinwire": DistributedState(exchange)}, checkpoint_id=folder)
    return exchange.state_dict(), stepped(exchange, rank, 3)


def owed(dicts: list[dict], name: str) -> torch.Tensor:
    """Return the sum of residuals over all ranks, in units of a gradient."""
    kept = [(d["residuals"][name], d["world"]) for d in dicts if name in d["residuals"]]
    return sum(memory["first"] + world * memory["second"] for memory, world in kept)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_in_the_same_world_training_goes_on_bit_by_bit(codec, tmp_path):
    saved, loaded = run(save, codec, str(tmp_path)), run(load, codec, str(tmp_path))
    for (before, mean), (after, same) in zip(saved, loaded, strict=True):
        assert torch.equal(mean, same)
        for name, memory in before["residuals"].items():
            for kind, tensor in memory.items():
                assert torch.equal(after["residuals"][name][kind], tensor), (name, kind)


@pytest.mark.parametrize("codec", ["int4", "onebit"])
def test_in_other_worlds_nothing_is_lost(codec, tmp_path):
    saved = [state for state, _ in run(save, codec, str(tmp_path), world=4)]
    for world in (2, 3, 5):
        loaded = [state for state, _ in run(load, codec, str(tmp_path), world=world)]
        for name in ("a", "b"):
            torch.testing.assert_close(owed(loaded, name), owed(saved, name))
            for state in loaded if codec == "onebit" else []:
                expected = saved[0]["residuals"][name]["momentum"]
                assert torch.equal(state["residuals"][name]["momentum"], expected)
        assert {state["steps"] for state in loaded} == {3}


def sharded_run(rank: int, folder: str, load_it: bool):
    model, compression = sharded("int4")
    if load_it:
        dcp.load({"thinwire": DistributedState(compression)}, checkpoint_id=folder)
    else:
        loss_of(model, 0, rank).backward()
        dcp.save({"thinwire": DistributedState(compression)}, checkpoint_id=folder)
    return compression.state_dict()


def test_a_model_under_fsdp2(tmp_path):
    saved = run(sharded_run, str(tmp_path), False)
    for world in (2, 3):
        loaded = run(sharded_run, str(tmp_path), True, world=world)
        for name in saved[0]["residuals"]:
            torch.testing.assert_close(owed(loaded, name), owed(saved, name))


def without_it(rank: int, folder: str):
    exchange = made("int4")
    stepped(exchange, rank, 0)
    dcp.save({"thinwire": exchange}, checkpoint_id=folder)
    if rank == 0:
        return
    with pytest.raises(thinwire.InvalidArgumentError, match="DistributedState"):
        exchange.load_state_dict({**exchange.state_dict(), "rank": 0})


def test_a_plain_state_dict_of_another_rank_says_what_to_save(tmp_path):
    run(without_it, str(tmp_path))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"world": 1025, "rank": 0}, "got 1025 ranks, expected at most 1024"),
        ({"world": 600, "rank": 0, "parts": 2, "part": 0}, "got 1200 ranks"),
        (
            {
                "world": 4,
                "rank": 1,
                "meshes": [
                    {"world": 4, "rank": 1},
                    {"world": 2, "rank": 1, "parts": 2, "part": 0},
                ],
            },
            r"has the numbers \[1, 2\].*expected the same in each",
        ),
    ],
)
def test_ranks_without_a_key_of_their_own_are_refused(state, said):
    class Saved:
        gathered_state_dict = load_state_dict = print

        def state_dict(self):
            return {"residuals": {}, **state}

    with pytest.raises(thinwire.InvalidArgumentError, match=said):
        DistributedState(Saved()).state_dict()
