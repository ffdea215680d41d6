"""Checks of thinwire.horovod's collectives: functions that test_horovod.py calls on both of two
ranks, after init()."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import thinwire
import thinwire.horovod as hvd
import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def raises(kind: type[Exception], words: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        call(*arguments, **options)


def equal(got: torch.Tensor, expected: Any, dtype: torch.dtype | None = None) -> bool:
    expected = torch.as_tensor(expected, dtype=dtype or got.dtype)
    return (
        got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected)
    )


# The world.


def check_numbers(rank: int) -> None:
    assert hvd.is_initialized()
    hvd.init()  # the second call does nothing
    numbers = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    assert numbers == (rank, 2, rank, 2)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.gloo_built() and not hvd.mpi_built() and not hvd.mpi_threads_supported()
    assert hvd.nccl_built() in (True, False)


# Reductions.


def check_sums_and_means_are_exact(rank: int) -> None:
    for dtype in (*FLOATS, *WHOLE, torch.complex64):
        mine = torch.arange(5).to(dtype) + rank
        kept = mine.clone()
        assert equal(hvd.allreduce(mine, op=hvd.Sum), [1, 3, 5, 7, 9], dtype), dtype
        mean = hvd.allreduce(mine)
        whole = dtype in WHOLE  # rounded towards zero
        assert equal(mean, [0, 1, 2, 3, 4] if whole else [0.5, 1.5, 2.5, 3.5, 4.5], dtype), dtype
        assert torch.equal(mine, kept)
    assert equal(hvd.allreduce(torch.tensor([rank == 1, False]), op=hvd.Sum), [True, False])
    precise = torch.tensor([1.0 + 2.0**-50 * rank], dtype=torch.float64)
    assert equal(hvd.allreduce(precise, op=hvd.Sum), [2.0 + 2.0**-50])
    large = torch.tensor([2**62 - 1 + rank])
    assert equal(hvd.allreduce(large, op=hvd.Sum), [2**63 - 1])
    assert equal(hvd.allreduce(torch.tensor([2**60 + 1])), [2**60 + 1])
    assert equal(hvd.allreduce(torch.tensor([-3 * rank])), [-1])


def check_minima_maxima_and_products(rank: int) -> None:
    for dtype in (*FLOATS, *WHOLE):
        mine = torch.tensor([1, 5, 3] if rank else [4, 2, 3], dtype=dtype)
        assert equal(hvd.allreduce(mine, op=hvd.Min), [1, 2, 3], dtype)
        assert equal(hvd.allreduce(mine, op=hvd.Max), [4, 5, 3], dtype)
        assert equal(hvd.allreduce(mine, op=hvd.Product), [4, 10, 9], dtype)


def check_scalars_and_empty_tensors(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        assert equal(hvd.allreduce(torch.tensor(rank + 1, dtype=dtype), op=hvd.Sum), 3, dtype)
        empty = torch.empty(0, 3, dtype=dtype)
        for result in (
            hvd.allreduce(empty), hvd.allgather(empty), hvd.broadcast(empty, 1),
            hvd.reducescatter(empty),
        ):  # fmt: skip
            assert equal(result, empty, dtype)
        raises(
            thinwire.InvalidArgumentError, "first dimension", hvd.reducescatter, torch.tensor(1.0)
        )
        scalar = torch.tensor(rank, dtype=dtype)
        assert equal(hvd.allgather(scalar), [0, 1], dtype)
        assert equal(hvd.broadcast(scalar, 1), 1, dtype)


def check_strides_and_places(rank: int) -> None:
    turned = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    expected = torch.arange(6.0).view(2, 3).t() * 1.5
    assert equal(hvd.allreduce(turned), expected)
    assert hvd.allreduce_(turned) is turned
    assert equal(turned, expected)
    leaf = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert equal(leaf.detach(), [1.0, 1.0, 1.0])
    single = torch.tensor(1.0).expand(1)  # of stride 0, like the gradient of a sum
    assert equal(hvd.allgather(single), [1.0, 1.0]) and equal(hvd.broadcast(single, 0), [1.0])
    expanded = torch.ones(1).expand(4)
    for call, given in ((hvd.allreduce_, expanded), (hvd.grouped_allreduce_, [expanded])):
        raises(thinwire.InvalidArgumentError, "expanded", call, given)
    raises(thinwire.InvalidArgumentError, "expanded", hvd.broadcast_, expanded, 0)


def check_factors(rank: int) -> None:
    ones = torch.ones(3) * (rank + 1)
    scaled = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert equal(scaled, [6.0] * 3)
    assert equal(ones, [rank + 1.0] * 3)
    whole = torch.tensor([3, 5])
    assert equal(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), [2, 4])
    assert equal(hvd.allreduce(ones, average=False), [3.0] * 3)
    assert equal(hvd.allreduce(ones, average=True), [1.5] * 3)
    raises(thinwire.InvalidArgumentError, "pass op", hvd.allreduce, ones, average=True, op=hvd.Sum)


def check_groups(rank: int) -> None:
    group = [torch.full((2,), float(rank)), torch.tensor([rank]), torch.tensor(2.0 * rank)]
    means = hvd.grouped_allreduce(group, name="group")
    assert [m.tolist() for m in means] == [[0.5, 0.5], [0], 1.0]
    handle = hvd.grouped_allreduce_async(group, op=hvd.Sum)
    assert [m.tolist() for m in hvd.synchronize(handle)] == [[1.0, 1.0], [1], 2.0]
    assert group[1].tolist() == [rank]
    results = hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert all(a is b for a, b in zip(results, group, strict=True))
    assert group[0].tolist() == [1.0, 1.0]


def check_compressions(rank: int) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(rank))
    exact = hvd.allreduce(values)
    for compression, most in (
        (hvd.Compression.fp16, 0.01), (hvd.Compression.int8, 0.05), (hvd.Compression.int4, 0.5),
        (hvd.Compression.thinwire("int4:hadamard=1"), 0.5),
    ):  # fmt: skip
        lossy = hvd.allreduce(values, compression=compression)
        assert 0 < (lossy - exact).abs().max() < most
        assert equal(hvd.allgather(lossy[:100])[:100], hvd.allgather(lossy[:100])[100:])
    # The residual of a name's int4 call is added to later calls of that name.
    total = torch.zeros_like(exact)
    for _ in range(32):
        total += hvd.allreduce(values, compression=hvd.Compression.int4, name="kept") / 32
    once = hvd.allreduce(values, compression=hvd.Compression.int4)
    assert (total - exact).norm() < 0.1 * (once - exact).norm()
    # Exact if a codec does not apply to the tensor.
    assert equal(
        hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, compression=hvd.Compression.int4), [1]
    )
    raises(
        thinwire.InvalidArgumentError, "for DistributedOptimizer", hvd.allreduce, values,
        compression=hvd.Compression.thinwire({"*": "int4"}),
    )  # fmt: skip


# Handles and names.


def check_handles_are_waited_for_in_any_order(rank: int) -> None:
    handles = [
        (hvd.allreduce_async(torch.full((9,), 1.0 * rank + n)) if n % 2 else
         hvd.allgather_async(torch.tensor([rank, n])))
        for n in range(8)
    ]  # fmt: skip
    order = list(range(8)) if rank else list(reversed(range(8)))
    for n in order:
        result = hvd.synchronize(handles[n])
        assert result.tolist() == ([n + 0.5] * 9 if n % 2 else [0, n, 1, n])
    assert all(hvd.poll(handle) for handle in handles)
    assert hvd.synchronize(handles[1]).tolist() == [1.5] * 9  # the same name again
    inside = torch.full((4,), float(rank))
    handle = hvd.allreduce_async_(inside)
    assert hvd.synchronize(handle) is inside and inside.tolist() == [0.5] * 4


def check_names_are_found_in_any_order(rank: int) -> None:
    names = ["a", "b", "c"]
    handles = {
        name: hvd.allreduce_async(torch.full((3,), float(ord(name))), name=name)
        for name in (names if rank else reversed(names))
    }
    for name in names:
        assert hvd.synchronize(handles[name]).tolist() == [float(ord(name))] * 3


def check_a_name_twice_in_flight(_: int) -> None:
    for first in (hvd.allreduce_async, hvd.allgather_async):
        for tensor in (torch.ones(4), torch.ones(4, dtype=torch.int64)):
            handle = first(tensor, name="twice")
            raises(
                thinwire.InvalidArgumentError, "'twice' is in flight", first, tensor, name="twice"
            )
            hvd.synchronize(handle)
            hvd.synchronize(first(tensor, name="twice"))
    handle = hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="g")
    raises(
        thinwire.InvalidArgumentError, "is in flight", hvd.grouped_allreduce_async,
        [torch.ones(2)] * 2, name="g",
    )  # fmt: skip
    hvd.synchronize(handle)


def check_ranks_that_differ(rank: int) -> None:
    for call in (
        lambda: hvd.allreduce(torch.ones(3 + rank, dtype=torch.int64)),
        lambda: hvd.allreduce(torch.ones(3, dtype=WHOLE[rank])),
        lambda: hvd.allreduce(torch.ones(3).long(), name=f"name{rank}"),
        lambda: hvd.allreduce(torch.ones(3).long(), op=hvd.Sum if rank else hvd.Max),
        lambda: hvd.allgather(torch.ones(3, 2 + rank)),
        lambda: hvd.broadcast(torch.ones(3), root_rank=rank),
        lambda: hvd.allgather(torch.ones(1)) if rank else hvd.broadcast(torch.ones(1), 0),
    ):
        raises(thinwire.MismatchError, "rank 1 called .* as on rank 0", call)
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == 1  # the group still works


# Transfers.


def check_gathers_and_broadcasts(rank: int) -> None:
    for dtype in (*FLOATS, *WHOLE, torch.bool, torch.complex64):
        rows = torch.full((rank * 3, 2), rank).to(dtype)
        assert equal(hvd.allgather(rows), torch.ones(3, 2).to(dtype))  # rank 0 contributes no rows
        rows = torch.full((rank + 1, 2), 1 + rank).to(dtype)
        assert equal(hvd.allgather(rows), torch.tensor([[1, 1], [2, 2], [2, 2]]).to(dtype))
        assert equal(hvd.broadcast(rows[:1], 1), torch.full((1, 2), 2).to(dtype))
        assert equal(rows[:1], torch.full((1, 2), 1 + rank).to(dtype))
        assert hvd.broadcast_(rows[:1], 0) is not None
        assert equal(rows[:1], torch.full((1, 2), 1).to(dtype))
    assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert hvd.broadcast_object(["epoch", rank], root_rank=1) == ["epoch", 1]
    raises(thinwire.InvalidArgumentError, "can be pickled", hvd.allgather_object, lambda: None)
    hvd.barrier()


def check_the_first_reducescatter_does_not_wait_for_other_ranks(rank: int) -> None:
    """Rank 1 calls it after it has learned that rank 0's own call has returned."""
    if rank == 0:
        handle = hvd.reducescatter_async(torch.ones(4), op=hvd.Sum, name="first")
        hvd.broadcast_object("returned", 0)
    else:
        hvd.broadcast_object(None, 0)
        handle = hvd.reducescatter_async(torch.ones(4), op=hvd.Sum, name="first")
    assert hvd.synchronize(handle).tolist() == [2.0, 2.0]


