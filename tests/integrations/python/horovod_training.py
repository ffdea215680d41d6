"""Checks of thinwire.horovod's optimizer and of its broadcasts of state: functions that
test_horovod.py calls on both of two ranks, after init()."""

from __future__ import annotations

import copy
import functools
from typing import Any

import thinwire
import thinwire.horovod as hvd
import torch
from horovod_collectives import equal, raises
from thinwire.torch import check_replicas, compress

RANKS = 2


# The optimizer.


def net(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300), torch.nn.Tanh(),
        torch.nn.Linear(300, 1),
    )  # fmt: skip


def backward(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    return loss


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrapped(model: torch.nn.Module, inner: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        inner or sgd(model), named_parameters=model.named_parameters(), **options
    )


def trained(
    model: torch.nn.Module, optimizer: Any, rank: int, steps: Any = range(6)
) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    return weights(model)


INT4 = hvd.Compression.thinwire("int4", min_bytes=0)


def check_ranks_that_differ_in_the_first_step(rank: int) -> None:
    """All ranks get the error, whichever of them is behind, and a later optimizer works."""
    for differs, words in (
        (lambda model: wrapped(model, backward_passes_per_step=1 + rank),
         "rank 1: DistributedOptimizer got backward_passes_per_step=2, expected 1 as on rank 0"),
        (lambda model: hvd.DistributedOptimizer(
            sgd(model), [(f"{rank}.{name}", p) for name, p in model.named_parameters()]),
         r"named_parameters\[0\]='1.0.weight' of shape \(300, 64\), expected '0.0.weight' of"),
    ):  # fmt: skip
        model = net()
        raises(thinwire.MismatchError, words, trained, model, differs(model), rank)
    for waits in (0, 1):
        model = net()
        optimizer = wrapped(model)
        words = "rank 1 called .*, expected .* as on rank 0; make these calls"
        if rank == waits:
            raises(thinwire.MismatchError, words, hvd.broadcast_parameters, [torch.ones(1)], 0)
        else:
            raises(thinwire.MismatchError, words, trained, model, optimizer, rank)
            raises(thinwire.MismatchError, words, optimizer.step)
    model = net()
    first, second = hvd.allgather(trained(model, wrapped(model), rank)[None])
    assert equal(first, second)


def check_weights_are_those_of_thinwires_optimizer(rank: int) -> None:
    model, other = net(), net()
    theirs = sgd(other)
    compress(other, "int4", optimizer=theirs, policy="wfbp", min_bytes=0)
    expected = trained(other, theirs, rank)
    optimizer = wrapped(model, compression=INT4)
    assert equal(trained(model, optimizer, rank), expected)
    assert optimizer.exchange.stats()["ratio"] > 7
    check_replicas(model)


def check_exact_weights_are_a_single_process(rank: int) -> None:
    alone, model = net(), net()
    inner = sgd(alone)
    for step in range(4):
        inner.zero_grad()
        for other in range(RANKS):
            backward(alone, other, step)
        for p in alone.parameters():
            p.grad /= RANKS
        inner.step()
    assert torch.allclose(trained(model, wrapped(model), rank, range(4)), weights(alone), atol=1e-6)


def check_sum_is_twice_the_mean(rank: int) -> None:
    models = net(), net()
    for model, op in zip(models, (hvd.Average, hvd.Sum), strict=True):
        optimizer = wrapped(model, op=op)
        backward(model, rank, 0)
        optimizer.synchronize()
    for mean, total in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert equal(total.grad, 2 * mean.grad)


def check_predividing_changes_nothing(rank: int) -> None:
    """Horovod divides by a part of the count before the sum, against overflow; sums are fp32
    here."""
    models = net(), net()
    divided = wrapped(models[0], compression=INT4, gradient_predivide_factor=2.0)
    plain = wrapped(models[1], compression=INT4)
    expected = trained(models[1], plain, rank, range(2))
    assert equal(trained(models[0], divided, rank, range(2)), expected)


def check_the_class_of_the_wrapped_optimizer(_: int) -> None:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrapped(model, inner)
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.05


def check_several_backward_passes(rank: int) -> None:
    model, other = net(), net()
    optimizer, expected = wrapped(model, backward_passes_per_step=2), wrapped(other)
    for step in range(3):
        for half in range(2):
            backward(model, rank, 2 * step + half)
        optimizer.step()
        optimizer.zero_grad()
        total = backward_twice(other, rank, step)
        total.backward()
        expected.step()
        expected.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-6)


