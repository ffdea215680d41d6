"""all_reduce has the semantics of torch.distributed.all_reduce."""

import pytest
import torch
import torch.distributed as dist
from ranks import run
from thinwire import errors
from thinwire.torch import all_reduce


def reduce(rank: int, make, codec: str, op, name: str | None, async_op: bool):
    """Return (our sum, torch's sum, the inputs' sum of magnitudes)."""
    torch.manual_seed(rank)
    tensor = make()
    expected, size = tensor.clone().float(), tensor.abs().float()
    dist.all_reduce(expected)
    dist.all_reduce(size)
    place = tensor.data_ptr(), tensor.stride()
    work = all_reduce(tensor, op=op, codec=codec, name=name, async_op=async_op)
    if async_op:
        assert work.wait() and work.is_completed()
        assert work.get_future().value() is not None
    else:
        assert work is None
    assert (tensor.data_ptr(), tensor.stride()) == place
    return tensor, expected, size


def matrix():
    return torch.randn(130, 301)


def transposed():
    return torch.randn(130, 301).t()


def sliced():
    return torch.randn(64, 512)[:, 1::3]


def scalar():
    return torch.randn(())


def empty():
    return torch.empty(0, 3)


def bf16():
    return torch.randn(5000).bfloat16()


@pytest.mark.parametrize("make", [matrix, transposed, sliced, scalar, empty, bf16])
@pytest.mark.parametrize("async_op", [False, True])
def test_any_shape_in_place(make, async_op):
    results = run(reduce, make, "int8", dist.ReduceOp.SUM, "x", async_op)
    ours, expected, size = results[0]
    assert torch.equal(ours, results[1][0])
    assert ours.shape == expected.shape
    if ours.numel():
        assert (ours.float() - expected).abs().max() <= 0.02 * size.max()


@pytest.mark.parametrize("op, factor", [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)])
@pytest.mark.parametrize("name", [None, "x"])
def test_sum_and_mean(op, factor, name):
    for ours, expected, _ in run(reduce, matrix, "fp32", op, name, False, world=3):
        torch.testing.assert_close(factor * ours, expected)


def repeat(rank: int, name: str | None):
    """Return the sum over 50 calls of a small element in a tensor that also has large ones."""
    total = torch.zeros(40_000)
    for _ in range(50):
        tensor = torch.full((40_000,), 0.01)
        tensor[::256] = 1.0
        all_reduce(tensor, dist.ReduceOp.AVG, codec="int4", name=name)
        total += tensor
    return total[1].item()


def test_a_name_carries_the_error_feedback():
    assert run(repeat, "x")[0] == pytest.approx(0.5, abs=0.2)
    assert run(repeat, None)[0] == 0.0  # 0.01 is below half a step of int4


def many(rank: int):
    tensors = [torch.full((20_000,), float(rank + i)) for i in range(10)]
    order = range(10) if rank == 0 else reversed(range(10))  # named calls need no common order
    works = [all_reduce(tensors[i], name=f"t{i}", codec="fp32", async_op=True) for i in order]
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_named_calls_in_any_order():
    assert run(many) == [[2.0 * i + 1 for i in range(10)]] * 2


def crosswise(rank: int, numel: int):
    """Rank 1 starts "early" only when it has the results that rank 0 starts after "early"."""
    tensors = {name: torch.full((numel,), float(rank)) for name in ("early", "middle", "late")}

    def start(name: str):
        return all_reduce(tensors[name], name=name, codec="fp32", async_op=True)

    early = start("early") if rank == 0 else None
    for name in ("middle", "late"):
        start(name).wait()
    (early or start("early")).wait()
    return [tensor[0].item() for tensor in tensors.values()]


@pytest.mark.parametrize("numel", [10, 20_000, 2_000_000])  # raw, in one hop, in chunks
def test_works_are_waited_for_in_any_order(numel):
    settings = {"THINWIRE_TIMEOUT_S": "10"}
    assert run(crosswise, numel, environment=settings) == [[1.0] * 3] * 2


def by_group(rank: int):
    group = dist.new_group([1, 2])
    tensor = torch.tensor([float(rank)])
    if rank == 0:
        with pytest.warns(UserWarning, match="not in the group"):
            all_reduce(tensor, group=group)
    else:
        all_reduce(tensor, group=group)
    return tensor.item()


def test_group_members_only():
    assert run(by_group, world=3) == [0.0, 3.0, 3.0]


def as_torch(rank: int):
    """Compare our call and torch's, with equal arguments, by name and by position."""
    ones = [torch.full((50_000,), 1.0 + rank) for _ in range(4)]
    assert all_reduce(ones[0]) is None and dist.all_reduce(ones[1]) is None
    group = dist.new_group([0, 1])
    ours = all_reduce(ones[2], dist.ReduceOp.SUM, group, True)
    theirs = dist.all_reduce(ones[3], dist.ReduceOp.SUM, group, True)
    assert ours.wait() is theirs.wait() is True
    assert [t.data_ptr() for t in ours.result()] == [ones[2].data_ptr()]
    with pytest.raises(errors.InvalidArgumentError, match="process group is 'int8'"):
        all_reduce(ones[0], dist.ReduceOp.SUM, "int8")
    with pytest.raises(errors.InvalidArgumentError, match=r"op is 'mean', expected .*SUM or AVG"):
        all_reduce(ones[0], "mean")
    with pytest.raises(errors.InvalidArgumentError, match="async_op is 'later'"):
        all_reduce(ones[0], async_op="later")
    return [tensor[7].item() for tensor in ones]


def test_the_call_is_torchs():
    assert run(as_torch) == [[3.0] * 4] * 2


def unnamed(rank: int):
    """Return what an unnamed sum loses, relative to its largest element."""
    torch.manual_seed(rank)
    tensor = torch.randn(100_000)
    exact = tensor.clone()
    dist.all_reduce(exact)
    all_reduce(tensor)
    return ((tensor - exact).abs().max() / exact.abs().max()).item()


def test_without_a_name_the_default_is_bf16():
    assert max(run(unnamed)) < 0.01
    assert max(run(unnamed, environment={"THINWIRE_CODEC": "int4"})) > 0.05
