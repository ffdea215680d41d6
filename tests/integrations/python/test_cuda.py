"""Tensors on a GPU give the CPU's bits, in stream order, without making the host wait."""

import pytest
import thinwire.torch
import torch
from devices import on_gpu
from models import data, digest, make_mlp, train, wrap
from ranks import run
from torch.nn.parallel import DistributedDataParallel

pytestmark = on_gpu

CODECS = ("fp32", "bf16", "int8", "int4", "int4:hadamard=1")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradient(rank: int, step: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(numel, generator=generator) * 1e-3).to(dtype)


def reduce_steps(rank: int, device: str, codec: str):
    results = []
    for dtype in DTYPES:
        for step in range(4):
            tensor = gradient(rank, step, 100_003, dtype).to(device)
            thinwire.torch.all_reduce(tensor, codec=codec, name=f"g {dtype}")
            results.append(tensor.cpu())
    return results


@pytest.mark.parametrize("codec", CODECS)
def test_all_reduce_gives_the_cpu_bits(codec):
    on_cpu, on_gpu = run(reduce_steps, "cpu", codec), run(reduce_steps, "cuda", codec)
    for rank in range(2):
        for got, expected in zip(on_gpu[rank], on_cpu[rank], strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


class Given(torch.nn.Module):
    """A module whose gradient is its input, exactly, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(50_000))
        self.bias = torch.nn.Parameter(torch.zeros(700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x[:50_000]).sum() + (self.bias * x[50_000:]).sum()


def ddp_steps(rank: int, device: str, codec: str, momentum: float):
    model = Given().to(device)
    ddp = DistributedDataParallel(model)
    state = thinwire.torch.compress(ddp, codec=codec, momentum=momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if momentum:
        state.take_momentum(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        ddp(gradient(rank, step, 50_700, torch.float32).to(device)).backward()
        optimizer.step()
    kept = {name: m["first"] for name, m in state.state_dict()["residuals"].items()}
    return digest(model.cpu()), kept


@pytest.mark.parametrize(("codec", "momentum"), [("int4", 0.0), ("int8", 0.0), ("onebit", 0.9)])
def test_ddp_gives_the_cpu_bits(codec, momentum):
    on_cpu = run(ddp_steps, "cpu", codec, momentum)
    on_gpu = run(ddp_steps, "cuda", codec, momentum)
    assert len({rank[0] for rank in (*on_cpu, *on_gpu)}) == 1
    for rank in range(2):
        for name, kept in on_cpu[rank][1].items():
            assert torch.equal(on_gpu[rank][1][name], kept), name


def hook_without_waiting(rank: int):
    model = make_mlp().cuda()
    ddp = DistributedDataParallel(model)
    state = thinwire.torch.State("int4", clip_norm=1.0, min_bytes=0)
    waits = []

    def spy(state, bucket):
        torch.cuda.set_sync_debug_mode("error")  # raises if torch makes the host wait
        try:
            return thinwire.torch.hook(state, bucket)
        except RuntimeError as error:
            waits.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    ddp.register_comm_hook(state, spy)
    for step in range(3):
        ddp(data(step, rank).cuda()).square().mean().backward()
    return waits


def test_the_hook_does_not_wait_for_the_gpu():
    assert run(hook_without_waiting) == [[], []]


def busy_streams(rank: int):
    """The gradient is still being computed, on another stream, when all_reduce() is called."""
    results = []
    side = torch.cuda.Stream()
    for step in range(5):
        with torch.cuda.stream(side):
            tensor = torch.zeros(200_000, device="cuda")
            torch.cuda._sleep(50_000_000)
            tensor += rank + step
            thinwire.torch.all_reduce(tensor, codec="fp32", name="g", async_op=True).wait()
            results.append(tensor.mean().item())
    return results


def test_streams_are_kept_in_order():
    expected = [2.0 * step + 1.0 for step in range(5)]
    assert run(busy_streams) == [expected, expected]


def replicas(rank: int, codec: str):
    model = make_mlp().cuda()
    ddp, state = wrap(model, codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(100):
        optimizer.zero_grad()
        ddp(data(step, rank).cuda()).square().mean().backward()
        optimizer.step()
    return digest(model.cpu()), state.stats()["ratio"]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_replicas_stay_identical(codec):
    first, second = run(replicas, codec)
    assert first[0] == second[0]
    assert first[1] > 3.7


def mixed(rank: int):
    """Rank 0 is on the GPU, rank 1 on the CPU."""
    tensor = gradient(rank, 0, 50_000, torch.float32).to("cuda" if rank == 0 else "cpu")
    thinwire.torch.all_reduce(tensor, codec="int4")
    return tensor.cpu()


def test_cpu_and_gpu_ranks_agree():
    first, second = run(mixed)
    assert torch.equal(first, second)


def wrong_device(rank: int):
    model = make_mlp()
    ddp, state = wrap(model, "int4")
    train(ddp, 1)
    with pytest.raises(thinwire.InvalidArgumentError, match="expected cpu as the first one"):
        state._session.connect(torch.zeros(4, device="cuda"))


def test_a_state_keeps_to_its_device():
    run(wrong_device)