def check_reducescatter(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        rows = torch.arange(10).view(5, 2).to(dtype)
        mine = hvd.reducescatter(rows, op=hvd.Sum, name="rows")
        assert equal(mine, 2 * rows[3:] if rank else 2 * rows[:3], dtype)
    handle = hvd.reducescatter_async(torch.full((2,), 1.0 + rank))
    assert hvd.synchronize(handle).tolist() == [1.5]


def check_alltoall(rank: int) -> None:
    for dtype in (*FLOATS, *WHOLE, torch.bool, torch.complex64):
        rows = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).to(dtype)
        pair = rows[2 * rank : 2 * rank + 2]
        assert equal(hvd.alltoall(rows), torch.cat([pair, pair]))
        # Rank 0 sends 3 rows to itself and 1 to rank 1. Rank 1 sends none to rank 0 and 2 to
        # itself.
        splits = torch.tensor([0, 2] if rank else [3, 1])
        found, came = hvd.alltoall(rows[:2] if rank else rows, splits, name="rows")
        assert equal(found, torch.cat([rows[3:], rows[:2]]) if rank else rows[:3])
        assert came.tolist() == ([1, 2] if rank else [3, 0]) and came.dtype is torch.int32
    found, _ = hvd.synchronize(hvd.alltoall_async(torch.tensor([rank, rank + 5])))
    assert found.tolist() == ([5, 6] if rank else [0, 1])
    found, came = hvd.alltoall(torch.ones(0, 3), splits=[0, 0])
    assert found.shape == (0, 3) and came.tolist() == [0, 0]
    wrong = thinwire.InvalidArgumentError
    raises(wrong, "first dimension", hvd.alltoall, torch.tensor(1.0))
    raises(wrong, "multiple of 2 rows", hvd.alltoall, torch.ones(3))
    for splits in ([1], [2, 2], [-1, 1], [0.5, 1], torch.ones(2), "ab", [[1], [1]]):
        raises(wrong, "2 whole numbers", hvd.alltoall, torch.ones(3), splits)
    raises(thinwire.MismatchError, "rank 1 called", hvd.alltoall, torch.ones(2, 1 + rank))
    other = functools.partial(hvd.alltoall, torch.ones(2)) if rank else hvd.barrier
    raises(thinwire.MismatchError, "rank 1 called", other)
    raises(thinwire.MismatchError, "rank 1 called", hvd.alltoall, torch.ones(2, dtype=WHOLE[rank]))


