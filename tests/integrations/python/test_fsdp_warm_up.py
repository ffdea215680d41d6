"""compress(model, codec, warm_up_steps=n) for a model under FSDP2."""

import pytest
import thinwire
import torch
from fsdp_models import sharded, train, weights
from ranks import run
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh

STEPS = 3  # steps of a warm-up
ALL = 6
RULES = {"layers.0*": "int8", "*": "int4"}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, weight in one.items() if not torch.equal(weight, other[name])]


def mesh_of(world: int):
    """Return the mesh of two replicas of two shards, if there are four ranks."""
    names = ("replica", "shard")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if world == 4 else None


def trained(rank: int, codec, first: str, way: str, world: int):
    """Return the weights after the warm-up and at the end. way: "whole": one compression; "apart":
    two, the second of which loads the state of the first; "first": only the first."""
    warm_up = {"warm_up_steps": STEPS, "warm_up_codec": first} if way == "whole" else {}
    begins = codec if way == "whole" else first
    model, state = sharded(begins, mesh_of(world), min_bytes=0, **warm_up)
    train(model, STEPS, rank)
    found = [weights(model)]
    if way == "apart":
        saved = state.state_dict()
        state.close()
        state = compress(model, codec, min_bytes=0)
        state.load_state_dict(saved)
    train(model, ALL - STEPS, rank, STEPS)
    codecs = {row["codec"] for row in state.stats()["parameters"]}
    return [*found, weights(model)], state.stats()["steps"], codecs


@pytest.mark.parametrize(
    ("codec", "first", "world"),
    [("int4", "fp32", 2), ("int4", "int8", 3), (RULES, "int8", 2), ("adaptive", "bf16", 2),
     ("int4", "int8", 4)],
)  # fmt: skip
def test_it_is_the_first_codec_and_then_the_other_one(codec, first, world):
    """The bits are those of the two codecs in turn, and the first codec's residuals are kept."""
    whole, apart, alone = (
        run(trained, codec, first, way, world, world=world) for way in ("whole", "apart", "first")
    )
    (early, late), steps, codecs = whole[0]
    assert steps == ALL
    assert codecs == (set(RULES.values()) if codec is RULES else {codec})
    assert not differing(early, alone[0][0][0])
    assert differing(late, alone[0][0][1])
    assert not differing(late, apart[0][0][1])
    for (_, others), *_ in whole[1:]:
        assert not differing(late, others)


def resumed(rank: int, pause: int | None):
    options = {"min_bytes": 0, "warm_up_steps": STEPS, "warm_up_codec": "int8"}
    model, state = sharded("int4", **options)
    if pause is not None:
        train(model, pause, rank)
        saved = state.state_dict()
        state.close()
        state = compress(model, "int4", **options)
        state.load_state_dict(saved)
    train(model, ALL - (pause or 0), rank, pause or 0)
    return weights(model)


@pytest.mark.parametrize("pause", [STEPS - 1, STEPS, STEPS + 1])
def test_resuming_in_it_and_behind_it_is_bitwise_never_having_stopped(pause):
    assert not differing(run(resumed, None)[0], run(resumed, pause)[0])


def refused(rank: int):
    model, _ = sharded(None)
    for codec, options, words in [
        ("auto", {"warm_up_steps": 3}, "codec='auto'"),
        ("int8", {"warm_up_steps": 3, "warm_up_codec": "int8"}, "in int8"),
        ("int4", {"warm_up_codec": "int8"}, "without warm_up_steps"),
        ("int4", {"warm_up_steps": -1}, "warm_up_steps is -1"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            compress(model, codec, **options)
    compress(model, "int4", warm_up_steps=3)  # the refusals have left nothing behind


def test_where_it_can_not_be_meant_it_is_a_typed_error():
    run(refused)
