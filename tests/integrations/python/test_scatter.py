"""reduce_scatter_tensor and all_gather_into_tensor have the semantics of torch.distributed's."""

import pytest
import torch
import torch.distributed as dist
from ranks import run
from thinwire import errors
from thinwire.torch import all_gather_into_tensor, reduce_scatter_tensor


def scatter(rank: int, codec: str, op: dist.ReduceOp, dtype, async_op: bool):
    """Return (this rank's part, the part in fp32, the largest sum of magnitudes)."""
    world = dist.get_world_size()
    torch.manual_seed(rank)
    whole = torch.randn(world * 5003).to(dtype)
    expected, size = whole.float().clone(), whole.float().abs()
    dist.all_reduce(expected)
    dist.all_reduce(size)
    part = torch.empty(5003, dtype=dtype)
    work = reduce_scatter_tensor(part, whole, op=op, codec=codec, name="x", async_op=async_op)
    if async_op:
        assert work.wait()
    own = expected[rank * 5003 : (rank + 1) * 5003]
    return part.float(), own / world if op == dist.ReduceOp.AVG else own, size.max()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec, error", [("fp32", 1e-5), ("int8", 0.02), ("int4", 0.3)])
def test_every_rank_gets_its_part(world, codec, error):
    for part, expected, size in run(
        scatter, codec, dist.ReduceOp.SUM, torch.float32, False, world=world
    ):
        assert (part - expected).abs().max() <= error * size


def test_means_of_half_precision_asynchronously():
    for part, expected, size in run(scatter, "int8", dist.ReduceOp.AVG, torch.bfloat16, True):
        assert (part - expected).abs().max() <= 0.02 * size


def kept(rank: int, steps: int):
    """Return the mean over steps of one gradient, scattered with feedback, and the exact mean."""
    torch.manual_seed(rank)
    whole = torch.randn(2 * 4096)
    total, part = torch.zeros(4096), torch.empty(4096)
    for _ in range(steps):
        reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, codec="int4", name="g")
        total += part
    expected = whole.clone()
    dist.all_reduce(expected)
    return total / steps, expected[rank * 4096 : (rank + 1) * 4096] / 2


def test_what_is_lost_is_carried_on():
    for mean, expected in run(kept, 50):
        assert (mean - expected).abs().max() < 0.02  # one step alone is off by up to 0.3


def gather(rank: int, codec: str):
    torch.manual_seed(rank)
    part = torch.randn(3001)
    whole = torch.empty(2 * 3001)
    all_gather_into_tensor(whole, part, codec=codec)
    return whole, part


@pytest.mark.parametrize("codec, error", [("fp32", 0.0), ("int8", 0.04)])
def test_every_rank_gets_everything_with_the_same_bits(codec, error):
    results = run(gather, codec)
    parts = torch.cat([part for _, part in results])
    for whole, _ in results:
        assert torch.equal(whole, results[0][0])
        assert (whole - parts).abs().max() <= error


def refused(rank: int):
    whole, part = torch.zeros(8), torch.zeros(4)
    with pytest.raises(errors.InvalidArgumentError, match="2 times as many in the input"):
        reduce_scatter_tensor(torch.zeros(5), whole)
    with pytest.raises(errors.InvalidArgumentError, match="2 times as many in the output"):
        all_gather_into_tensor(part, part)
    with pytest.raises(errors.InvalidArgumentError, match="not contiguous"):
        reduce_scatter_tensor(torch.zeros(4, 2)[:, 0], whole)
    with pytest.raises(errors.InvalidArgumentError, match="take a dense codec"):
        reduce_scatter_tensor(part, whole, codec="topk:density=0.01")
    return True


def test_wrong_calls_say_what_was_expected():
    assert run(refused) == [True, True]


def as_torch(rank: int):
    """Compare our calls and torch's, by name and by position, on two of three ranks."""
    group = dist.new_group([0, 1])
    whole = torch.arange(4.0) + rank
    mine, ours, theirs = torch.zeros(2), torch.zeros(4), torch.zeros(4)
    if rank == 2:
        with pytest.warns(UserWarning, match="not in the group"):
            assert reduce_scatter_tensor(mine, whole, group=group) is None
        with pytest.warns(UserWarning, match="not in the group"):
            assert all_gather_into_tensor(ours, mine, group=group) is None
        return mine.tolist() + ours.tolist()
    assert reduce_scatter_tensor(mine, whole, dist.ReduceOp.SUM, group, True).wait()
    assert all_gather_into_tensor(ours, mine, group, True).wait()
    dist.all_gather_into_tensor(theirs, mine, group)
    assert torch.equal(ours, theirs)
    return mine.tolist() + ours.tolist()


def test_the_calls_are_torchs():
    everything = [1.0, 3.0, 5.0, 7.0]
    assert run(as_torch, world=3) == [[1.0, 3.0, *everything], [5.0, 7.0, *everything], [0.0] * 6]
