"""FSDP2 over tensor parallelism: two or three dimensions of ranks, of which the last shares the
tensors of each layer."""

import pytest
import thinwire
import torch
from models import data
from ranks import outcomes_of, run
from thinwire.torch import compress
from thinwire.torch.advanced import DistributedState
from thinwire.torch.fsdp import collectives, compression
from thinwire.torch.fsdp.units import Piece, Unit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

INNER = 42  # no multiple of four, and its parts are no multiples of a codec's blocks
SHARED = "1.bias"  # all ranks of tensor parallelism have it


def parallel(codec, shape=(2, 2), **options):
    """Return (model, compression, number of this rank among those with other data)."""
    names = ("shard", "tensor") if len(shape) == 2 else ("replica", "shard", "tensor")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    over = mesh["shard"] if len(shape) == 2 else mesh["replica", "shard"]
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, INNER), torch.nn.Linear(INNER, 20), torch.nn.Linear(20, 10)
    )
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    # FSDP2 itself can't reshard to one shard under tensor parallelism.
    kept = {"reshard_after_forward": len(shape) == 2}
    fully_shard([model[0], model[1]], mesh=over, **kept)
    fully_shard(model, mesh=over, **kept)
    made = None if codec is None else compress(model, codec, min_bytes=0, **options)
    return model, made, torch.distributed.get_rank() // shape[-1]


def trained(model, steps: int, number: int, start: int = 0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        x = data(step, number, 20)
        (model(x) - torch.sin(x[:, :10])).square().mean().backward()
        optimizer.step()


def local(model):
    return {name: p.detach().to_local().clone() for name, p in model.named_parameters()}


def gradients_of(_: int, shape):
    found = []
    for codec in (None, "fp32", "int8"):
        model, state, number = parallel(codec, shape)
        trained(model, 1, number)
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append((gradients, None if state is None else state.stats()))
    return found


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
def test_gradients_are_those_of_plain_fsdp2(shape):
    for (plain, _), *ours in run(gradients_of, shape, world=4):
        for (found, stats), tolerance in zip(ours, (1e-6, 0.02), strict=True):
            compressed = stats if len(shape) == 2 else stats["replicas"]
            assert stats["exact_reductions"] == 0 and compressed["all_reduces"] > 0
            for name, exact in plain.items():
                error = (found[name] - exact).abs().max() / exact.abs().max()
                assert error <= tolerance, name
                assert tolerance < 0.01 or not torch.equal(found[name], exact), name


CODECS = ("int4", "int4:rounding=stochastic", "adaptive")


def steps_of(_: int, shape):
    found = []
    for codec in CODECS:
        model, _, number = parallel(codec, shape)
        trained(model, 5, number)
        found.append(local(model))
    return found


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
def test_replicated_parameters_stay_equal(shape):
    """A codec's blocks cross from a parameter of which each rank of tensor parallelism has a part
    into one that all of them have."""
    ranks = run(steps_of, shape, world=4)
    for one, other in (ranks[:2], ranks[2:]):
        for codec, mine, theirs in zip(CODECS, one, other, strict=True):
            assert torch.equal(mine[SHARED], theirs[SHARED]), codec
            assert not torch.equal(mine["1.weight"], theirs["1.weight"])


def equalized(rank: int):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("shard", "expert", "tensor"))
    replicated = {"weight": (False, False), "bias": (False, True), "norm": (True, True)}
    pieces = tuple(Piece(name, (2,), 2, 0, along) for name, along in replicated.items())
    shard = torch.full((6,), float(rank))
    collectives._equalize(
        Unit("block", torch.nn.Identity(), pieces, mesh, False, torch.float32), shard
    )
    return shard[::2].tolist()


