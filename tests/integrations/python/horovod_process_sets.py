"""Checks of thinwire.horovod in which some of three ranks take part: functions that test_horovod.py
calls on all of them, after init()."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import thinwire
import thinwire.horovod as hvd
import torch
from horovod_collectives import equal, raises
from horovod_training import INT4, backward, net, weights, wrapped

OUTER = [0, 2]


@contextlib.contextmanager
def process_set(ranks: list[int]) -> Iterator[hvd.ProcessSet]:
    added = hvd.add_process_set(ranks)
    yield added
    assert hvd.remove_process_set(added)


def check_process_sets_have_numbers(rank: int) -> None:
    everyone = hvd.global_process_set
    assert (everyone.ranks, everyone.process_set_id) == ([0, 1, 2], 0)
    assert (everyone.size(), everyone.rank(), everyone.included()) == (3, rank, True)
    unused = hvd.ProcessSet([2, 0])
    assert (unused.size(), unused.rank(), unused.process_set_id) == (None, None, None)
    with process_set([2, 0]) as outer, process_set([1]) as inner:
        assert outer.ranks == OUTER and outer.size() == 2 and inner.size() == 1
        assert outer.included() == (rank in OUTER) == (not inner.included())
        assert outer.rank() == (OUTER.index(rank) if rank in OUTER else None)
        assert len({0, outer.process_set_id, inner.process_set_id}) == 3
        assert hvd.allgather_object(outer.process_set_id) == [outer.process_set_id] * 3
    assert outer.process_set_id is None and outer.size() is None
    assert not hvd.remove_process_set(outer) and not hvd.remove_process_set(everyone)


def check_collectives_of_a_process_set(rank: int) -> None:
    """Rank 1 makes its own calls meanwhile, and then all ranks call together."""
    with process_set(OUTER) as outer, process_set([1]) as inner:
        mine = outer if rank in OUTER else inner
        ranks, place = mine.ranks, mine.rank()
        for dtype in (torch.float32, torch.float64, torch.int32):
            tensor = torch.arange(4).to(dtype) + rank
            total = sum(torch.arange(4).to(dtype) + other for other in ranks)
            whole = hvd.allreduce(tensor, op=hvd.Sum, process_set=mine, name="same name")
            assert equal(whole, total, dtype)
            (grouped,) = hvd.grouped_allreduce([tensor], op=hvd.Sum, process_set=mine)
            assert equal(grouped, total, dtype)
            part = hvd.reducescatter(tensor, op=hvd.Sum, process_set=mine)
            assert equal(part, total.chunk(len(ranks))[place], dtype)
            rows = hvd.allgather(torch.full((rank + 1,), rank).to(dtype), process_set=mine)
            assert equal(rows, [r for r in ranks for _ in range(r + 1)], dtype)
            sent = torch.arange(len(ranks)).to(dtype) + 10 * rank
            found = hvd.alltoall(sent, process_set=mine)
            assert equal(found, [place + 10 * r for r in ranks], dtype)
            sparse = hvd.sparse_allreduce_async(tensor.to_sparse(), op=hvd.Sum, process_set=mine)
            assert equal(sparse().to_dense(), total, dtype)
            root = ranks[-1]  # over all ranks
            found = hvd.broadcast(torch.tensor([rank]).to(dtype), root, process_set=mine)
            assert equal(found, [root], dtype)
        assert hvd.allgather_object(rank, process_set=mine) == ranks
        assert hvd.broadcast_object(rank, root_rank=ranks[-1], process_set=mine) == ranks[-1]
        hvd.barrier(mine)
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == 3


def check_gradients_within_a_process_set(rank: int) -> None:
    with process_set(OUTER) as outer:
        if rank == 1:
            return
        losses = torch.tensor([1.0 + rank, 10.0])
        for call, expected in (
            (lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=outer), [4.0, 20.0]),
            (lambda x: hvd.broadcast(x, 2, process_set=outer), [2.0, 10.0] if rank else [0.0, 0.0]),
            (
                lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=outer).expand(2),
                [2 * 11.0, 2 * 13.0],
            ),
            (lambda x: hvd.alltoall(x, process_set=outer), [10.0, 10.0] if rank else [1.0, 3.0]),
            (
                lambda x: hvd.allgather(x, process_set=outer)[2 * outer.rank() :][:2],
                [0.5 + 0.5 * rank, 5.0],
            ),
        ):
            x = torch.zeros(2, requires_grad=True)
            call(x).backward(losses)
            assert x.grad.tolist() == expected


def check_an_optimizer_of_a_process_set(rank: int) -> None:
    """Ranks 0 and 2 stay identical; rank 1 trains its own model."""
    with process_set(OUTER) as outer:
        model, alone = net(), net()
        optimizer = wrapped(model, compression=INT4, process_set=outer)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        if rank == 1:
            plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
            for step in range(3):
                plain.zero_grad()
                backward(alone, rank, step)
                plain.step()
            assert torch.equal(weights(model), weights(alone))
        of_all = hvd.allgather(weights(model)[None])
        assert torch.equal(of_all[0], of_all[2]) and not torch.equal(of_all[0], of_all[1])
        optimizer.close()


def check_wrong_process_sets(rank: int) -> None:
    wrong = thinwire.InvalidArgumentError
    for ranks in ([0, 0], ["0"], [-1], [True], 5, None):
        raises(wrong, "list of ranks", hvd.ProcessSet, ranks)
    for ranks in ([], [0, 3]):
        raises(wrong, "some of 3 ranks", hvd.add_process_set, ranks)
    tensor = torch.ones(2)
    unused = hvd.ProcessSet(OUTER)
    raises(wrong, "add_process_set", hvd.allreduce, tensor, process_set=unused)
    raises(wrong, "ProcessSet", hvd.allgather, tensor, process_set=OUTER)
    raises(
        thinwire.MismatchError, "rank 1 called", hvd.add_process_set, [[0, 1], [1, 2], [0]][rank]
    )
    with process_set(OUTER) as outer:
        raises(wrong, "a new one", hvd.add_process_set, outer)
        if rank == 1:
            raises(wrong, "with rank 1", hvd.allreduce, tensor, process_set=outer)
        else:
            raises(wrong, r"one of the ranks \[0, 2\]", hvd.broadcast, tensor, 1, process_set=outer)
    raises(wrong, "add_process_set", hvd.allgather, tensor, process_set=outer)  # the set is removed


# join().


def check_the_rank_that_joins_last_is_returned(rank: int) -> None:
    """Each rank joins only after the rank before it has joined."""
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        calls = order.index(rank)
        for call in range(calls):  # of those that others have not joined for
            mean = hvd.allreduce(torch.tensor([6.0, 3.0]), name=f"call {call}")
            assert mean.tolist() == [6.0 * (2 - call) / 3, 2.0 - call] or call == 0
        assert hvd.join() == order[-1]
    assert hvd.allgather_object(rank) == [0, 1, 2]


def check_ranks_that_have_joined_give_zeros(rank: int) -> None:
    """Holds for named and unnamed calls: the engine's, codecs first connected here, and others."""
    if rank != 1:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
            tensor = torch.tensor([3, 6 + rank]).to(dtype)
            total = torch.tensor([6, 14]).to(dtype)
            assert equal(hvd.allreduce(tensor, op=hvd.Sum), total)
            assert equal(hvd.allreduce(tensor, op=hvd.Sum, name="named"), total)
            assert equal(
                hvd.grouped_allreduce([tensor, 2 * tensor], op=hvd.Sum, name="group")[1], 2 * total
            )
            assert equal(hvd.allreduce(tensor[:1]), [2], dtype)
            part = hvd.reducescatter(torch.arange(3).to(dtype), op=hvd.Sum)
            assert equal(part, [2 * rank], dtype)
        values = torch.full((9000,), 7.0)
        lossy = hvd.allreduce(values, op=hvd.Sum, name="lossy", compression=hvd.Compression.int4)
        assert (lossy - 14.0).abs().max() < 0.2
    late = [hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name=n) for n in "ab" if rank == 0]
    if rank == 2:
        late = [hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name=n) for n in "ba"]
    hvd.join()  # joins before the last calls are waited for
    assert [hvd.synchronize(handle).tolist() for handle in late] == [[2.0] * 4] * len(late)


