"""compress(..., delay=1) gives the weights of a plain OD-SGD with the optimizer's local steps."""

import contextlib
import copy

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from policies import Wrapped
from ranks import run

STEPS, WORLD = 12, 2
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}


def gradients(model: torch.nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, data(step, rank)), list(model.parameters())))


def od_sgd(steps: int, warm_up: int, rate) -> torch.nn.Module:
    """Train by OD-SGD with all ranks in one process. rate(step): the step's learning rate."""
    model = make_mlp(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def apply(means, lr):
        for parameter, mean in zip(model.parameters(), means, strict=True):
            parameter.grad = mean
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    local, late = None, None  # each rank's last gradient; the means that are not applied yet
    for step in range(steps):
        own = []
        for rank in range(WORLD):
            worker = copy.deepcopy(model)
            if late is not None:
                mine = torch.optim.SGD(worker.parameters(), **SGD)
                mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                mine.param_groups[0]["lr"] = rate(step - 1)
                for p, g in zip(worker.parameters(), local[rank], strict=True):
                    p.grad = g
                mine.step()
            own.append(gradients(worker, step, rank))
        means = [torch.stack(parts).mean(0) for parts in zip(*own, strict=True)]
        if late is not None:
            apply(late, rate(step - 1))
        if step >= warm_up:
            local, late = own, means
        else:
            apply(means, rate(step))
    if late is not None:
        apply(late, rate(steps - 1))
    return model


def delayed(rank: int, codec: str, warm_up: int, decay: bool, finish_each: bool = False):
    model = make_mlp(seed=rank)  # all ranks get rank 0's
    inner = torch.optim.SGD(model.parameters(), **SGD)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.5 if decay else 1.0)
    optimizer = Wrapped(inner, model, codec=codec, min_bytes=0, delay=1, warm_up_steps=warm_up)
    apart = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()
        schedule.step()
        apart.append(digest(model))
        if finish_each:
            optimizer.finish()
    state = optimizer.state_dict()  # state_dict() calls finish()
    assert state["state"]
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], digest(model), apart


@pytest.mark.parametrize("warm_up", [0, 4, STEPS])
@pytest.mark.parametrize("decay", [False, True])
def test_it_is_od_sgd(warm_up, decay):
    ranks = run(delayed, "fp32", warm_up, decay)
    expected = od_sgd(STEPS, warm_up, lambda step: SGD["lr"] * (0.5 ** (step // 3) if decay else 1))
    for weights, _, _ in ranks:
        for got, wanted in zip(weights, expected.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_replicas_differ_on_the_way_and_not_in_the_end(codec):
    (_, first, apart), (_, second, also) = run(delayed, codec, 3, False)
    assert first == second
    assert apart[:2] == also[:2]
    assert all(a != b for a, b in zip(apart[3:], also[3:], strict=True))


def alike(rank: int, options: dict, delay: int):
    """Return the weights after steps in which all ranks have the same batches."""
    model = make_mlp(seed=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, **options)
    optimizer = Wrapped(inner, model, codec="fp32", min_bytes=0, delay=delay)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step, 0)).backward()
        optimizer.step()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 1e-2},
        {"momentum": 0.9, "maximize": True, "weight_decay": 1e-2},
    ],
)
def test_ranks_with_equal_gradients_train_as_without_a_delay(options):
    (late, _), (plain, _) = run(alike, options, 1), run(alike, options, 0)
    for got, wanted in zip(late, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_finishing_every_step_is_no_delay_at_all():
    (_, late, _), _ = run(delayed, "fp32", 0, False, True)
    (_, plain, _), _ = run(delayed, "fp32", STEPS, False)
    assert late == plain


def unused_then_used(rank: int):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(96, 8), torch.nn.Linear(96, 8)])
    inner = torch.optim.SGD(model.parameters(), **SGD)
    options = {"codec": "fp32", "min_bytes": 0, "find_unused_parameters": True}
    optimizer = Wrapped(inner, model, delay=1, **options)
    before = model[1].weight.detach().clone()
    for step in range(6):
        optimizer.zero_grad()
        out = model[0](data(step, rank))
        if step >= 3:
            out = out + model[1](data(step, rank))
        out.square().mean().backward()
        optimizer.step()
        if step == 2:
            optimizer.finish()
            assert torch.equal(model[1].weight, before)  # nor weight decay
    optimizer.finish()
    assert not torch.equal(model[1].weight, before)
    return digest(model)


def test_parameters_that_nobody_used_stay():
    first, second = run(unused_then_used)
    assert first == second


def refusals(rank: int):
    model = make_mlp()
    with pytest.raises(thinwire.InvalidArgumentError, match=r"AdamW.*torch\.optim\.SGD"):
        Wrapped(torch.optim.AdamW(model.parameters()), model, delay=1)
    sgd = torch.optim.SGD(model.parameters(), **SGD)
    with pytest.raises(thinwire.InvalidArgumentError, match="delay is 2, expected 0 or 1"):
        Wrapped(sgd, model, delay=2)
    optimizer = Wrapped(sgd, model, codec="fp32", delay=1)
    loss_of(model, data(0, rank)).backward()
    with pytest.raises(thinwire.InvalidArgumentError, match="delay=1"):
        optimizer.clip_grad_norm_(1.0)
    hook = sgd.register_step_post_hook(lambda *_: None)
    with pytest.raises(thinwire.InvalidArgumentError, match="step hooks, and with delay=1"):
        optimizer.step()
    hook.remove()
    optimizer.step()
    with pytest.raises(thinwire.InvalidArgumentError, match="no_sync"):  # of the first rank
        loss_of(model, data(1, rank)).backward()
        loss_of(model, data(1, rank)).backward()
    dist.barrier()  # the work in flight ends when the first rank leaves
    with contextlib.suppress(thinwire.InvalidArgumentError):  # pending work fails alike
        optimizer.close()


def test_what_it_can_not_do_is_said():
    run(refusals)
