"""A codec for each parameter."""

import pytest
import thinwire
import torch
from models import data, gradients, make_mlp, wrap
from ranks import run
from thinwire.torch import State
from thinwire.torch.exchange.rules import Rules

RULES = {"*.bias": "fp32", "0.*": "int8", "*": "int4"}


def test_the_first_match_wins():
    rules = Rules(RULES)
    assert rules.joined == "fp32;int8;int4"
    assert [rules.index_of(name) for name in ("0.bias", "0.weight", "4.weight")] == [0, 1, 2]
    assert rules.rule_of("0.bias") == "*.bias"
    assert Rules("int4").joined == "int4"
    assert Rules({"a": "int4", "b": "int8", "*": "int4"}).joined == "int4;int8"


def test_what_matches_nothing_is_named():
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'head\.weight' matches"):
        Rules({"*.bias": "int8"}).rule_of("head.weight")
    with pytest.raises(
        thinwire.InvalidArgumentError, match=r"'embd\.\*' matches no parameter.*embed\.weight"
    ):
        Rules({"embd.*": "int8", "*": "int4"}).check_names(["head.bias", "embed.weight"])
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'\*\.bias' stands behind '\*'"):
        Rules({"*": "int4", "*.bias": "fp32"}).check_names(["0.bias"])
    Rules({"*.bias": "fp32", "*": "int4"}).check_names(["0.bias"])  # the last may match nothing
    for bad in ({}, {"*": 3}, {"*": "int4;int8"}):
        with pytest.raises(thinwire.InvalidArgumentError):
            Rules(bad)


def one_step(rank: int, codec):
    model = make_mlp()
    ddp, state = wrap(model, codec)
    ddp(data(0, rank)).square().sum().backward()
    parts = {name: p.grad.clone() for name, p in model.named_parameters()}
    return parts, None if state is None else state.stats()["parameters"], gradients(model)


def test_one_bucket_holds_several_codecs():
    plain = run(one_step, None)[0][0]
    (ours, table, first), (_, _, second) = run(one_step, RULES)
    assert torch.equal(first, second)
    for name, gradient in ours.items():
        exact = name.endswith("bias")
        assert torch.allclose(gradient, plain[name], rtol=1e-6, atol=1e-7) == exact, name
    error = {
        name: ((ours[name] - plain[name]).abs().max() / plain[name].abs().max()).item()
        for name in ("0.weight", "2.weight")
    }
    assert error["0.weight"] < 0.01 < error["2.weight"] < 0.16
    codecs = {row["name"]: row["codec"] for row in table}
    assert codecs == {
        "0.bias": "fp32", "0.weight": "int8", "2.bias": "fp32", "2.weight": "int4",
        "4.bias": "fp32", "4.weight": "int4",
    }  # fmt: skip
    assert {row["rule"] for row in table} == set(RULES)
    assert sum(row["numel"] for row in table) == first.numel()


def table_of(rank: int, codec, min_bytes: int):
    ddp, state = wrap(make_mlp(), codec, min_bytes=min_bytes)
    ddp(data(0, rank)).square().sum().backward()
    return state.stats()["parameters"], state.state_dict()


def test_the_table_says_what_became_of_a_codec():
    table, _ = run(table_of, "int4", 1 << 20)[0]
    assert {row["codec"] for row in table} == {"raw"}
    table, saved = run(table_of, "topk:density=0.2", 0)[0]
    assert {row["codec"] for row in table} == {"int4"}  # int4 is smaller in a world of two
    assert saved["sparse"] == []
    table, saved = run(table_of, "topk:density=0.1", 0)[0]
    assert {row["codec"] for row in table} == {"topk:density=0.1"}
    assert len(saved["sparse"]) == len(table)


def nameless(rank: int):
    with pytest.raises(thinwire.InvalidArgumentError, match="compress"):
        State({"*.bias": "fp32", "*": "int4"})
    State({"*": "int4"})
    with pytest.raises(thinwire.InvalidArgumentError, match="matches no pattern"):
        wrap(make_mlp(), {"*.bias": "fp32"})


def test_patterns_need_names():
    run(nameless)
