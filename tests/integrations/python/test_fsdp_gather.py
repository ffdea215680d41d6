"""FSDP2's parameters are gathered exactly, as compressed differences, or rounded."""

import warnings

import pytest
import thinwire
import torch
import torch.distributed as dist
from fsdp_models import Net, loss_of, sharded, train, weights
from ranks import outcomes_of, run
from thinwire.torch import compress
from thinwire.torch.fsdp import residuals
from thinwire.torch.fsdp.gather import LARGEST_CHANGE
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ELEMENTS = sum(p.numel() for p in Net().parameters())  # nothing is padded with 2 ranks


def watch(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a list to which each later forward and backward pass adds the first layer's weight."""
    layer, seen = model.layers[0], []

    def look(*_) -> None:
        seen.append(layer.weight.detach().float().clone())

    def look_in_backward(_module, _inputs, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(look)

    # FSDP2 gathers in its own hooks on the same module and on its output, which run first.
    layer.register_forward_pre_hook(look)
    layer.register_forward_hook(look_in_backward)
    return seen


def computed_with(rank: int, gather, reference, dtype: torch.dtype | None):
    """Return the weights that three passes compute with, those of the shards, and the stats."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model, state = sharded("fp32", mp_policy=policy, gather=gather, reference=reference)
    seen, kept = watch(model), []
    for step in range(3):
        kept.append(weights(model)["layers.0.weight"])
        train(model, 1, rank, start=step, lr=0.01)
    return seen, kept, state.stats().get("gather")


# The largest error of a weight, relative to the largest weight, without the dtype's rounding.
LOST = {"int4": LARGEST_CHANGE / 13, "adaptive": LARGEST_CHANGE, "int8": LARGEST_CHANGE / 250}


@pytest.mark.parametrize(
    ("gather", "reference", "dtype"),
    [
        (None, None, None),
        ("int4", None, None),
        ("int4", "bf16", None),
        ("int4", None, torch.bfloat16),
        ("int4", "fp32", torch.float16),
        ("adaptive", None, None),
        ("int8", None, None),
        ("int8", False, None),
        ("int8", False, torch.bfloat16),
        ("bf16", False, None),
    ],
)
def test_passes_compute_with_the_same_weights_on_all_ranks(gather, reference, dtype):
    ranks = run(computed_with, gather, reference, dtype, world=3)
    rounds = 2.0**-8 if dtype is torch.bfloat16 or "bf16" in (reference, gather) else 0.0
    rounds = 2.0**-10 if dtype is torch.float16 else rounds
    for seen, kept, stats in ranks:
        assert len(seen) == 6  # forward and backward of each step
        for step in range(3):
            forward, backward = seen[2 * step], seen[2 * step + 1]
            assert torch.equal(forward, backward) and torch.equal(forward, ranks[0][0][2 * step])
            error = (forward - kept[step]).abs().max() / kept[step].abs().max()
            if gather is None or (step == 0 and reference is not False):
                assert (error <= rounds) and (error > 0) == (rounds > 0)  # the first is exact
            elif reference is False:
                assert 0 < error <= rounds + (0.51 / 127 if gather == "int8" else 0)
            else:
                assert 0 < error <= rounds + LOST[gather]
        if gather is None:
            assert stats is None
        else:
            has = reference is not False
            assert (stats["reference_bytes"] > 0) == has
            assert stats["repeated"] == (6 if has else 0)  # FSDP2 keeps the root's weights gathered
            assert stats["exact"] == (3 if has else 0)


def evaluated(rank: int, gather: str):
    """Return the errors of the weights in forward passes after a step, with no step in between."""
    model, _ = sharded("fp32", gather=gather)
    seen = watch(model)
    train(model, 2, rank, lr=0.01)
    exact = weights(model)["layers.0.weight"]
    with torch.no_grad():
        for _ in range(4):
            loss_of(model, 0, rank)
    return [(one - exact).norm().item() for one in seen[4:]]


@pytest.mark.parametrize(("gather", "part"), [("int4", 0.02), ("adaptive", 0.3)])
def test_what_a_gather_loses_comes_with_the_next(gather, part):
    for errors in run(evaluated, gather):
        assert errors[0] > 0 and errors == sorted(errors, reverse=True)
        assert errors[-1] < part * errors[0]


def changed_outside(rank: int, how: str):
    model, state = sharded("fp32", gather="int4")
    seen = watch(model)
    train(model, 1, rank, lr=0.001)
    if how == "load":
        torch.manual_seed(5)
        model.load_state_dict({
            name: torch.distributed.tensor.distribute_tensor(
                torch.randn(p.shape), p.device_mesh, p.placements
            )
            for name, p in model.state_dict().items()
        })  # fmt: skip
    elif how == "one":
        if rank == 1:  # without telling the ranks
            with torch.no_grad():
                model.layers[0].weight.to_local()[3, 5] = 40.0
    else:
        with torch.no_grad():
            model.layers[0].weight.to_local()[3, 5] = torch.nan
        loss_of(model, 1, rank)
        model.reshard()
        with torch.no_grad():
            model.layers[0].weight.to_local()[3, 5] = 0.25
    before = state.stats()["gather"]["exact"]
    exact = weights(model)["layers.0.weight"]
    loss_of(model, 1, rank)
    return seen[-1], exact, state.stats()["gather"]["exact"] - before


@pytest.mark.parametrize(("how", "exact_gathers"), [("load", 3), ("one", 1), ("nan", 1)])
def test_large_changes_are_gathered_exactly(how, exact_gathers):
    for seen, exact, gathers in run(changed_outside, how):
        assert torch.equal(seen, exact)
        assert gathers == exact_gathers


def trained(rank: int, gather: str | None, reference: str | None):
    model, state = sharded("int4", gather=gather, reference=reference)
    first = loss_of(model, 99, rank).item()
    train(model, 60, rank, lr=0.4)
    return first, loss_of(model, 99, rank).item(), state.stats().get("gather")


def test_compressed_gathers_train_as_exact_ones_do():
    first, plain, _ = run(trained, None, None)[0]
    for gather, reference in (("int4", None), ("int4", "bf16"), ("adaptive", None)):
        _, ours, stats = run(trained, gather, reference)[0]
        assert ours < 0.7 * first and ours == pytest.approx(plain, rel=0.01)
        assert stats["exact"] < 20  # of 61 times 3


def unsharded(rank: int, gather: str, reference):
    """Call FSDP2's asynchronous gathers."""
    model, _ = sharded("fp32", gather=gather, reference=reference)
    kept = weights(model)["layers.0.weight"]
    found = []
    for _ in range(2):
        loss_of(model, 0, rank)
        model.layers[0].unshard(async_op=True).wait()
        found.append(model.layers[0].weight.detach().clone())
        model.layers[0].reshard()
    return found, kept


@pytest.mark.parametrize(("gather", "reference"), [("int8", False), ("int4", None)])
def test_asynchronous_gathers_are_waited_for(gather, reference):
    for found, kept in run(unsharded, gather, reference):
        for one in found:
            assert (one - kept).abs().max() <= 0.01 * kept.abs().max()


def in_smaller_groups(rank: int):
    """After a forward pass FSDP2 keeps halves of the weights, and gathers them in pairs of
    ranks."""
    model = Net()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    model.spare.requires_grad_(False)
    fully_shard(model, reshard_after_forward=2)
    state = compress(model, "fp32", gather="int4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, kept = watch(model), []
    for step in range(3):
        kept.append(weights(model)["layers.0.weight"])
        with torch.no_grad():
            loss_of(model, step, rank)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, kept, state.stats()["gather"]


def test_gathers_in_smaller_groups_are_exact():
    for seen, kept, stats in run(in_smaller_groups, world=4):
        assert stats["exact"] > 3 and stats["repeated"] == 0
        for step in range(3):
            first, forward, backward = seen[3 * step : 3 * step + 3]
            assert torch.equal(first, forward) and torch.equal(forward, backward)
            error = (first - kept[step]).abs().max()
            assert error <= LOST["int4"] * kept[step].abs().max() and (error > 0) == (step > 0)


def evaluated_between(rank: int):
    model, state = sharded("fp32", gather="int4")
    train(model, 2, rank)
    state.load_state_dict(state.state_dict())  # makes new references
    with torch.inference_mode():
        loss_of(model, 0, rank)
    train(model, 2, rank)
    return state.stats()["steps"]


def test_inference_mode_may_come_between():
    assert run(evaluated_between) == [4, 4]


def part_frozen(rank: int):
    """A frozen bias in a trained unit, and a unit that is frozen as a whole."""
    model = Net()
    model.layers[0].bias.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    model.layers[1].requires_grad_(False)
    fully_shard(model)
    state = compress(model, "fp32", gather="int4")
    bias = model.layers[0].bias.full_tensor().clone()
    train(model, 3, rank, lr=0.01)
    saved = state.state_dict()["residuals"]
    return torch.equal(bias, model.layers[0].bias.full_tensor()), sorted(saved), state.stats()


def test_frozen_parameters_are_gathered_with_their_unit():
    for same, names, stats in run(part_frozen):
        assert same and stats["gather"]["exact"] == 2
        assert "reference:layers.0.bias" in names and "reference:layers.1.weight" not in names


LARGE = residuals.SHARE * 6 * ELEMENTS  # bytes for fp32 references: 4 and 2 per element


def decided(rank: int, gather: str, reference, free: int):
    residuals.memory_of_host = lambda: (str(rank), free if rank == 1 else 100 * LARGE)
    model, _ = sharded(None, spare=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = compress(model, "fp32", gather=gather, reference=reference)
    model.skip = False
    train(model, 2, rank)
    text = state.describe().splitlines()[1]
    return [str(one.message) for one in caught], text, state.stats().get("gather")


@pytest.mark.parametrize(
    ("gather", "reference", "free", "kept", "words"),
    [
        ("int4", "auto", LARGE, 6, None),
        ("int4", None, LARGE - 1, None, "FSDP2 gathers itself, exactly: int4 is too coarse"),
        ("int8", None, LARGE - 1, 0, "each gather rounds the parameters to int8"),
        ("int4", "fp32", 0, 6, None),
        ("int4", "bf16", 0, 3, None),
        ("int8", False, LARGE, 0, None),
    ],
)
def test_references_are_kept_where_they_fit_on_every_rank(gather, reference, free, kept, words):
    for caught, text, stats in run(decided, gather, reference, free):
        assert (stats is None) == (kept is None)
        assert kept is None or stats["reference_bytes"] == kept * ELEMENTS
        assert text.startswith(
            f"references: {kept * ELEMENTS:,} bytes" if kept else "references: n"
        )
        assert len(caught) == (words is not None)
        assert words is None or (words in caught[0] and f"{6 * ELEMENTS:,} bytes" in caught[0])


def disagreed(rank: int):
    model, _ = sharded(None)
    compress(model, "fp32", gather="int4", reference=("fp32", "bf16")[rank])


def refused(_: int):
    model, _ = sharded(None)
    for words, options in (
        ("gather is", {"gather": "topk"}),
        ("reference is 'int8', expected 'auto', 'fp32', 'bf16' or False",
         {"gather": "int4", "reference": "int8"}),
        ("gather is 'int4', expected int8 or bf16 with", {"gather": "int4", "reference": False}),
        ("reference is 'fp32', expected None without gather=", {"reference": "fp32"}),
    ):  # fmt: skip
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            compress(model, "int4", **options)
    compress(model, "int4", gather="int4")  # the refusals have left nothing behind


def test_wrong_arguments_are_refused():
    run(refused)
    for outcome in outcomes_of(disagreed):
        assert outcome.error == "MismatchError" and "got reference 'bf16' on" in outcome.message


def deserted(rank: int):
    model, _ = sharded("fp32", gather="int4", timeout_s=100)
    train(model, 1, rank)
    dist.barrier()
    if rank == 1:
        raise KeyError("gone")
    loss_of(model, 1, rank)


def test_a_lost_rank_is_a_typed_error():
    first, second = outcomes_of(deserted)
    assert second.error == "KeyError"
    assert first.error == "PeerLostError", first  # not TimeoutError: rank 0 learns of the loss
