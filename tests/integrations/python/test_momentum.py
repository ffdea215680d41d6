"""Momentum that the state owns: training is the same as with the optimizer's own, and where it
cannot be there are typed errors."""

import pytest
import thinwire
import thinwire.torch as tw
import torch
from models import data, digest, make_mlp, wrap
from ranks import outcomes_of, run
from thinwire.torch import State
from torch.nn.parallel import DistributedDataParallel


def fit(ddp, optimizer, steps: int, start: int = 0, schedule=None, change=None) -> float:
    loss = torch.zeros(())
    for step in range(start, start + steps):
        x = data(step, torch.distributed.get_rank())
        out = ddp(x)
        optimizer.zero_grad()
        loss = (out - torch.sin(x[:, : out.shape[1]])).square().mean()
        loss.backward()
        if change is not None:
            change(ddp)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return loss.item()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(ddp, **options) -> torch.optim.SGD:
    return torch.optim.SGD(ddp.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def train_with_sgd(rank: int, codec: str | None, nesterov: bool, decay: float, min_bytes: int):
    model = make_mlp()
    options = {"momentum": 0.9, "nesterov": nesterov} if codec else {}
    ddp, state = wrap(model, codec, **options, **({"min_bytes": min_bytes} if codec else {}))
    optimizer = sgd(ddp, nesterov=nesterov, weight_decay=decay)
    if state is not None:
        state.take_momentum(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    fit(ddp, optimizer, 30, schedule=schedule)
    return weights(model), digest(model)


# Uncompressed, it is the optimizer's own recursion, apart from the order of rounding.
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("min_bytes", [0, 1 << 22])
def test_moved_momentum_is_that_of_sgd(nesterov, decay, min_bytes):
    plain = run(train_with_sgd, None, nesterov, decay, 0)[0][0]
    ours = run(train_with_sgd, "fp32", nesterov, decay, min_bytes)
    torch.testing.assert_close(ours[0][0], plain, rtol=1e-4, atol=1e-5)
    assert ours[0][1] == ours[1][1]


def loss_of(rank: int, codec: str | None):
    model = make_mlp()
    ddp, state = wrap(model, codec, **({"momentum": 0.9} if codec else {}))
    optimizer = sgd(ddp)
    if state is not None:
        state.take_momentum(optimizer)
    loss = fit(ddp, optimizer, 150)
    return loss, digest(model), None if state is None else state.stats()["ratio"]


# There are few steps, so late delivery matters. The loss begins at three times plain DDP's last
# loss.
@pytest.mark.parametrize(
    ("codec", "ratio", "rel"),
    [("onebit", 12, 0.3), ("onebit:down=onebit", 29, 0.3), ("topk:density=0.02", 40, 1.0)],
)
def test_strong_compression_trains_nearly_as_plain_does(codec, ratio, rel):
    plain = run(loss_of, None)[0][0]
    (loss, first, reached), (_, second, _) = run(loss_of, codec)
    assert first == second
    assert reached > ratio
    assert loss == pytest.approx(plain, rel=rel)


def move_half_way(rank: int, codec: str | None):
    """The optimizer first trains alone. The state takes over its buffers."""
    model = make_mlp()
    ddp, _ = wrap(model, None)
    optimizer = sgd(ddp)
    fit(ddp, optimizer, 5)
    if codec is not None:
        ddp, state = wrap(model, codec, momentum=0.9)
        state.take_momentum(optimizer)
    fit(ddp, optimizer, 5, start=5)
    return weights(model)


def test_buffers_that_exist_move_along():
    plain, ours = run(move_half_way, None)[0], run(move_half_way, "fp32")[0]
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def resume(rank: int, codec: str, pause: bool):
    def make(seed: int):
        model = make_mlp(seed=seed)
        ddp, state = wrap(model, codec, momentum=0.9, find_unused_parameters=True)
        optimizer = sgd(ddp)
        state.take_momentum(optimizer)
        return model, ddp, state, optimizer

    model, ddp, state, optimizer = make(7)
    fit(ddp, optimizer, 6)
    if pause:
        saved = state.state_dict(), model.state_dict()
        state.close()
        model, ddp, state, optimizer = make(99)
        state.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
    fit(ddp, optimizer, 4, start=6)
    return digest(model)


@pytest.mark.parametrize(
    "codec", ["onebit", "topk:density=0.02,warmup=8", "int8:rounding=stochastic"]
)
def test_resuming_is_bitwise_never_having_stopped(codec):
    assert run(resume, codec, True) == run(resume, codec, False)


def clip(rank: int, how: str):
    model = make_mlp()
    ddp, state = wrap(model, "onebit", momentum=0.9)
    optimizer = sgd(ddp)
    state.take_momentum(optimizer)
    norm, value = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
    change = {
        "norm": lambda ddp: norm(ddp.parameters(), 1e-3),
        "value": lambda ddp: value(ddp.parameters(), 1e-4),
        "neither": lambda ddp: norm(ddp.parameters(), 1e9),
    }[how]
    fit(ddp, optimizer, 3, change=change)


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping_the_momentum_is_an_error(how):
    for outcome in outcomes_of(clip, how):
        assert outcome.error == "InvalidArgumentError"
        assert "clip_value= or clip_norm=" in outcome.message


def test_clipping_that_changes_nothing_is_none():
    run(clip, "neither")


def train_clipped(rank: int, ours: bool):
    model = make_mlp()
    ddp, _ = wrap(model, "fp32" if ours else None, **({"clip_value": 0.01} if ours else {}))
    x = data(0, 0)  # same batches on both ranks, so clipping before the mean and after it agree
    ddp(x).square().sum().backward()
    if not ours:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_clip_value_is_that_of_torch():
    torch.testing.assert_close(run(train_clipped, True)[0], run(train_clipped, False)[0])


def step_with_norms_clipped(rank: int):
    model = make_mlp()
    ddp, _ = wrap(model, "fp32", clip_norm=0.5)
    ddp(data(0, 0)).square().sum().backward()  # same batches on both ranks
    return [p.grad.norm().item() for p in model.parameters()]


def test_clip_norm_limits_each_parameter():
    norms = run(step_with_norms_clipped)[0]
    assert max(norms) == pytest.approx(0.5 / 2**0.5, rel=1e-4)


def alone(rank: int):
    model = make_mlp()
    ddp, state = wrap(model, "onebit", momentum=0.9)
    optimizer = sgd(ddp)
    state.take_momentum(optimizer)
    fit(ddp, optimizer, 10)
    other = make_mlp()
    plain, _ = wrap(other, None)
    fit(plain, sgd(plain), 10)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-5)


def test_a_world_of_one_has_plain_momentum():
    run(alone, world=1)


def misuse(rank: int):
    model = make_mlp()
    for codec in ("onebit", "int8:down=onebit", {"*.bias": "fp32", "*": "onebit"}):
        with pytest.raises(thinwire.InvalidArgumentError, match="diverges"):
            wrap(model, codec)
    with pytest.warns(UserWarning, match="DGC"):
        wrap(make_mlp(), "topk:density=0.001")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum is 1\.5"):
        State("onebit", momentum=1.5)
    with pytest.raises(thinwire.InvalidArgumentError, match="clip_value is -1"):
        State("int4", clip_value=-1)
    _, state = wrap(make_mlp(), "onebit", momentum=0.9)
    wrong = [
        (torch.optim.SGD(model.parameters(), momentum=0.8), "momentum=0.8, expected 0.9"),
        (torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.1), "dampening=0.1"),
        (torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True), "nesterov=True"),
        (torch.optim.Adam(model.parameters()), "warm_up_steps"),
    ]
    for optimizer, words in wrong:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            state.take_momentum(optimizer)
    with pytest.raises(thinwire.InvalidArgumentError, match="owns no momentum"):
        State("int4").take_momentum(wrong[0][0])
    with pytest.raises(thinwire.InvalidArgumentError, match="expected betas"):
        adam = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.999))
        State("onebit", momentum=0.9, warm_up_steps=3).take_momentum(adam)


