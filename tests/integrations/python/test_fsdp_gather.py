"""FSDP2's parameters, gathered exactly or rounded."""

import pytest
import torch
from fsdp_models import loss_of, sharded, train, weights
from ranks import run
from torch.distributed.fsdp import MixedPrecisionPolicy


def computed_with(rank: int, gather: str | None, dtype: torch.dtype | None):
    """What a layer of the forward pass and of the backward pass has, and what its shards say."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model, state = sharded("fp32", mp_policy=policy, gather=gather)
    layer, seen = model.layers[0], []

    def look(*_) -> None:
        seen.append(layer.weight.detach().float().clone())

    def look_in_backward(_module, _inputs, output: torch.Tensor) -> None:
        output.register_hook(look)

    # FSDP2 gathers in hooks of its own on the same module and on its output, which come first.
    layer.register_forward_pre_hook(look)
    layer.register_forward_hook(look_in_backward)
    train(model, 1, rank)
    kept = weights(model)["layers.0.weight"]
    loss_of(model, 1, rank).backward()
    return seen[2:], kept, state.stats().get("gather")


@pytest.mark.parametrize(
    ("gather", "dtype"), [(None, None), ("int8", None), ("int8", torch.bfloat16), ("bf16", None)]
)
def test_parameters_are_gathered_exactly_unless_asked(gather, dtype):
    ranks = run(computed_with, gather, dtype, world=3)
    step = {None: 0.0, "int8": 0.51 / 127, "bf16": 2.0**-8}[gather] + (2.0**-8 if dtype else 0.0)
    for seen, kept, stats in ranks:
        assert len(seen) == 2 and torch.equal(*seen)  # forward and backward
        assert torch.equal(seen[0], ranks[0][0][0])  # all ranks
        error = (seen[0] - kept).abs().max()
        assert error <= step * kept.abs().max() and (error > 0) == (gather is not None)
        assert (stats is None) == (gather is None)
        least = {"int8": 1.9 if dtype else 3.8, "bf16": 1.9}
        assert stats is None or stats["ratio"] > least[gather], stats


def trained_on_rounded(rank: int, gather: str | None):
    model, _ = sharded("int4", gather=gather)
    first = loss_of(model, 99, rank).item()
    train(model, 60, rank, lr=0.4)
    return first, loss_of(model, 99, rank).item()


def test_rounded_parameters_train_as_exact_ones_do():
    first, plain = run(trained_on_rounded, None)[0]
    _, ours = run(trained_on_rounded, "int8")[0]
    assert ours < 0.7 * first and ours == pytest.approx(plain, rel=0.05)