def check_gradients_of_alltoall(rank: int) -> None:
    x = torch.zeros(4, requires_grad=True)
    y, came = hvd.alltoall(x, splits=[2, 0] if rank else [1, 2])
    assert not came.requires_grad
    y.backward(torch.arange(1.0, len(y) + 1) * (10 if rank else 1))
    # The gradients of rows that stay on this rank, that go to the other one, and that go nowhere.
    assert x.grad.tolist() == ([2.0, 3.0, 0.0, 0.0] if rank else [1.0, 10.0, 20.0, 0.0])
    x = torch.zeros(2, requires_grad=True)
    hvd.alltoall(x).backward(torch.tensor([1.0, 2.0]) + 10 * rank)
    assert x.grad.tolist() == ([2.0, 12.0] if rank else [1.0, 11.0])


def check_sparse_tensors(rank: int) -> None:
    """The indices are of one rank, of both, or of none. The second tensor's values are rows."""
    for dtype in (torch.float32, torch.float64, torch.int64):
        for dense, dimensions in (
            (torch.tensor([[2, 0, 4], [0, 6 * rank, 0]]), 2),
            (torch.tensor([[1, 3], [0, 0]]) * (2 - rank), 1),
            (torch.zeros(2, 2), 2),
        ):
            mine = dense.to(dtype).to_sparse(dimensions)
            handle = hvd.sparse_allreduce_async(mine, op=hvd.Sum, name="sparse")
            found = hvd.synchronize(handle)
            assert found.is_sparse
            assert equal(found.to_dense(), hvd.allreduce(dense.to(dtype), op=hvd.Sum), dtype)
            mean = hvd.sparse_allreduce_async(2 * mine)()
            assert equal(mean.to_dense(), found.to_dense(), dtype)
    wrong, some = thinwire.InvalidArgumentError, torch.eye(3).to_sparse()
    raises(wrong, "use allreduce_async", hvd.sparse_allreduce_async, torch.ones(2))
    raises(wrong, "Average or Sum", hvd.sparse_allreduce_async, some, op=hvd.Max)
    handle = hvd.sparse_allreduce_async(some, name="twice")
    raises(wrong, "in flight", hvd.sparse_allreduce_async, some, name="twice")
    hvd.synchronize(handle)
    differs = hvd.sparse_allreduce_async(torch.eye(3 + rank).to_sparse())
    raises(thinwire.MismatchError, "rank 1 called", hvd.synchronize, differs)