def test_wrong_pairings_are_refused():
    run(misuse)


def one_optimizer_of_two_models(rank: int):
    """The momentum would move into one exchange, and the other model would train without it."""
    models = [DistributedDataParallel(make_mlp(seed=seed)) for seed in (1, 2)]
    both = [p for model in models for p in model.parameters()]
    for codec in ("onebit", "topk:density=0.01"):
        optimizer = torch.optim.SGD(both, lr=0.05, momentum=0.9)
        with pytest.raises(thinwire.InvalidArgumentError, match="one optimizer for each model"):
            tw.compress(models[0], codec, optimizer=optimizer)
        assert optimizer.param_groups[0]["momentum"] == 0.9
    adam = torch.optim.AdamW(both)
    with pytest.raises(thinwire.InvalidArgumentError, match="one optimizer for each model"):
        tw.compress(models[0], "onebit", optimizer=adam, warm_up_steps=2)
    tw.compress(models[0], "int4", optimizer=torch.optim.SGD(both, momentum=0.9))


def test_one_optimizer_of_two_models_keeps_its_momentum():
    run(one_optimizer_of_two_models)


def an_optimizer_that_was_paired(rank: int):
    """Its momentum has moved already, and the next codec would train without it."""
    for codec in ("onebit", "topk:density=0.01", "int4"):
        model = make_mlp()
        optimizer = sgd(model)
        first = tw.compress(DistributedDataParallel(model), "onebit", optimizer=optimizer)
        first.close()
        with pytest.raises(thinwire.InvalidArgumentError, match="make a new optimizer"):
            tw.compress(DistributedDataParallel(model), codec, optimizer=optimizer)
        loaded = sgd(model)
        loaded.load_state_dict(optimizer.state_dict())
        with pytest.raises(thinwire.InvalidArgumentError, match="make a new optimizer"):
            tw.compress(DistributedDataParallel(model), codec, optimizer=loaded)
    adam = torch.optim.AdamW(model.parameters())
    options = {"optimizer": adam, "warm_up_steps": 1}
    tw.compress(DistributedDataParallel(model), "onebit", **options).close()
    with pytest.raises(thinwire.InvalidArgumentError, match="make a new optimizer"):
        tw.compress(DistributedDataParallel(model), "onebit", **options)


