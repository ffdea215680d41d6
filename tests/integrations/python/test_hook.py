"""Gradients from the DDP hook are close to plain DDP's, and the same bits on every rank."""

import json

import pytest
import thinwire
import thinwire.torch
import torch
from models import data, digest, gradients, make_mlp, train, wrap
from ranks import run
from torch.nn.parallel import DistributedDataParallel

# The largest error of one step's gradient, relative to its largest element: both hops round to the
# nearest, by scale / 2 each, with scale = largest / 127 or / 7 and a bf16 scale rounded up.
TOLERANCE = {"fp32": 1e-6, "bf16": 2**-7, "int8": 2.1 / 254, "int4": 2.1 / 14}


def one_step(rank: int, codec: str | None) -> torch.Tensor:
    model = make_mlp()
    ddp, _ = wrap(model, codec)
    ddp(data(0, rank)).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("codec", TOLERANCE)
def test_gradient_is_the_mean_of_all_ranks(codec):
    world = 3
    plain = run(one_step, None, world=world)[0]
    ours = run(one_step, codec, world=world)
    for gradient in ours:
        assert torch.equal(gradient, ours[0])
    error = (ours[0] - plain).abs().max() / plain.abs().max()
    assert error <= TOLERANCE[codec]
    if codec.startswith("int"):
        assert error > 0  # it was compressed


def train_and_digest(rank: int, codec: str | None, steps: int):
    model = make_mlp()
    ddp, state = wrap(model, codec)
    digests = []
    loss = train(ddp, steps, on_step=lambda _: digests.append(digest(model)))
    return digests, loss, None if state is None else state.stats()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_replicas_stay_identical_over_200_steps(codec):
    (first, _, stats), *others = run(train_and_digest, codec, 200)
    assert len(set(first)) == 200
    for digests, _, _ in others:
        assert digests == first
    assert stats["steps"] == 200
    assert stats["ratio"] > (7.0 if codec == "int4" else 3.7)
    assert stats["ratio"] == stats["raw_bytes"] / stats["wire_bytes"]
    assert all(stats["seconds"][stage] > 0 for stage in ("encode", "exchange", "reduce", "decode"))


@pytest.mark.slow
def test_int4_trains_as_plain_does():
    plain = run(train_and_digest, None, 100)[0][1]
    assert run(train_and_digest, "int4", 100)[0][1] == pytest.approx(plain, rel=0.05)


def step_with_nan(rank: int):
    model = make_mlp()
    ddp, _ = wrap(model, "int4")
    x = data(0, rank)
    (ddp(x).sum() * (float("nan") if rank == 1 else 1.0)).backward()
    spoilt = gradients(model)
    model.zero_grad()
    ddp(x).sum().backward()
    return spoilt.isnan().all().item(), gradients(model).isfinite().all().item()


def test_nan_of_one_rank_reaches_all_and_leaves_no_trace():
    assert run(step_with_nan) == [(True, True)] * 2


def alone(rank: int):
    model = make_mlp()
    ddp, state = wrap(model, "int4")
    x = data(0, rank)
    ddp(x).square().sum().backward()
    hooked = gradients(model)
    model.zero_grad()
    model(x).square().sum().backward()
    return torch.equal(hooked, gradients(model)), state.stats()["steps"]


def test_world_of_one():
    assert run(alone, world=1) == [(True, 1)]


def traced(rank: int, path: str):
    for _ in range(2):
        ddp, state = wrap(make_mlp(), "int4", trace=path)
        train(ddp, 3)
        state.close()


def test_each_state_of_each_rank_writes_its_trace(tmp_path):
    run(traced, str(tmp_path / "trace.json"))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        names = {event["name"] for event in json.loads(file.read_text())}
        assert any("ENCODE" in name for name in names), names


class Rotation(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(96, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cfloat() @ self.weight).abs()


def complex_gradients(rank: int):
    ddp, got = DistributedDataParallel(Rotation()), r"got dtype torch\.complex64, expected float32"
    with pytest.raises(thinwire.InvalidArgumentError, match=f"'weight': {got}"):
        thinwire.torch.compress(ddp)
    ddp.register_comm_hook(thinwire.torch.State("int4"), thinwire.torch.hook)
    with pytest.raises(thinwire.InvalidArgumentError, match=f"'p0': {got}"):
        ddp(data(0, rank)).sum().backward()


def test_complex_gradients_are_refused_by_dtype_and_parameter():
    run(complex_gradients)