def check_compressors_are_called_as_horovods(_: int) -> None:
    values = torch.tensor([1.0, 0.1])
    sent, context = hvd.Compression.fp16.compress(values)
    assert sent.dtype is torch.float16
    assert hvd.Compression.fp16.decompress(sent, context).dtype is torch.float32
    for compressor in (hvd.Compression.none, hvd.Compression.int4):
        assert compressor.decompress(*compressor.compress(values)) is values
    assert issubclass(thinwire.PeerLostError, hvd.HorovodInternalError)


def check_groups_of_transfers(rank: int) -> None:
    rows = [torch.full((rank + 1, 2), float(rank)), torch.tensor([rank])]
    expected = [[[0, 0], [1, 1], [1, 1]], [0, 1]]
    assert [t.tolist() for t in hvd.grouped_allgather(rows, name="rows")] == expected
    handle = hvd.grouped_allgather_async(rows)
    assert [t.tolist() for t in hvd.synchronize(handle)] == expected
    wholes = [torch.arange(4.0), torch.arange(3)]
    mine = [[4.0, 6.0], [4]] if rank else [[0.0, 2.0], [0, 2]]
    assert [t.tolist() for t in hvd.grouped_reducescatter(wholes, op=hvd.Sum)] == mine
    handle = hvd.grouped_reducescatter_async(wholes, name="wholes", op=hvd.Sum)
    assert [t.tolist() for t in hvd.synchronize(handle)] == mine
    for call in (hvd.grouped_allgather, hvd.grouped_reducescatter):
        x = torch.ones(2, requires_grad=True)
        sum(y.sum() for y in call([x, 2 * x])).backward()
        assert x.grad.tolist() == [3.0, 3.0]