def test_parameters_may_be_replicated_over_one_of_two_dimensions():
    assert run(equalized, world=4) == [[rank, rank // 2 * 2, 0] for rank in range(4)]


def resumed(rank: int, folder: str):
    model, state, number = parallel("int4")
    trained(model, 3, number)
    kept = local(model)
    state.save(f"{folder}/{rank}")
    with pytest.raises(thinwire.InvalidArgumentError, match="each of 2 ranks of tensor par"):
        state.gathered_state_dict()
    trained(model, 3, number, start=3)
    torch.distributed.barrier()
    every = [f"{folder}/{rank}" for rank in range(4)]
    for path in (every[rank], every):
        again, other, _ = parallel("int4")
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.to_local().copy_(kept[name])
        other.load(path)
        trained(again, 3, number, start=3)
        for name, value in local(model).items():
            assert torch.equal(local(again)[name], value), name
    match = f"is of part {1 - rank % 2} of 2, expected part {rank % 2} of 2"
    with pytest.raises(thinwire.InvalidArgumentError, match=match):
        other.load(every[rank ^ 1])
    whole = torch.nn.Linear(8, 8)
    fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(thinwire.InvalidArgumentError, match="expected part 0 of 1"):
        compress(whole, "int4").load(every)


def test_each_rank_resumes_with_its_part(tmp_path):
    run(resumed, str(tmp_path), world=4)


def saved(rank: int, folder: str):
    model, state, number = parallel("int4")
    trained(model, 2, number)
    state.save(f"{folder}/{rank}")
    return state.state_dict()["residuals"], DistributedState(state).state_dict()


def loaded(_: int, folder: str, checkpoint):
    found = []
    for load in ("files", "checkpoint"):
        _, state, _ = parallel("int4", (1, 2))
        if load == "files":
            state.load([f"{folder}/{rank}" for rank in range(4)])
        else:
            DistributedState(state).load_state_dict(checkpoint)
        found.append(state.state_dict()["residuals"])
    return found


def test_another_number_of_shards_loads_the_sum_of_residuals(tmp_path):
    old = run(saved, str(tmp_path), world=4)
    checkpoint = {}  # torch.distributed.checkpoint keeps one value of a key
    for _, parts in old:
        checkpoint |= {key: content for key, content in parts.items() if content}
    for part, ways in enumerate(run(loaded, str(tmp_path), checkpoint, world=2)):
        for found in ways:
            assert found.keys() == old[0][0].keys()
            for name, memory in found.items():
                shards = old[part][0][name]["first"], old[part + 2][0][name]["first"]
                assert torch.equal(memory["first"], sum(shards))


def refused(_: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    mixed = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    parallelize_module(mixed, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(mixed, mesh=mesh["shard"])
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'model': parameter '1.weight' lies"):
        compress(mixed, "int4")
    model, _, _ = parallel(None)
    with pytest.raises(thinwire.InvalidArgumentError, match="gather='int4' with 2 ranks of tensor"):
        compress(model, "int4", gather="int4")
    compression._exchange = None  # nothing connects before it is refused
    with pytest.raises(thinwire.InvalidArgumentError, match="codec='auto' with tensor parallelism"):
        compress(model, "auto")


def test_what_tensor_parallelism_does_not_have_is_refused():
    run(refused, world=4)


def leave(*_):
    raise KeyError("gone")


def deserted(rank: int):
    model, _, number = parallel("int4", timeout_s=100)
    trained(model, 1, number)
    torch.distributed.barrier()
    if rank == 2:  # after its reduce-scatter; rank 3 waits for its values
        collectives._equalize = leave
    trained(model, 2, number, start=1)


def test_a_rank_lost_in_tensor_parallelism_is_named_with_the_unit():
    outcomes = outcomes_of(deserted, world=4)
    assert outcomes[2].error == "KeyError"
    lost = outcomes[3]
    assert lost.error == "PeerLostError", lost.trace
    for part in ("rank 3", "'1.bias'", "ranks of tensor parallelism [2, 3]", "look why"):
        assert part in lost.message, lost.message
