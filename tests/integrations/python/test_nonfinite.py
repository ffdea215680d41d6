"""One rank has a NaN in one step, and the exchange owns the momentum. If that step is skipped, or
its weights are restored, training continues as if it had not been made, with identical replicas."""

import copy

import pytest
import torch
from models import data, digest, gradients, make_mlp, wrap
from policies import Wrapped
from ranks import run

STEPS, BAD_STEP = 7, 3


def backward(forward, optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    x = data(step, rank)
    loss = (forward(x) - torch.sin(x[:, :10])).square().mean()
    if (rank, step) == (1, BAD_STEP):
        loss = loss * float("nan")
    loss.backward()


def train_skipping(ddp, optimizer, rank: int) -> list:
    """Skip steps whose gradients are not finite, like a loss scaler. Return for every step the
    digest of the weights, and whether it was made."""
    seen = []
    for step in range(STEPS):
        backward(ddp, optimizer, rank, step)
        finite = bool(gradients(ddp).isfinite().all())
        if finite:
            optimizer.step()
        seen.append((digest(ddp), finite))
    return seen


def train_restoring(model, optimizer, rank: int) -> list:
    """Make every step, and restore the weights before it if the new ones are not finite."""
    seen = []
    for step in range(STEPS):
        before = copy.deepcopy(model.state_dict())
        backward(model, optimizer, rank, step)
        optimizer.step()
        optimizer.finish()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        if not finite:
            model.load_state_dict(before)
        seen.append((digest(model), finite))
    return seen


def check(ranks: list) -> None:
    first, second = ranks
    assert first == second, "replicas differ"
    digests, finite = zip(*first, strict=True)
    assert finite == tuple(step != BAD_STEP for step in range(STEPS))
    assert len(set(digests)) == STEPS - 1, "a step but the one left out changed nothing"


def with_state(rank: int, codec: str, nesterov: bool):
    ddp, state = wrap(make_mlp(), codec, momentum=0.9, nesterov=nesterov)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov)
    state.take_momentum(optimizer)
    return train_skipping(ddp, optimizer, rank)


@pytest.mark.parametrize(
    ("codec", "nesterov"),
    [
        ("fp32", False),
        ("int4", False),
        ("onebit", False),
        ("onebit", True),
        ("topk:density=0.02", False),
    ],
)
def test_a_nan_leaves_the_states_momentum_alone(codec, nesterov):
    check(run(with_state, codec, nesterov))


def with_optimizer(rank: int, codec: str, policy: str):
    model = make_mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = Wrapped(sgd, model, codec=codec, policy=policy, momentum=0.9, min_bytes=0)
    return train_restoring(model, optimizer, rank)


@pytest.mark.parametrize(
    ("codec", "policy"),
    [("int4", "p3"), ("onebit", "p3"), ("onebit", "wfbp"), ("topk:density=0.02", "fifo")],
)
def test_a_nan_leaves_the_distributed_optimizers_momentum_alone(codec, policy):
    check(run(with_optimizer, codec, policy))


def with_adam(rank: int, warmup_steps: int):
    model = make_mlp()
    # After a few steps some variances are small; eps compensates.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    ddp, _ = wrap(model, "onebit", optimizer=optimizer, warm_up_steps=warmup_steps)
    return train_skipping(ddp, optimizer, rank)


# In the warm-up, in its last step, just after it, and later.
@pytest.mark.parametrize("warmup_steps", [BAD_STEP + 2, BAD_STEP + 1, BAD_STEP, BAD_STEP - 2])
def test_a_nan_leaves_onebit_adams_momentum_alone(warmup_steps):
    check(run(with_adam, warmup_steps))
