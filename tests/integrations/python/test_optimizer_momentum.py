"""Plain modules whose compression owns the momentum, which onebit and sparse topk need."""

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from policies import POLICIES, Wrapped, make_sgd
from ranks import run
from thinwire.torch import State


def owning(model, codec: str, policy: str = "p3", nesterov: bool = False, **options):
    sgd = make_sgd(model, nesterov=nesterov, **options)
    return Wrapped(
        sgd, model, codec=codec, policy=policy, momentum=0.9, nesterov=nesterov, min_bytes=0
    )


def train(model, optimizer, rank: int, steps: int, start: int = 0) -> float:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, data(step, rank))
        loss.backward()
        optimizer.step()
    return loss.item()


def trained(rank: int, codec: str, policy: str, nesterov: bool):
    model = make_mlp(seed=rank)  # all ranks get rank 0's
    optimizer = owning(model, codec, policy, nesterov, weight_decay=0.01)
    loss = train(model, optimizer, rank, 150)
    optimizer.finish()
    return digest(model), loss


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("codec", ["onebit", "topk:density=0.02"])
def test_every_policy_gives_the_same_weights(codec, nesterov):
    found = [one for policy in POLICIES for one in run(trained, codec, policy, nesterov)]
    assert len({digest for digest, _ in found}) == 1
    plain = run(trained, "fp32", "p3", nesterov)[0][1]
    assert found[0][1] == pytest.approx(plain, rel=1.0)  # the first loss is several times as large


def as_sgd(rank: int, policy: str, nesterov: bool):
    """Uncompressed, it is the optimizer's own recursion, apart from the order of rounding."""
    options = {"nesterov": nesterov, "weight_decay": 0.01}
    model, expected = make_mlp(), make_mlp()
    optimizer = owning(model, "fp32", policy, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.inner, 10, 0.5)
    sgd = make_sgd(expected, **options)
    for step in range(20):
        train(model, optimizer, rank, 1, step)
        schedule.step()
        sgd.zero_grad()
        for peer in range(2):
            (loss_of(expected, data(step, peer)) / 2).backward()
        sgd.step()
        if step % 10 == 9:
            sgd.param_groups[0]["lr"] *= 0.5
    optimizer.finish()
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_momentum_of_sgd(policy, nesterov):
    run(as_sgd, policy, nesterov)


def resumed(rank: int, stop: int):
    model = make_mlp()
    optimizer = owning(model, "onebit", weight_decay=0.01)
    train(model, optimizer, rank, stop)
    saved = optimizer.state_dict(), model.state_dict()
    optimizer.close()
    model = make_mlp(seed=3)
    optimizer = owning(model, "onebit")
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    train(model, optimizer, rank, 8 - stop, stop)
    optimizer.finish()
    return digest(model)


def test_a_resumed_run_goes_on_bit_by_bit():
    digests = [run(resumed, stop) for stop in (3, 5)]
    assert len({value for ranks in digests for value in ranks}) == 1


def half_way(rank: int, loads: bool):
    """The compression takes over an optimizer's buffers: those it holds, or of its state_dict."""
    model = make_mlp()
    sgd = make_sgd(model, weight_decay=0.01)
    train(model, sgd, 0, 5)  # same batches on both ranks
    if loads:
        saved = sgd.state_dict()
        optimizer = owning(model, "fp32")
        optimizer.inner.load_state_dict(saved)
    else:
        optimizer = Wrapped(sgd, model, codec="fp32", momentum=0.9, min_bytes=0)
    train(model, optimizer, 0, 5, start=5)
    optimizer.finish()
    expected = make_mlp()
    train(expected, make_sgd(expected, weight_decay=0.01), 0, 10)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loads", [False, True])
def test_buffers_that_exist_move_along(loads):
    run(half_way, loads)


def moved_twice(rank: int):
    """A second owner finds the weight decay in the state that its optimizer has loaded."""
    model = make_mlp()
    first = make_sgd(model, weight_decay=0.01)
    State("onebit", momentum=0.9).take_momentum(first)
    sgd = make_sgd(model)
    sgd.load_state_dict(first.state_dict())
    Wrapped(sgd, model, codec="onebit", momentum=0.9)
    return sgd.param_groups[0]["thinwire_weight_decay"]


def test_a_second_owner_keeps_the_weight_decay():
    assert run(moved_twice) == [0.01, 0.01]


def refused(rank: int):
    model = make_mlp()
    with pytest.raises(thinwire.InvalidArgumentError, match="Pass optimizer="):
        Wrapped(make_sgd(model), model, codec="onebit")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"has momentum=0\.9"):
        Wrapped(make_sgd(model), model, codec="onebit", momentum=0.8)
    with pytest.raises(thinwire.InvalidArgumentError, match="warm_up_steps"):
        adam = torch.optim.Adam(model.parameters())
        Wrapped(adam, model, codec="onebit", momentum=0.9)
    with pytest.raises(thinwire.InvalidArgumentError, match="delay=1"):
        Wrapped(make_sgd(model), model, codec="onebit", momentum=0.9, delay=1)
    optimizer = owning(model, "onebit")
    loss_of(model, data(0, rank)).backward()
    with pytest.raises(thinwire.InvalidArgumentError, match="means are momentum"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    loss_of(model, data(1, rank)).backward()
    with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum=0\.9 again"):
        optimizer.step()
    dist.barrier()  # the other rank may be in its backward pass


def test_what_does_not_go_together_is_refused():
    run(refused)
