"""State dicts and state files that are not what was saved: a typed error names the fault, and
nothing is loaded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thinwire
import torch
from ranks import run
from thinwire.torch import GradientExchange
from thinwire.torch.advanced import merge_state_dicts

SEED = random.SystemRandom().randrange(10**6)
FILES = 600  # mutations of a state file


def trained(momentum: float = 0.9) -> GradientExchange:
    exchange = GradientExchange("int4", momentum=momentum, min_bytes=0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=momentum)
    exchange.take_momentum(optimizer, lambda _: None)
    exchange.reduce({"a": torch.randn(1000), "b": torch.randn(20, 30)})
    return exchange


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def with_key(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = to

    return change


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


A = ("residuals", "a")
# The change, and a word of the message.
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **{f"no {key}": (without(key), key) for key in
       ("format", "codec", "world", "rank", "steps", "sparse", "residuals")},
    **{f"{key} of text": (with_key(key, to="x"), key) for key in
       ("format", "world", "rank", "steps", "sparse", "residuals")},
    "codec of numbers": (with_key("codec", to=5), "codec"),
    "another rank": (with_key("rank", to=1), "rank 1"),
    "a rank below zero": (with_key("rank", to=-1), "rank -1"),
    "steps below zero": (with_key("steps", to=-1), "step -1"),
    "another world": (with_key("world", to=7), "of 7"),
    "no tensors": (with_key(*A, to=5), "'a'"),
    "no first": (without(*A, "first"), "'a'"),
    "no second": (without(*A, "second"), "'a'"),
    "one more": (with_key(*A, "third", to=torch.zeros(1000)), "'third'"),
    "a list": (with_key(*A, "first", to=[0.0] * 1000), "'a'"),
    "a momentum of text": (with_key(*A, "momentum", to="x"), "'momentum'"),
    "a short first": (with_key(*A, "first", to=torch.zeros(999)), "'a'"),
    "a short second": (with_key(*A, "second", to=torch.zeros(999)), "'a'"),
    "a short momentum": (with_key(*A, "momentum", to=torch.zeros(999)), "'a'"),
    "a matrix": (with_key(*A, "second", to=torch.zeros(10, 100)), "'a'"),
    "whole numbers": (with_key(*A, "first", to=torch.zeros(1000).int()), "int32"),
    "complex numbers": (with_key(*A, "first", to=torch.zeros(1000).cfloat()), "complex64"),
    "a sparse tensor": (with_key(*A, "first", to=torch.zeros(1000).to_sparse()), "sparse"),
    "another size": (
        with_key(*A, to={kind: torch.zeros(7) for kind in ("first", "second", "momentum")}), "'a'",
    ),
    "a name of numbers": (lambda saved: saved["residuals"].update({5: {}}), "5"),
    "a name with NUL": (
        with_key("residuals", "x\0", to={kind: torch.zeros(7) for kind in ("first", "second")}),
        r"x\x00",
    ),
}  # fmt: skip


def damaged_dicts(_rank: int) -> list[str]:
    exchange = trained()
    good, found = exchange.state_dict(), []
    for name, (change, word) in DAMAGES.items():
        # Behind a good parameter, which must not be loaded either.
        bad = copy.deepcopy(good)
        bad["residuals"]["b"]["first"] += 1
        bad["residuals"] = {key: bad["residuals"][key] for key in ("b", "a")}
        change(bad)
        try:
            exchange.load_state_dict(bad)
            found.append(f"{name}: it was loaded")
        except thinwire.InvalidArgumentError as error:
            if word not in str(error):
                found.append(f"{name}: no {word!r} in {error}")
        if not same(exchange.state_dict(), good):
            found.append(f"{name}: something was taken over")
    exchange.load_state_dict(good)
    return found


def test_a_damaged_state_dict_is_refused_as_a_whole():
    assert run(damaged_dicts, world=1) == [[]]


def test_a_momentum_that_nobody_owns_is_refused():
    run(load_with_momentum, world=1)


def load_with_momentum(_rank: int) -> None:
    saved = trained().state_dict()
    plain = GradientExchange("int4", min_bytes=0)
    with pytest.raises(thinwire.InvalidArgumentError, match="a momentum for 'a'"):
        plain.load_state_dict(saved)
    assert plain.state_dict()["residuals"] == {}


def of_two() -> list[dict[str, Any]]:
    tensors = {"first": torch.ones(5), "second": torch.ones(5)}
    return [
        {"format": 2, "codec": "int4", "world": 2, "rank": rank, "steps": 3, "sparse": [],
         "residuals": {"a": dict(tensors)}}
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("change, words", [
    (lambda saved: saved.pop(), r"ranks \[0\]"),
    (lambda saved: saved.append(saved[0]), r"ranks \[0, 1, 0\]"),
    (lambda saved: saved[1].update(rank=0), r"ranks \[0, 0\]"),
    (lambda saved: saved[1]["residuals"]["a"].update(momentum=torch.ones(5)), "'a'"),
    (lambda saved: saved[1]["residuals"].update(
        a={"first": torch.ones(4), "second": torch.ones(4)}), "'a'"),
])  # fmt: skip
def test_ranks_of_no_one_run_are_refused(change, words):
    saved = of_two()
    change(saved)
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        merge_state_dicts(saved, 3, 0)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Cut the content short, flip a few bits, insert bytes, or overwrite a part by another part."""
    way, bytes_ = chance.randrange(4), bytearray(content)
    # Half of the mutations are in the header, whose length is in the first 8 bytes.
    header = 8 + int.from_bytes(content[:8], "little")
    end = header if chance.random() < 0.5 else len(content)
    at = chance.randrange(end)
    if way == 0:
        return content[:at]
    if way == 1:
        for _ in range(chance.randint(1, 3)):
            bytes_[chance.randrange(end)] ^= 1 << chance.randrange(8)
    elif way == 2:
        bytes_[at:at] = chance.randbytes(chance.randint(1, 9))
    else:
        size = chance.randint(1, 40)
        bytes_[at : at + size] = content[(other := chance.randrange(len(content))) : other + size]
    return bytes(bytes_)


def damaged_files(_rank: int, folder: str, seed: int) -> list[str]:
    exchange, path, found = trained(), Path(folder) / "state.safetensors", []
    exchange.save(path)
    good, content = exchange.state_dict(), path.read_bytes()
    chance = random.Random(seed)
    for number in range(FILES):
        path.write_bytes(bad := mutated(content, chance))
        if bad == content:
            continue
        try:
            exchange.load(path)
            if not same(exchange.state_dict(), good):
                found.append(f"{number}: it was loaded, and is another state")
        except thinwire.InvalidArgumentError as error:
            if str(path) not in str(error):
                found.append(f"{number}: the file is not named: {error}")
        except Exception as error:
            found.append(f"{number}: {error!r}")
    if not same(exchange.state_dict(), good):
        found.append("something was taken over")
    return found


def test_no_damaged_file_is_loaded(tmp_path):
    pytest.importorskip("safetensors")
    print("seed", SEED)
    assert run(damaged_files, str(tmp_path), SEED, world=1) == [[]]
