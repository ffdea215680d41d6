"""Training loops that do more than backward and step, on the CPU and on a GPU: mixed precision with
a loss scaler, compiled models, gradient accumulation."""

import pytest
import torch
from devices import EACH_DEVICE
from models import data, gradients, make_mlp, wrap
from ranks import run

pytestmark = pytest.mark.parametrize("device", EACH_DEVICE)


def values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])


def scaled_steps(rank: int, device: str, codec: str | None):
    """Make five steps under GradScaler, with an Inf in rank 1's gradients of step 2."""
    model = make_mlp().to(device)
    ddp, _ = wrap(model, codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1000)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = ddp(data(step, rank).to(device)).float().square().mean()
        if (rank, step) == (1, 2):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((values(model), scaler.get_scale()))
    return seen


@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_an_inf_on_one_rank_skips_the_step_on_all(device, codec):
    ranks = run(scaled_steps, device, codec)
    for (weights, scale), (others, other_scale) in zip(*ranks, strict=True):
        assert torch.equal(weights, others)
        assert scale == other_scale
    weights, scales = zip(*ranks[0], strict=True)
    assert torch.equal(weights[2], weights[1]), "the step with the Inf was taken"
    assert scales[2] == scales[1] / 2
    for step in (1, 3, 4):
        assert not torch.equal(weights[step], weights[step - 1])
        assert weights[step].isfinite().all()
        assert scales[step] == scales[step - 1 if step > 1 else 0]


def test_a_loss_scaler_trains_as_without_compression(device):
    plain, ours = run(scaled_steps, device, None), run(scaled_steps, device, "int8")
    torch.testing.assert_close(ours[0][-1][0], plain[0][-1][0], rtol=0.02, atol=2e-3)


def compiled_steps(rank: int, device: str, whole: bool):
    model = make_mlp().to(device)
    inner = model if whole else torch.compile(model, backend="aot_eager")
    ddp, state = wrap(inner, "int4")
    step_model = torch.compile(ddp, backend="aot_eager") if whole else ddp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        step_model(data(step, rank).to(device)).square().mean().backward()
        optimizer.step()
    return values(model), state.stats()["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["model", "ddp"])
def test_compiled_models_keep_identical_replicas(device, whole):
    first, second = run(compiled_steps, device, whole)
    assert torch.equal(first[0], second[0])
    assert first[1] == 4


def accumulated(rank: int, device: str, codec: str):
    model = make_mlp().to(device)
    ddp, state = wrap(model, codec)
    for step in range(3):
        with ddp.no_sync():
            ddp(data(2 * step, rank).to(device)).square().sum().backward()
        ddp(data(2 * step + 1, rank).to(device)).square().sum().backward()
    return gradients(model).cpu(), state.stats()["steps"]


def test_no_sync_sends_once_for_several_backward_passes(device):
    first, second = run(accumulated, device, "int4")
    assert torch.equal(first[0], second[0])
    assert first[1] == 3