def test_an_optimizer_that_was_paired_is_not_paired_again():
    run(an_optimizer_that_was_paired)


def without_pairing(rank: int):
    ddp, _ = wrap(make_mlp(), "onebit", momentum=0.9)
    fit(ddp, sgd(ddp), 1)


def with_momentum_again(rank: int):
    ddp, state = wrap(make_mlp(), "onebit", momentum=0.9)
    optimizer = sgd(ddp)
    state.take_momentum(optimizer)
    fit(ddp, optimizer, 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    fit(ddp, optimizer, 1)


def with_cycled_momentum(rank: int):
    ddp, state = wrap(make_mlp(), "onebit", momentum=0.9)
    optimizer = sgd(ddp)
    state.take_momentum(optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    fit(ddp, optimizer, 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (without_pairing, "take_momentum"),
        (with_momentum_again, "expected 0"),
        (with_cycled_momentum, "cycle_momentum=False"),
    ],
)
def test_an_optimizer_with_momentum_beside_the_states_is_an_error(body, words):
    for outcome in outcomes_of(body):
        assert outcome.error == "InvalidArgumentError"
        assert words in outcome.message


def adam(rank: int, codec, steps: int):
    model = make_mlp()
    if codec is None:
        ddp, _ = wrap(model, None)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        ddp, _ = wrap(model, codec, optimizer=optimizer, warm_up_steps=40)
    loss = fit(ddp, optimizer, steps)
    return loss, weights(model), digest(model)


def test_onebit_adam_is_adamw_during_its_warm_up():
    plain, ours = run(adam, None, 40)[0][1], run(adam, "onebit", 40)[0][1]
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["onebit", {"*.bias": "fp32", "*": "onebit"}])
def test_onebit_adam_trains_as_adamw_does(codec):
    plain = run(adam, None, 200)[0][0]
    (loss, _, first), (_, _, second) = run(adam, codec, 200)
    assert first == second
    assert loss == pytest.approx(plain, rel=0.15)


def of_images(rank: int, memory_format, adam: bool):
    """Return the weights after steps; the state takes the optimizer's momentum along the way."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1))
    model.to(memory_format=memory_format)
    ddp = DistributedDataParallel(model)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    options = {} if adam else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.3, **options)
    state = State(
        "fp32", momentum=0.9, warm_up_steps=2 if adam else None,
        names={p: name for name, p in model.named_parameters()},
    )  # fmt: skip
    for number in range(5):
        if number == (0 if adam else 2):
            state.take_momentum(optimizer)
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(state, tw.hook)
        optimizer.zero_grad()
        x = data(number, rank, 3 * 6 * 6).view(-1, 3, 6, 6)
        ddp(x).square().mean().backward()
        optimizer.step()
    return [p.detach().contiguous() for p in model.parameters()]


@pytest.mark.parametrize("adam", [False, True])
def test_channels_last_is_an_order_of_memory_alone(adam):
    first = run(of_images, torch.contiguous_format, adam)[0]
    for ours, theirs in zip(run(of_images, torch.channels_last, adam)[0], first, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def of_images_through_a_file(rank: int, formats, has_names: bool):
    """Return the weights after two steps in the first memory format and three more in the second,
    from a checkpoint in between; and the momentum in the last checkpoint."""
    saved = None
    for start, end, memory_format in zip((0, 2), (2, 5), formats, strict=True):
        torch.manual_seed(7)
        model = torch.nn.Conv2d(3, 8, 3)
        if saved is not None:
            model.load_state_dict(saved[0])
        model.to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if has_names:
            ddp = DistributedDataParallel(model)
            state = tw.compress(ddp, "topk:density=0.5", optimizer=optimizer, min_bytes=0)
        else:  # parameters become known one by one; each is its own bucket from the first step on
            ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-6)
            state = State("topk:density=0.5", momentum=0.9, min_bytes=0)
            state.take_momentum(optimizer)
            ddp.register_comm_hook(state, tw.hook)
        if saved is not None:
            state.load_state_dict(saved[1])
        for number in range(start, end):
            optimizer.zero_grad()
            x = data(number, rank, 3 * 6 * 6).view(-1, 3, 6, 6)
            ddp(x).square().mean().backward()
            optimizer.step()
        saved = model.state_dict(), state.state_dict()
        state.close()
    momenta = [kept["momentum"] for kept in saved[1]["residuals"].values()]
    return saved[0]["weight"].contiguous(), *(m for m in momenta if m.numel() == 3 * 8 * 9)


def of_images_in_all_formats(rank: int, has_names: bool):
    last, plain = torch.channels_last, torch.contiguous_format
    orders = ((plain, plain), (last, last), (last, plain), (plain, last))
    return [of_images_through_a_file(rank, formats, has_names) for formats in orders]


@pytest.mark.parametrize("has_names", [True, False])
def test_a_checkpoint_does_not_depend_on_memory_formats(has_names):
    for expected, *found in run(of_images_in_all_formats, has_names):
        for ours in found:
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
