"""Tensors on a GPU over NCCL. The ranks share one GPU, which NCCL allows from 2.30 on. A group of
one rank has no transport, so bench/nccl_bench.cc exchanges with itself instead."""

import pytest
import thinwire.torch
import torch
from devices import on_gpu
from models import data, digest, make_mlp, wrap
from ranks import run
from thinwire import _library, config, errors

# Channels hold SMs of the GPU that all ranks share, and with too many of them NCCL hangs. NCCL's
# guide forbids NVLS there. Ranks take turns on the GPU, so a run takes longer than on several.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "THINWIRE_TRANSPORT": "nccl",
}
TIMEOUT_S = 100.0


def nccl_version() -> tuple[int, ...]:
    """Return NCCL's version; empty if there is none."""
    try:
        return tuple(
            int(part) for part in _library.nccl_version(config.nccl_library()).split(".")[:2]
        )
    except errors.UnavailableError:
        return ()


pytestmark = [
    on_gpu, pytest.mark.skipif(nccl_version() < (2, 30), reason="NCCL 2.30 is not here")
]  # fmt: skip


def reduced(rank: int, codec: str) -> list[torch.Tensor]:
    results = []
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tensor = (torch.randn(300_007, generator=generator) * 1e-3).cuda()
        thinwire.torch.all_reduce(tensor, codec=codec, name="g")
        results.append(tensor.cpu())
    return results


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("world", [2, 3])
def test_cuda_tensors_over_nccl_have_gloos_bits(codec, world):
    over_gloo = run(reduced, codec, world=world)
    over_nccl = run(reduced, codec, world=world, environment=SHARING, timeout_s=TIMEOUT_S)
    for got, expected in zip(over_nccl, over_gloo, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def trained(rank: int):
    model = make_mlp().cuda()
    ddp, state = wrap(model, "int4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(20):
        optimizer.zero_grad()
        ddp(data(step, rank).cuda()).square().mean().backward()
        optimizer.step()
    return digest(model.cpu()), state.stats()["transport"]


def test_cuda_replicas_over_nccl_stay_identical():
    first, second = run(trained, environment=SHARING, timeout_s=TIMEOUT_S)
    assert first[0] == second[0]
    assert "nccl" in first[1]