def check_calls_that_ranks_which_have_joined_refuse(rank: int) -> None:
    if rank > 0:
        one = torch.tensor([rank])
        for call in (
            lambda: hvd.allgather(one), lambda: hvd.broadcast(one, 1), hvd.barrier,
            lambda: hvd.allreduce(one, op=hvd.Max), lambda: hvd.alltoall(torch.ones(3)),
            lambda: hvd.allgather_object(5), lambda: hvd.add_process_set([0]),
        ):  # fmt: skip
            raises(thinwire.MismatchError, r"ranks \[0\] have joined", call)
            assert hvd.allreduce(one, op=hvd.Sum).item() == 3
    assert hvd.join() > 0
    assert hvd.allgather(torch.tensor([rank])).tolist() == [0, 1, 2]


def check_optimizers_go_on_without_ranks_that_have_joined(rank: int) -> None:
    """The weights are those of a run in which these ranks have zero gradients, over two epochs. One
    optimizer makes its first step after a rank has joined."""
    for compression in (hvd.Compression.none, INT4):
        joined = epochs(rank, compression, joins=True)
        expected = epochs(rank, compression, joins=False)
        assert all(map(torch.equal, joined, expected))


def epochs(rank: int, compression: hvd.Compressor, joins: bool) -> list[torch.Tensor]:
    models = [net(), net(2)]
    optimizers = [wrapped(model, compression=compression) for model in models]
    for epoch in range(2):
        for step in range(3):
            has_data = step < 1 + rank
            if joins and not has_data:
                break
            for number in range(epoch == 0 and step == 0, 2):
                optimizers[number].zero_grad()
                if has_data:
                    backward(models[number], rank, step)
                if joins:  # between backward and step; it must not delay the step
                    hvd.allreduce(torch.ones(2), name="loss")
                optimizers[number].step()
        if not joins:
            continue
        before, gradient = list(map(weights, models)), models[1][0].bias.grad.clone()
        last = hvd.join()
        assert last == 2 and torch.equal(models[1][0].bias.grad, gradient)
        assert all(map(torch.equal, before, map(weights, models)))
        for model, optimizer in zip(models, optimizers, strict=True):
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    for optimizer in optimizers:
        optimizer.close()
    return list(map(weights, models))


def check_init_takes_process_sets(rank: int) -> None:
    """Another init() removes the process sets of the one before."""
    before = hvd.add_process_set(OUTER)
    hvd.shutdown()
    given = hvd.ProcessSet(OUTER)
    for wrong in (given, [OUTER], "static"):
        raises(thinwire.InvalidArgumentError, "process_sets", hvd.init, process_sets=wrong)
    hvd.init(process_sets=[given])
    assert before.size() is None and given.size() == 2
    if rank in OUTER:
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=given).item() == 2
    raises(thinwire.InvalidArgumentError, "not in use|add_process", hvd.allreduce, torch.ones(1),
           process_set=before)  # fmt: skip