def check_autograd(rank: int) -> None:
    for call, expected in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), [6.0, 6.0]),
        (lambda x: hvd.allreduce(x), [3.0, 3.0]),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], [6.0, 6.0]),
        (lambda x: hvd.broadcast(x, 1), [3.0 * rank, 3.0 * rank]),
        (lambda x: hvd.allgather(x)[2 * rank :], [3.0, 3.0] if rank else [1.0, 1.0]),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), [4.0, 8.0]),
        (lambda x: hvd.reducescatter(x), [2.0, 4.0]),
    ):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = call(x)
        y.backward(torch.full_like(y, 2.0 + 2 * rank))
        assert x.grad.tolist() == expected
    raises(
        thinwire.InvalidArgumentError, "requires a gradient", hvd.allreduce,
        torch.ones(1, requires_grad=True), op=hvd.Max,
    )  # fmt: skip


# Functions that thinwire.horovod does not have.


def check_what_is_missing_says_what_to_use(_: int) -> None:
    for use, words in (
        (lambda: hvd.elastic.run(print), "recover"),
        (lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "op=Average"),
        (lambda: hvd.SyncBatchNorm(3), "torch.nn.SyncBatchNorm"),
    ):
        raises(thinwire.UnavailableError, words, use)


def check_shutdown_and_another_init(rank: int) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.shutdown()
    hvd.shutdown()
    raises(
        thinwire.InvalidArgumentError, "shutdown.. was called.*again after init",
        lambda: model(torch.ones(1, 3)).sum().backward(),
    )  # fmt: skip
    del optimizer
    assert not hvd.is_initialized() and dist.is_initialized()  # the group existed before init()
    raises(thinwire.InvalidArgumentError, "call thinwire.horovod.init", hvd.rank)
    hvd.init()
    assert hvd.allreduce(torch.tensor([1.0 * rank])).item() == 0.5