def backward_twice(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    losses = []
    for half in range(2):
        generator = torch.Generator().manual_seed(10 * (2 * step + half) + rank)
        x = torch.randn(16, 64, generator=generator)
        losses.append((model(x) - x[:, :1]).square().mean())
    return sum(losses)


def check_synchronize_and_skip(rank: int) -> None:
    model, other = net(), net()
    optimizer, plain = wrapped(model, compression=INT4), wrapped(other, compression=INT4)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = [p.grad.clone() for p in model.parameters()]
        optimizer.synchronize()  # the second call does nothing
        assert all(equal(p.grad, g) for p, g in zip(model.parameters(), clipped, strict=True))
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        backward(other, rank, step)
        plain.synchronize()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        plain.step()  # without skip_synchronize the result is the same
    assert equal(weights(model), weights(other))
    check_replicas(model)
    backward(model, rank, 9)
    with optimizer.skip_synchronize():
        raises(thinwire.InvalidArgumentError, "call synchronize", optimizer.step)
    raises(thinwire.InvalidArgumentError, "between backward", optimizer.zero_grad)
    optimizer.step()


def check_a_step_that_a_loss_scaler_leaves_out(rank: int) -> None:
    model, other = net(), net()
    optimizer = wrapped(model, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    kept = weights(model)
    for infinite in (True, False):
        optimizer.zero_grad()
        for half in range(2 if infinite else 1):  # the next step has fewer passes
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(half + 7 * rank))
            loss = (model(x) - x[:, :1]).square().mean()
            scaler.scale(loss * (torch.inf if infinite and rank == 0 else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), kept) == infinite
    check_replicas(model)
    assert not torch.equal(weights(model), weights(other))


def check_missing_gradients_and_frozen_parameters(rank: int) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = wrapped(model)
    if rank == 0:  # no backward pass at all on rank 1, which counts as zeros
        backward(model, 0, 0)
    optimizer.step()
    assert model[0].weight.grad is None
    check_replicas(model)
    head = net()
    optimizer = wrapped(head, torch.optim.SGD(head[4].parameters(), lr=0.1))  # a part of the model
    trained(head, optimizer, rank, range(2))
    check_replicas(head)


def check_sparse_gradients(rank: int) -> None:
    for dense in (True, False):
        torch.manual_seed(3)
        embedding = torch.nn.Embedding(10, 4, sparse=True)
        inner = torch.optim.SGD(embedding.parameters(), lr=1.0)
        optimizer = wrapped(embedding, inner, sparse_as_dense=dense)
        before = embedding.weight.detach().clone()
        loss = embedding(torch.tensor([rank, 5])).sum()
        if dense:
            loss.backward()
            optimizer.step()
            change = (before - embedding.weight.detach()).sum(1)
            assert torch.allclose(
                change[[0, 1, 5, 6]], torch.tensor([2.0, 2.0, 4.0, 0.0]), atol=1e-5
            )
        else:
            raises(thinwire.InvalidArgumentError, "sparse_as_dense=True", loss.backward)


def check_too_many_backward_passes(rank: int) -> None:
    """Every rank gets the error, in its second pass or before."""
    model = net()
    optimizer = wrapped(model)
    call = functools.partial(trained, model, optimizer, rank, range(2))
    optimizer.step = lambda: None  # the program forgets it
    optimizer.zero_grad = lambda: None
    raises(thinwire.InvalidArgumentError, "made 2 times .* raise backward_passes_per_step", call)


def check_momentum_of_the_exchange(rank: int) -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    onebit = hvd.Compression.thinwire("onebit", momentum=0.9, min_bytes=0)
    optimizer = wrapped(model, inner, compression=onebit)
    first = backward(model, rank, 0).item()
    optimizer.step()
    assert inner.param_groups[0]["momentum"] == 0  # the exchange owns the momentum
    trained(model, optimizer, rank, range(1, 40))
    assert backward(model, rank, 0).item() < 0.7 * first
    check_replicas(model)


def check_wrong_uses_of_the_optimizer(_: int) -> None:
    model = net()
    wrong = thinwire.InvalidArgumentError
    for words, options in (
        ("Average or Sum", {"op": hvd.Min}),
        ("factor above 0, and 1", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("no name for 6", {"named_parameters": []}),
        ("one parameter each", {"named_parameters": [("a", p) for p in model.parameters()]}),
        (
            "matches no parameter",
            {"compression": hvd.Compression.thinwire({"x": "int8", "*": "int4"})},
        ),
    ):
        raises(wrong, words, hvd.DistributedOptimizer, sgd(model), **options)
    raises(thinwire.UnavailableError, "use op=Average", wrapped, model, op=hvd.Adasum)
    raises(wrong, "not wrapped already", hvd.DistributedOptimizer, wrapped(model))
    raises(wrong, "none after wrapping", wrapped(model).add_param_group, {"params": []})


# State from one rank to all.


def check_broadcasts_of_state(rank: int) -> None:
    model = net(seed=1 + rank)
    inner = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        backward(model, 0, 0)
        inner.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    check_replicas(model)
    assert inner.param_groups[0]["lr"] == 0.1
    moments = [inner.state[p]["exp_avg"] for p in model.parameters()]
    assert torch.cat([m.flatten() for m in moments]).norm() > 0
    assert all(equal(hvd.broadcast(m, 0), m) for m in moments)
    hvd.broadcast_parameters(net(seed=rank).named_parameters(), root_rank=1)
    listed = [torch.full((2,), float(rank)), torch.tensor(rank)]
    hvd.broadcast_parameters(listed, root_rank=1)
    assert [t.tolist() for t in listed] == [[1.0, 1.0], 1]


def check_a_resumed_run_has_the_same_bits(rank: int) -> None:
    """Only rank 0 saves and loads, as in Horovod's programs."""
    model = net()
    optimizer = wrapped(model, compression=INT4)
    trained(model, optimizer, rank, range(3))
    saved = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.gathered_state_dict()}
    )
    expected = trained(model, optimizer, rank, range(3, 6))
    for collective in (True, False):
        again = net(seed=5 + rank)
        inner = sgd(again)
        resumed = wrapped(again, inner, compression=INT4)
        if rank == 0:
            again.load_state_dict(saved["model"])
            kept = (
                {**saved["optimizer"]} if collective else {**saved["optimizer"], "thinwire": None}
            )
            resumed.load_state_dict(kept)
        hvd.broadcast_parameters(again.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        found = trained(again, resumed, rank, range(3, 6))
        assert torch.equal(found, expected) == collective
        assert "thinwire" not in resumed.state_dict()
        check_replicas(again)
