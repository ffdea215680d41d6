"""codec="auto" under FSDP2: steps are timed with each codec, and all ranks take the same one."""

import types

import pytest
import thinwire
import torch
from fsdp_models import Net, sharded, train, weights
from ranks import run
from thinwire.torch import compress
from thinwire.torch.exchange import auto
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

A_CODEC = auto._WARM_UP + auto._TIMED  # steps that each codec is tried for
ALL = ["fp32", "bf16", "int8", "int4"]
EVEN = dict.fromkeys(ALL, 1.0)


def chosen(rank: int, seconds: list[dict[str, float]], options: dict, tried: int):
    """seconds: of a step, by rank and codec. Trains until the choice has been made, and a step."""
    model, state = sharded("auto", **options)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds[rank][state.exchange.codec]
        return now

    auto.time = types.SimpleNamespace(perf_counter=clock)
    used = []
    for step in range(tried * A_CODEC + 1):
        train(model, 1, rank, start=step, lr=0.01)
        used.append(state.exchange.codec)
    kept = state.state_dict()
    state.load_state_dict(kept)
    return used, weights(model), state.stats(), kept["residuals"]


@pytest.mark.parametrize(
    ("seconds", "codec"),
    [
        ([EVEN | {"int8": 0.5, "int4": 0.4}] * 2, "int4"),
        ([EVEN | {"int8": 0.41, "int4": 0.4}] * 2, "int8"),  # the more accurate of equals
        ([{"fp32": 1.0, "bf16": 1.1, "int8": 1.2, "int4": 1.3}] * 2, "fp32"),
        # The slowest rank counts: with int4 rank 1 would hold up the others.
        ([EVEN | {"int8": 0.5, "int4": 0.1}, EVEN | {"int8": 0.5, "int4": 2.0}], "int8"),
    ],
)
def test_the_fastest_codec_stays_on_all_ranks(seconds, codec):
    (used, first, stats, residuals), (also, second, _, _) = run(chosen, seconds, {}, len(ALL))
    assert used == also and used[-1] == codec
    tried = [used[step] for step in range(0, len(used) - 1, A_CODEC)]
    assert tried == ALL
    assert stats["steps"] == len(used) and stats["exact_reductions"] == 0
    assert residuals["layers.0.weight"]["first"].any()  # what int4 left is carried on
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


@pytest.mark.parametrize("options", [{"feedback": False}, {"feedback": False, "gather": "int4"}])
def test_without_residuals_no_codec_is_tried_that_needs_them(options):
    seconds = [{"fp32": 1.0, "bf16": 0.5}] * 2
    (used, first, stats, _), (also, second, _, _) = run(chosen, seconds, options, 2)
    assert used == also and used[-1] == "bf16"
    assert set(used) == {"fp32", "bf16"}
    assert ("gather" in stats) == ("gather" in options)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


def measured(rank: int):
    """With the machine's own clock."""
    model, state = sharded("auto")
    train(model, len(ALL) * A_CODEC + 1, rank)
    return state.exchange.codec, weights(model)


def test_it_trains_by_real_times():
    (codec, first), (also, second) = run(measured)
    assert codec == also and codec in ALL
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


def refused(rank: int):
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"codec='auto' with 2 replicas.*int4"):
        compress(model, "auto")
    model, _ = sharded(None)
    with pytest.raises(thinwire.InvalidArgumentError, match="codec 'auto' is for all parameters"):
        compress(model, {"head.*": "auto", "*": "int4"})


def test_where_it_can_not_be_is_said():
    run(refused, world=4)


def lost(rank: int):
    def no_answer(*_):
        raise RuntimeError("Connection closed by peer")  # as torch's collectives say it

    auto.worst_of_ranks = no_answer
    model, _ = sharded("auto")
    train(model, A_CODEC - 1, rank)
    with pytest.raises(thinwire.errors.PeerLostError, match=f"rank {rank}.*closed by peer"):
        train(model, 1, rank)


def test_a_rank_that_goes_while_codecs_are_compared_is_a_typed_error():
    run(lost)
