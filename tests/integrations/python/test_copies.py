"""Copies of a compressed DDP model: deepcopy, pickle, AveragedModel, and torch.compile."""

import copy
import io

import pytest
import thinwire
import torch
from models import data, digest, make_mlp, train, wrap
from policies import Wrapped
from ranks import run
from thinwire.torch import GradientExchange, compress
from thinwire.torch.ddp.state import CopiedState
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def unpickled(ddp: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(ddp: DistributedDataParallel) -> DistributedDataParallel:
    model = AveragedModel(ddp)
    model.update_parameters(ddp)
    return model.module


WAYS = {"deepcopy": copy.deepcopy, "pickle": unpickled, "averaged": averaged}


def copied(rank: int, way: str):
    ddp, state = wrap(make_mlp(), {"*.bias": "int8", "*": "int4"})
    train(ddp, 2)
    twin = WAYS[way](ddp)
    x = data(0, rank)
    assert torch.equal(twin(x), ddp(x))
    train(ddp, 2, start=2)  # the original still trains
    fresh = DistributedDataParallel(twin.module)
    again = compress(fresh, "int4", min_bytes=0)
    again.load_state_dict(state.state_dict())
    train(fresh, 2, start=2)
    return digest(ddp), digest(fresh)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_model_evaluates_and_can_be_compressed_anew(way):
    first, second = run(copied, way)
    assert first == second


def used_copy(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    twin = copy.deepcopy(state)
    assert isinstance(twin, CopiedState) and twin.codec == "int4"
    with pytest.raises(thinwire.InvalidArgumentError, match=r"copy of a State.*compress\(ddp"):
        twin.stats()
    other = DistributedDataParallel(make_mlp())
    other.register_comm_hook(twin, thinwire.torch.hook)
    with pytest.raises(thinwire.InvalidArgumentError, match="copy of a State"):
        other(data(0, rank)).sum().backward()
    train(ddp, 1)


def test_a_copied_state_says_so_when_it_is_used():
    run(used_copy)


def names_of(saved: dict) -> set[str]:
    return set(saved["residuals"])


def compiled(rank: int):
    """Residuals of a compiled model, and of one with a compiled part, load into the plain one."""
    rules = {"0.weight": "int8", "*": "int4"}
    plain, whole, part = make_mlp(), make_mlp(), make_mlp()
    whole = torch.compile(whole, backend="eager")
    part[2] = torch.compile(part[2], backend="eager")
    digests, dicts = [], []
    for model in (plain, whole, part):
        ddp, state = wrap(model, rules)
        train(ddp, 3)
        digests.append(digest(model))
        dicts.append(state.state_dict())
        if model is plain:
            first = ddp, state
    ddp, state = first
    for saved in dicts:
        state.load_state_dict(saved)
    return digests, [names_of(saved) for saved in dicts]


def test_names_of_a_compiled_model_are_the_models():
    (digests, names), (others, _) = run(compiled)
    assert digests == others and len(set(digests)) == 1
    assert names[0] == names[1] == names[2] and "0.weight" in names[0]


def compiled_elsewhere(rank: int):
    inner = make_mlp()
    model = torch.compile(inner, backend="eager")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Wrapped(sgd, model, {"0.weight": "int8", "*": "int4"}, min_bytes=0)
    model(data(0, rank)).sum().backward()
    optimizer.step()
    named = dict(model.named_parameters())
    exchange = GradientExchange("int4", min_bytes=0)
    exchange.reduce_gradients(named)
    old = exchange.state_dict()
    old["residuals"] = {f"_orig_mod.{name}": kept for name, kept in old["residuals"].items()}
    exchange.load_state_dict(old)  # as saved before names were stripped
    return names_of(optimizer.state_dict()["thinwire"]), names_of(exchange.state_dict())


def test_other_adapters_strip_them_as_well():
    names = {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    assert run(compiled_elsewhere) == [(names, names)] * 2


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_plain_module_evaluates_and_can_be_compressed_anew(way, optimized):
    first, second = run(copied_module, way, optimized)
    assert first == second


def copied_module(rank: int, way: str, optimized: bool):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = compress(model, "int4", optimizer=optimizer if optimized else None, min_bytes=0)
    WAYS[way](model)  # also before the first step
    for step in range(3):
        if step == 2:
            state.finish()
            twin = WAYS[way](model)
            expected = twin.state_dict()
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    x = data(0, rank)
    state.finish()
    for name, value in twin.state_dict().items():  # only the original has trained on
        assert torch.equal(value, expected[name]) and not torch.equal(
            value, model.state_dict()[name]
        )
    twin(x).square().mean().backward()  # the copy trains alone
    compress(twin, "int4", min_bytes=0)
    twin(x).square().mean().backward()
    return [p.grad.sum().item() for p in twin.parameters()]
