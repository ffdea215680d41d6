"""Tensors on a GPU over NCCL. Ranks share the one GPU, which NCCL allows from 2.30 on; a rank by
itself greets itself with any NCCL."""

import pytest
import thinwire.torch
import torch
from devices import on_gpu
from models import data, digest, make_mlp, wrap
from ranks import run
from thinwire import _library, errors

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "THINWIRE_TRANSPORT": "nccl"}


def nccl_version() -> tuple[int, ...]:
    """Empty if there is none."""
    try:
        return tuple(int(part) for part in _library.nccl_version().split(".")[:2])
    except errors.UnavailableError:
        return ()


pytestmark = on_gpu
shared_gpu = pytest.mark.skipif(nccl_version() < (2, 30), reason="NCCL 2.30 is not here")


def reduced(rank: int, codec: str) -> list[torch.Tensor]:
    results = []
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tensor = (torch.randn(300_007, generator=generator) * 1e-3).cuda()
        thinwire.torch.all_reduce(tensor, codec=codec, name="g")
        results.append(tensor.cpu())
    return results


@shared_gpu
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("world", [2, 3])
def test_cuda_tensors_over_nccl_have_gloos_bits(codec, world):
    over_gloo = run(reduced, codec, world=world)
    over_nccl = run(reduced, codec, world=world, environment=SHARING)
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


@shared_gpu
def test_cuda_replicas_over_nccl_stay_identical():
    first, second = run(trained, environment=SHARING)
    assert first[0] == second[0]
    assert "nccl" in first[1]


# It sends to itself and gathers from itself, and compares, before the first tensor.
@pytest.mark.skipif(not nccl_version(), reason="NCCL is not here")
def test_one_rank_over_nccl():
    digests, transport = run(trained, world=1, environment={"THINWIRE_TRANSPORT": "nccl"})[0]
    assert digests == run(trained, world=1)[0][0]
    assert "nccl" in transport
