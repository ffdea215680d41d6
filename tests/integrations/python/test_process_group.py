"""A process group whose allreduce of floats is compressed: registered with torch, and one that
meets its ranks anew after a loss."""

import os
import socket

import pytest
import thinwire
import torch
import torch.distributed as dist
from ranks import outcomes_of, run
from thinwire.torch import process_group
from thinwire.torch.process_group import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

NUMEL = 100_000  # compressed


def serve(rank: int) -> tuple[dist.TCPStore | None, int]:
    """A store that rank 0 serves, and its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    box = [store.port]
    dist.broadcast_object_list(box)
    return store, box[0]


def collectives(rank: int) -> dict[str, torch.Tensor]:
    _store, port = serve(rank)
    group = ProcessGroup("int8")
    group.configure(f"127.0.0.1:{port}/one", rank, 2)
    floats = torch.full((NUMEL,), 1.0 + rank)
    floats[::100] = 100.0  # so that ones are less than a step of int8
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
    group = ProcessGroup("int8", timeout_s=5)
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
            client.set("rank 1 is through", "")  # rank 0's next configure() fails what is in flight
            client.wait(["done"])
            return sums
        left = None
        if ranks == (0,):
            store.wait(["rank 1 is through"])
            left = group.allreduce([torch.ones(NUMEL)])
        group.configure(f"127.0.0.1:{port}/{len(ranks)}", rank, len(ranks))
        if left is not None:  # rank 1 has no part in it
            with pytest.raises(thinwire.Error, match="rank 0 left the process group"):
                left.wait()
        tensor = torch.ones(NUMEL)
        group.allreduce([tensor]).wait()
        assert group.errored() is None
        sums.append(tensor[0].item())
    store.set("done", "")
    assert store.check(["done"])  # it has gone through the server, which ends with this process
    return sums


def test_survivors_go_on_in_the_same_object():
    outcomes = outcomes_of(go_on_alone, world=3)
    assert [outcome.error for outcome in outcomes[:2]] == ["", ""], [o.trace for o in outcomes]
    assert outcomes[0].value == pytest.approx([2.0, 1.0], rel=0.01)
    assert outcomes[1].value == pytest.approx([2.0], rel=0.01)


def register_and_train(rank: int, port: int) -> tuple[torch.Tensor, float, str]:
    dist.destroy_process_group()
    process_group.register("int8", name="wired", timeout_s=5)
    with pytest.raises(thinwire.InvalidArgumentError, match="wired"):
        process_group.register("int8", name="wired")
    dist.init_process_group("wired", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
    torch.manual_seed(rank)
    ddp(torch.randn(4, 300)).square().sum().backward()
    gradient, ratio = ddp.module.weight.grad.clone(), dist.group.WORLD.stats()["ratio"]
    dist.barrier()
    if rank == 1:
        os._exit(3)
    # torch raises what its own futures keep of it, so the type is errored()'s.
    with pytest.raises(RuntimeError):
        for _ in range(3):
            ddp(torch.randn(4, 300)).square().sum().backward()
    assert isinstance(dist.group.WORLD.errored(), thinwire.PeerLostError)
    return gradient, ratio


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ddp_over_the_registered_backend():
    first = outcomes_of(register_and_train, free_port())[0]
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
    with pytest.raises(thinwire.UnavailableError, match=r"no store.*127.0.0.1"):
        group.configure(f"127.0.0.1:{free_port()}/x", 0, 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(thinwire.TimeoutError, match="rank 0 of 2"):
        group.configure(f"127.0.0.1:{store.port}/x", 0, 2)
