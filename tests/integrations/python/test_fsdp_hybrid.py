"""Hybrid sharding: two shards times two replicas, by HSDP's mesh or by the user's own group."""

import pytest
import thinwire
import torch
import torch.distributed as dist
from fsdp_models import Net, gradients, loss_of, sharded, train, weights
from ranks import outcomes_of, run
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def hybrid(codec, own: bool = False, **options):
    """Return (model, compression)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    if codec is not None:
        options["min_bytes"] = 0
    if own:
        group = mesh["replica"].get_group()
        return sharded(codec, mesh["shard"], replicas=group, **options)
    return sharded(codec, mesh, **options)


def one_step(rank: int, codec, own: bool, dtype, factor, options: dict):
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
    model, state = hybrid(codec, own, **policy, **options)
    if factor is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
    loss_of(model, 0, rank).backward()
    return gradients(model), None if state is None else state.stats()


def check(ours, plain, tolerance: float) -> None:
    for found, _ in ours:
        for name, gradient in found.items():
            assert torch.equal(gradient, ours[0][0][name])
            error = (gradient - plain[name]).abs().max() / plain[name].abs().max()
            assert error <= tolerance, name


@pytest.mark.parametrize(("own", "inner"), [(True, None), (False, None), (True, False),
                                            (False, False)])  # fmt: skip
def test_the_mean_over_replicas_is_compressed(own, inner):
    plain = run(one_step, None, False, None, None, {}, world=4)[0][0]
    ours = run(one_step, "int8", own, None, None, {"inner": inner}, world=4)
    check(ours, plain, 0.02)
    for _, stats in ours:
        assert stats["steps"] == stats["replicas"]["steps"] == 1
        assert stats["replicas"]["ratio"] > 3
        assert (stats["all_reduces"] > 0) == (inner is None)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, None), (torch.bfloat16, None), (None, 2.0), (None, 3.0), (torch.float16, 4.0)],
)
def test_every_operation_of_fsdp2(dtype, factor):
    """AVG, pre-divided SUM of fp16, and a factor, which divides the sum over all ranks."""
    plain = run(one_step, None, False, None, None, {}, world=4)[0][0]
    scale = 4 / factor if factor else 1.0
    for found, _ in run(one_step, "fp32", False, dtype, factor, {}, world=4):
        for name, gradient in found.items():
            rtol, atol = (0.02, 1e-4) if dtype else (1e-5, 1e-7)
            torch.testing.assert_close(gradient, scale * plain[name], rtol=rtol, atol=atol)


def accumulated(rank: int, codec, options: dict):
    """Two passes reduce over the shards only, and a last one reduces over replicas too."""
    model, state = hybrid(codec, **options)
    model.set_requires_all_reduce(False)
    loss_of(model, 0, rank).backward()
    loss_of(model, 1, rank).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, 2, rank).backward()
    return gradients(model), None if state is None else state.stats()


@pytest.mark.parametrize("inner", [True, False])
def test_passes_without_an_all_reduce(inner):
    plain = run(accumulated, None, {}, world=4)[0][0]
    ours = run(accumulated, "fp32", {"inner": inner}, world=4)
    check(ours, plain, 1e-5)
    for _, stats in ours:
        assert stats["replicas"]["steps"] == 1  # the first two passes sent nothing over replicas
        assert stats["replicas"]["all_reduces"] == 3


def resumed(rank: int, codec: str, gather: str | None):
    options = {"inner": False, "gather": gather}
    model, state = hybrid(codec, **options)
    train(model, 3, rank)
    kept, saved = weights(model), state.state_dict()
    train(model, 3, rank, start=3)
    again, other = hybrid(codec, **options)
    with torch.no_grad():
        for name, p in again.named_parameters():
            whole = torch.distributed.tensor.distribute_tensor
            p.copy_(whole(kept[name], p.device_mesh, p.placements))
    other.load_state_dict(saved)
    train(again, 3, rank, start=3)
    return weights(model), weights(again), sorted(saved["residuals"]), saved["steps"]


@pytest.mark.parametrize(
    ("codec", "gather"), [("topk:density=0.05", None), ("int4:rounding=stochastic", "int4")]
)
def test_replicas_stay_equal_and_resume_bit_by_bit(codec, gather):
    ranks = run(resumed, codec, gather, world=4)
    for end, again, names, steps in ranks:
        assert steps == 3
        assert "replicas:layers.0.weight" in names and "layers.0.weight" not in names
        assert ("reference:layers.0.weight" in names) == (gather is not None)
        for name, value in end.items():
            assert torch.equal(again[name], value) and torch.equal(ranks[0][0][name], value)


def saved_by_replicas(rank: int, path: str):
    model, state = hybrid("int4", inner=False)
    loss_of(model, 0, rank).backward()
    saved = state.gathered_state_dict()
    if rank == 0:
        torch.save(saved, path)
    return gradients(model)


def loaded_by_shards(_: int, path: str):
    _, state = sharded("int4")
    state.load_state_dict(torch.load(path))
    return state.state_dict()["residuals"]


def test_residuals_of_replicas_go_into_shards_alone(tmp_path):
    """The sum of what was applied and of the residuals is the exact mean."""
    path = str(tmp_path / "all.pt")
    plain = run(one_step, None, False, None, None, {}, world=4)[0][0]
    applied = run(saved_by_replicas, path, world=4)[0]
    owed = run(loaded_by_shards, path)
    for name, exact in plain.items():
        total = applied[name].flatten() + sum(rank[name]["first"] for rank in owed) / 4
        torch.testing.assert_close(total, exact.flatten(), rtol=0, atol=1e-5)
        assert (applied[name] - exact).abs().max() > 1e-5


def refused(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, _ = sharded(None, mesh)
    with pytest.raises(thinwire.InvalidArgumentError, match="on HSDP's mesh, which has its"):
        compress(model, "int4", replicas=mesh["replica"].get_group())
    with pytest.raises(thinwire.InvalidArgumentError, match="inner is 'no', expected True or"):
        compress(model, "int4", inner="no")
    flat, _ = sharded(None, mesh["shard"])
    with pytest.raises(thinwire.InvalidArgumentError, match="inner is False, expected True for"):
        compress(flat, "int4", inner=False)
    mixed = Net()
    fully_shard(mixed.layers[0], mesh=mesh)
    fully_shard(mixed, mesh=mesh["shard"])
    with pytest.raises(
        thinwire.InvalidArgumentError,
        match=r"'model' is trained by 2 ranks together, the ranks .*, and 'layers.0' by 4",
    ):
        compress(mixed, "int4")


def test_what_can_not_be_is_refused():
    run(refused, world=4)


def deserted(rank: int):
    model, _ = hybrid("int4", inner=False, timeout_s=100)
    train(model, 1, rank)
    dist.barrier()
    if rank == 3:
        raise KeyError("gone")
    loss_of(model, 1, rank).backward()


def test_a_lost_replica_is_an_error_on_every_rank():
    *others, last = outcomes_of(deserted, world=4)
    assert last.error == "KeyError"
    for outcome in others:
        assert outcome.error, outcome
