"""Plain modules with an optimizer: training loops beyond plain steps, and refusals."""

import contextlib
import copy

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from policies import POLICIES, close_to, make_sgd, train, wrapped
from ranks import outcomes_of, run


def clipped(rank: int, policy: str):
    model = make_mlp()
    optimizer = wrapped(model, policy)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        if policy == "p3":
            with pytest.warns(UserWarning, match="waits for them"):
                norm = optimizer.clip_grad_norm_(0.05)
        else:
            norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    expected = make_mlp()
    inner = make_sgd(expected)
    for step in range(5):
        inner.zero_grad()
        for r in range(2):
            (loss_of(expected, data(step, r)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        inner.step()
    close_to(model, expected)
    return digest(model), norm.item()


def test_clipping_by_norm_waits_for_all():
    results = [run(clipped, policy) for policy in POLICIES]
    assert len({rank for ranks in results for rank in ranks}) == 1


def clipped_too_early(rank: int):
    model = make_mlp()
    optimizer = wrapped(model)
    loss_of(model, data(0, rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"call synchronize\(\) of what"):
        optimizer.step()
    dist.barrier()  # the group fails when the first rank leaves


def test_gradients_changed_after_they_were_sent_are_an_error():
    run(clipped_too_early)


def scaled(rank: int):
    model = make_mlp()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, data(step, rank))
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer.inner)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.finish()
    return digest(model), scales


def test_a_loss_scaler_skips_the_step_on_all():
    first, second = run(scaled)
    assert first == second
    assert first[1] == [256, 128, 128, 128]


def scaled_without_means(rank: int, policy: str, fused: bool):
    """Each rank would unscale its own gradients, but not the means of those already sent."""
    model = make_mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    compression = thinwire.torch.compress(model, "fp32", optimizer=sgd, policy=policy)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, data(0, rank))).backward()
    with pytest.raises(thinwire.InvalidArgumentError, match=r"call synchronize\(\)"):
        scaler.step(sgd)
    dist.barrier()  # the other rank may be in its backward pass
    compression.close()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["p3", "wfbp"])
def test_a_loss_scaler_without_synchronize_is_an_error(policy, fused):
    run(scaled_without_means, policy, fused)


def resumed(rank: int, stop: int):
    """Make eight steps. After `stop` of them build everything again from what was saved."""
    model = make_mlp()
    optimizer = wrapped(model, codec="int4")
    train(model, optimizer, stop, rank)
    saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    saved = copy.deepcopy(saved)
    optimizer.close()
    model = make_mlp(seed=99)
    optimizer = wrapped(model, codec="int4")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 8 - stop, rank, stop)
    optimizer.finish()
    return digest(model)


def test_a_resumed_run_goes_on_bit_by_bit():
    digests = [run(resumed, stop) for stop in (3, 5)]
    assert len({value for ranks in digests for value in ranks}) == 1


def saved_between(rank: int):
    """Call model.state_dict() right after step(), while the step is still in progress."""
    model = make_mlp()
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.finish()
    return all(torch.equal(saved[name], p) for name, p in model.named_parameters())


def test_a_models_state_dict_has_the_whole_step():
    assert run(saved_between) == [True, True]


def backward_twice(rank: int, on: set[int]):
    """Ranks in `on` run backward twice. The others learn of it when they wait for the next step."""
    model = make_mlp()
    optimizer = wrapped(model)
    match = rf"rank {min(on)}.*no_sync\(\).*leave out a step on all ranks, call synchronize\(\)"
    with pytest.raises(thinwire.InvalidArgumentError, match=match):
        for step in range(3):
            loss_of(model, data(step, rank)).backward()
            if rank in on:
                loss_of(model, data(9, rank)).backward()
            optimizer.step()
            optimizer.finish()
    dist.barrier()
    with contextlib.suppress(thinwire.InvalidArgumentError):  # pending work fails alike
        optimizer.close()


@pytest.mark.parametrize("on", [{0}, {1}])
def test_two_backward_passes_without_no_sync_are_an_error_on_every_rank(on):
    run(backward_twice, on)


def left_out(rank: int, policy: str):
    """Make no step with the gradients of one backward pass, on all ranks."""
    model, expected = make_mlp(), make_mlp()
    optimizer, sgd = wrapped(model, policy), make_sgd(expected)
    for step in range(4):
        optimizer.zero_grad()
        sgd.zero_grad()
        loss_of(model, data(step, rank)).backward()
        if step == 2:
            optimizer.synchronize()
            continue
        optimizer.step()
        for peer in range(2):
            (loss_of(expected, data(step, peer)) / 2).backward()
        sgd.step()
    optimizer.finish()
    close_to(model, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_may_be_left_out_after_synchronize(policy):
    run(left_out, policy)


def penalty_of(model: torch.nn.Module) -> torch.Tensor:
    return 1e-3 * sum(p.square().sum() for p in model.parameters())


def penalty_before_forward(rank: int, finishes: bool):
    """The penalty's gradients are computed before the forward pass, with the finished step's
    weights."""
    model, expected = make_mlp(), make_mlp()
    sgd = make_sgd(expected)
    optimizer = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        sgd.zero_grad()
        if finishes:
            optimizer.finish()
        with optimizer.no_sync():
            penalty_of(model).backward()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()
        for peer in range(2):
            ((loss_of(expected, data(step, peer)) + penalty_of(expected)) / 2).backward()
        sgd.step()
    optimizer.finish()
    close_to(model, expected)


def test_gradients_of_parameters_that_lack_their_last_step_are_an_error():
    for outcome in outcomes_of(penalty_before_forward, False):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "call finish() after step()" in outcome.message
    run(penalty_before_forward, True)


def made_anew(rank: int):
    """Make a new optimizer half-way on the same model, with a layer that is unfrozen then."""
    model = make_mlp()
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank)
    before = model[0].weight.clone()
    optimizer.close()
    model[0].requires_grad_(True)
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank, start=3)
    optimizer.finish()
    return digest(model), torch.equal(before, model[0].weight)


def test_a_closed_optimizer_lets_its_model_go():
    first, second = run(made_anew)
    assert first == second
    assert not first[1]


def one_rank_stops(rank: int):
    model = make_mlp()
    optimizer = wrapped(model, timeout_s=100)
    for step in range(10):
        if rank == 1 and step == 3:
            return
        train(model, optimizer, 1, rank, step)


def test_a_lost_rank_is_a_typed_error():
    outcomes = outcomes_of(one_rank_stops)
    assert outcomes[0].error == "PeerLostError", outcomes[0].trace
    assert "rank 1" in outcomes[0].message


class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


def coupled(rank: int):
    model = make_mlp()
    inner = Coupled(model.parameters(), lr=0.1)
    inner.param_groups[0]["seen"] = 0
    optimizer = wrapped(model, optimizer=inner)
    with pytest.raises(thinwire.InvalidArgumentError, match="policy='wfbp'"):
        train(model, optimizer, 2, rank)
    dist.barrier()


def test_what_couples_parameters_is_refused():
    run(coupled)


def refused(rank: int):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    model = make_mlp()
    with pytest.raises(thinwire.InvalidArgumentError, match="LBFGS"):
        wrapped(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"ZeroRedundancy.*policy='wfbp'"):
        wrapped(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1))
    with pytest.raises(thinwire.InvalidArgumentError, match="policy is 'best'"):
        wrapped(model, policy="best")
    with pytest.raises(thinwire.InvalidArgumentError, match="the model has not"):
        wrapped(model, optimizer=torch.optim.SGD(make_mlp().parameters(), lr=0.1))


def test_wrong_arguments_are_typed_errors():
    run(refused)
