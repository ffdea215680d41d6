"""A process group that compresses allreduces of floats, registered with torch; and one whose ranks
meet again after a loss."""

import datetime
import gc
import os
import sys
import types

import pytest
import thinwire
import torch
import torch.distributed as dist
from ranks import outcomes_of, reserved_port, run
from thinwire.torch import backend, private
from thinwire.torch.process_group import ProcessGroup
from thinwire.torch.works import GatherWork, Kept
from torch.distributed._functional_collectives import all_reduce as all_reduce_functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

NUMEL = 100_000  # enough to be compressed


def serve(rank: int) -> tuple[dist.TCPStore | None, int]:
    """Return a store that rank 0 serves, and its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    box = [store.port]
    dist.broadcast_object_list(box)
    return store, box[0]


def collectives(rank: int) -> dict[str, torch.Tensor]:
    _store, port = serve(rank)
    group = ProcessGroup("int8", scope="all")
    group.configure(f"127.0.0.1:{port}/one", rank, 2)
    floats = torch.full((NUMEL,), 1.0 + rank)
    floats[::100] = 100.0  # so that ones are below a step of int8
    found = {
        "floats": floats,
        "average": floats.clone(),
        "most": floats + torch.linspace(0, 1, NUMEL),
        "few": torch.tensor([1.0 / 3, 0.1 * rank]),
        "whole": torch.full((NUMEL,), (1 << 24) + rank),
        "double": torch.full((NUMEL,), 1.0 / 3 + rank, dtype=torch.float64),
    }
    ops = {"average": dist.ReduceOp.AVG, "most": dist.ReduceOp.MAX}
    for name, tensor in found.items():
        dist.all_reduce(tensor, ops.get(name, dist.ReduceOp.SUM), group=group)
    group.allreduce([found["few"]]).get_future().wait()
    gathered = torch.empty(4)
    group.broadcast([floats[:5]], dist.BroadcastOptions()).wait()
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]) + rank, group=group)
    assert (group.rank(), group.size(), group.errored()) == (rank, 2, None)
    ratio = group.stats()["ratio"]
    group.shutdown()
    dist.barrier()
    return {**found, "gathered": gathered, "ratio": torch.tensor(ratio)}


def test_floats_are_compressed_and_all_else_is_exact():
    first, second = run(collectives)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert first["ratio"] > 3
    assert (first["floats"][1] - 3).abs() < 1 and not (first["floats"] == 3).any()
    torch.testing.assert_close(first["average"], first["floats"] / 2, rtol=0.01, atol=0)
    assert first["most"][1] == 2 + torch.linspace(0, 1, NUMEL)[1]
    torch.testing.assert_close(first["few"], torch.tensor([4.0 / 3, 0.2]))
    assert (first["whole"] == (1 << 25) + 1).all()
    assert (first["double"] == 1.0 / 3 + (1.0 / 3 + 1)).all()
    assert first["gathered"].tolist() == [1.0, 2.0, 2.0, 3.0]


def go_on_alone(rank: int) -> list[float]:
    store, port = serve(rank)
    group = ProcessGroup("int8", scope="all", timeout_s=100)
    group.configure(f"127.0.0.1:{port}/all", rank, 3)
    group.allreduce([torch.ones(NUMEL)]).wait()
    if rank == 2:
        os._exit(3)
    with pytest.raises(thinwire.PeerLostError, match="rank 2"):
        for _ in range(100):
            group.allreduce([torch.ones(NUMEL)]).wait()
    assert isinstance(group.errored(), thinwire.PeerLostError)
    sums = []
    for ranks in ((0, 1), (0,)):  # 3 -> 2 -> 1
        if rank not in ranks:
            client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            client.set("rank 1 is through", "")  # rank 0's next configure() fails pending work
            client.wait(["done"])
            return sums
        left = None
        if ranks == (0,):
            store.wait(["rank 1 is through"])
            left = group.allreduce([torch.ones(NUMEL)])
        group.configure(f"127.0.0.1:{port}/{len(ranks)}", rank, len(ranks))
        if left is not None:  # rank 1 takes no part in it
            with pytest.raises(thinwire.Error, match="rank 0 left the process group"):
                left.wait()
        tensor = torch.ones(NUMEL)
        group.allreduce([tensor]).wait()
        assert group.errored() is None
        sums.append(tensor[0].item())
    store.set("done", "")
    assert store.check(["done"])  # set() has reached the server, which ends with this process
    return sums


def test_survivors_go_on_in_the_same_object():
    outcomes = outcomes_of(go_on_alone, world=3)
    assert [outcome.error for outcome in outcomes[:2]] == ["", ""], [o.trace for o in outcomes]
    assert outcomes[0].value == pytest.approx([2.0, 1.0], rel=0.01)
    assert outcomes[1].value == pytest.approx([2.0], rel=0.01)


def register_and_train(rank: int, store: str) -> tuple[torch.Tensor, float, str]:
    dist.destroy_process_group()
    backend.register("int8", name="wired", timeout_s=100)
    with pytest.raises(thinwire.InvalidArgumentError, match="wired"):
        backend.register("int8", name="wired")
    dist.init_process_group("wired", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
    torch.manual_seed(rank)
    ddp(torch.randn(4, 300)).square().sum().backward()
    gradient, ratio = ddp.module.weight.grad.clone(), dist.group.WORLD.stats()["ratio"]
    dist.barrier()
    if rank == 1:
        os._exit(3)
    # torch raises its own futures' copy of the error, so errored() has the type
    with pytest.raises(RuntimeError):
        for _ in range(3):
            ddp(torch.randn(4, 300)).square().sum().backward()
    assert isinstance(dist.group.WORLD.errored(), thinwire.PeerLostError)
    return gradient, ratio


def test_ddp_over_the_registered_backend(tmp_path):
    first = outcomes_of(register_and_train, str(tmp_path / "store"))[0]
    assert not first.error, first.trace
    gradient, ratio = first.value
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    for rank in range(2):
        torch.manual_seed(rank)
        (model(torch.randn(4, 300)).square().sum() / 2).backward()
    exact = model.weight.grad
    assert (gradient - exact).abs().max() < 0.03 * exact.abs().max()
    assert ratio > 3


def test_configure_says_what_is_wrong():
    group = ProcessGroup("int8", timeout_s=0.3)
    with pytest.raises(thinwire.InvalidArgumentError, match="configure"):
        group.allreduce([torch.ones(3)])
    refused = pytest.raises(thinwire.UnavailableError, match=r"no store.*127.0.0.1")
    with reserved_port() as port, refused:
        group.configure(f"127.0.0.1:{port}/x", 0, 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(thinwire.TimeoutError, match="rank 0 of 2"):
        group.configure(f"127.0.0.1:{store.port}/x", 0, 2)


# Calls that programs make on the default group: init_process_group("wired") in place of "gloo".


def rejoin(
    rank: int, store: str, world: int = 2, codec: str = "fp32", **options: object
) -> dist.ProcessGroup:
    dist.destroy_process_group()
    backend.register(codec, name="wired", timeout_s=100, **options)
    dist.init_process_group("wired", init_method=f"file://{store}", rank=rank, world_size=world)
    return dist.group.WORLD


def futures_after_waits(rank: int, store: str) -> int:
    """Return how many works were not done after wait()."""
    group, late = rejoin(rank, store, scope="all"), 0
    for _ in range(400):
        work = group.allreduce([torch.ones(4)])
        work.wait()
        late += not work.get_future().done()
    return late


def test_a_work_that_was_waited_for_is_done(tmp_path):
    assert run(futures_after_waits, str(tmp_path / "store")) == [0, 0]


def has_a_name(rank: int, store: str) -> tuple[bool, float, float]:
    group = rejoin(rank, store)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    functional = all_reduce_functional(torch.ones(3), "sum", group)
    sharded = torch.nn.Linear(4, 4, bias=False)
    fully_shard(sharded, mesh=mesh)
    sharded(torch.ones(1, 4)).sum().backward()
    part = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=part)
    dist.destroy_process_group(part)
    gradient = sharded.weight.grad.full_tensor()
    return group.group_name != "", functional.sum().item(), gradient.mean().item()


def test_the_default_group_has_a_name(tmp_path):
    assert run(has_a_name, str(tmp_path / "store")) == [(True, 6.0, 1.0)] * 2


def join_uneven(rank: int, store: str, ours: bool, fixed: bool) -> torch.Tensor:
    """Return the weights after training with one step more on rank 0 than on rank 1."""
    if ours:
        rejoin(rank, store)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=fixed):
        for step in range(3 - rank):
            optimizer.zero_grad()
            ddp(torch.full((2, 8), 1.0 + step + rank)).square().sum().backward()
            optimizer.step()
            gc.collect()
    return ddp.module.weight.detach()


@pytest.mark.parametrize("fixed", [True, False])
def test_ddp_joins_uneven_inputs(tmp_path, fixed):
    ours = run(join_uneven, str(tmp_path / "store"), True, fixed)
    theirs = run(join_uneven, "", False, fixed)
    torch.testing.assert_close(ours, theirs)


def wait_in_a_callback(rank: int, store: str) -> float:
    group = rejoin(rank, store, scope="all")

    def once_more(done: torch.futures.Future) -> torch.Tensor:
        (tensor,) = done.value()
        return group.allreduce([tensor]).get_future().wait()[0]

    futures = [group.allreduce([torch.ones(NUMEL)]).get_future().then(once_more) for _ in range(1)]
    return sum(future.wait()[0].item() for future in futures)


def test_a_callback_may_wait_for_another_future(tmp_path):
    assert run(wait_in_a_callback, str(tmp_path / "store")) == [4.0, 4.0]


def coalesced(rank: int, store: str) -> dict[str, list[float]]:
    group = rejoin(rank, store)
    found = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        tensors = [torch.full((2,), 2.0 + rank), torch.full((3,), 5.0 - rank)]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        group.allreduce_coalesced(tensors, options).wait()
        found[op] = [tensor[0].item() for tensor in tensors]
    tensors = [torch.ones(2), torch.ones(3)]
    assert group.allreduce_coalesced(tensors).result()[1].tolist() == [2.0] * 3
    return found


def test_coalesced_allreduces(tmp_path):
    expected = {"SUM": [5.0, 9.0], "MAX": [3.0, 5.0], "MIN": [2.0, 4.0], "PRODUCT": [6.0, 20.0]}
    assert run(coalesced, str(tmp_path / "store")) == [expected] * 2


def lists(rank: int, store: str) -> list[float]:
    group = rejoin(rank, store)
    for wrong in (
        [],
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    ):
        with pytest.raises((ValueError, RuntimeError)):
            group.allreduce(wrong)
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            group.allreduce_coalesced([*wrong[:1], 5] if wrong else [])
    assert group.errored() is None
    tensors = [torch.full((2,), 1.0 + rank), torch.full((2,), 10.0)]
    group.allreduce(tensors).wait()
    single = torch.ones(2)
    assert group.allreduce(single, op=dist.ReduceOp.MAX).wait()
    assert group.allreduce([single]).result()[0] is not None
    return [tensors[0][0].item(), tensors[1][1].item(), single[0].item()]


def test_lists_are_checked_and_summed_as_gloos(tmp_path):
    assert run(lists, str(tmp_path / "store")) == [[23.0, 23.0, 2.0]] * 2


def rest_of_the_interface(rank: int, store: str, *more: str) -> list[int]:
    group = rejoin(rank, store)
    numbers = [group._get_sequence_number_for_group()]
    dist.broadcast(torch.ones(1), 0)
    numbers.append(group._get_sequence_number_for_group())
    group.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=True)
    work = group.allreduce([torch.ones(3)])
    work.wait()
    assert work.is_success() and work.result()[0].tolist() == [2.0] * 3
    assert group._get_backend(torch.device("cpu")) is not None
    for other in more:
        dist.destroy_process_group()
        dist.init_process_group("wired", init_method=f"file://{other}", rank=rank, world_size=2)
        dist.barrier()
    return [numbers[1] - numbers[0]]


def test_sequence_numbers_barriers_and_the_end(tmp_path):
    assert run(rest_of_the_interface, *(str(tmp_path / each) for each in "abc")) == [[1], [1]]


def leave_at_once(rank: int, path: str) -> int:
    store, timeout = dist.FileStore(path, 2), datetime.timedelta(seconds=60)
    for number in range(100):  # one in fifty failed to connect because the other had left
        private.gloo_group(dist.PrefixStore(str(number), store), rank, 2, timeout)
    return number


def test_a_rank_that_leaves_at_once_does_not_end_the_others_connecting(tmp_path):
    assert run(leave_at_once, str(tmp_path / "store")) == [99, 99]


def timeouts_and_futures(rank: int, store: str) -> bool:
    group = rejoin(rank, store)
    tensor = torch.full((3,), 1.0 + rank)
    work = group.send([tensor], 1, 0) if rank == 0 else group.recv([tensor], 0, 0)
    work.get_future().wait()
    group.set_timeout(datetime.timedelta(seconds=0.5))
    end = dist.FileStore(f"{store} end", 2)
    if rank == 1:  # rank 1 takes no part
        end.wait(["end"])
    else:
        with pytest.raises(thinwire.TimeoutError):
            group.broadcast([torch.ones(1)], dist.BroadcastOptions()).wait()
            group.barrier().wait()
        end.set("end", "")
    return tensor[0].item() == 1.0


def test_sends_have_futures_and_the_deadline_can_be_set(tmp_path):
    outcomes = outcomes_of(timeouts_and_futures, str(tmp_path / "store"))
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes[0].trace


def as_torchfts(_rank: int) -> tuple[bool, list[float]]:
    """Make a group of one rank, with a stand-in for torchft that refuses what is not overridden."""

    class Theirs(dist.ProcessGroup):
        def allreduce(self, *_: object) -> None:
            raise NotImplementedError

        configure = errored = abort = shutdown = allreduce

    package, module = types.ModuleType("torchft"), types.ModuleType("torchft.process_group")
    module.ProcessGroup = Theirs
    sys.modules |= {"torchft": package, "torchft.process_group": module}
    from thinwire.torchft import ThinwireProcessGroup

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ThinwireProcessGroup("int8")
    group.configure(f"127.0.0.1:{store.port}/x", "replica", 0, 1, 5, 1, 0, [0])
    result = group.allreduce([torch.arange(3.0)]).result()[0].tolist()
    assert group.errored() is None
    group.shutdown()
    return isinstance(group, Theirs), result


def test_torchfts_is_a_process_group_of_torchft():
    assert run(as_torchfts, world=1) == [(True, [0.0, 1.0, 2.0])]


def test_a_gather_that_failed_stays_failed():
    """Each wait raises the first wait's error, and nothing reports success."""

    def lose() -> None:
        raise thinwire.PeerLostError("rank 0, tensor 'w': rank 1 is lost")

    work = GatherWork(lose, Kept())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            work.wait()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        work.result()
    assert work.is_completed() and not work.is_success()
