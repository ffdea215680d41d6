"""FSDP2 with compressed reduce-scatters, on the CPU over Gloo. Checkpoints, gathers and replicas
have their own files."""

import pytest
import thinwire
import torch
from fsdp_models import Net, gradients, loss_of, sharded, train, weights
from ranks import outcomes_of, run
from thinwire.torch import compress
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def one_step(rank: int, codec, dtype: torch.dtype | None, factor: float | None):
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model, state = sharded(codec, mp_policy=policy)
    if factor is not None and codec is not None:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)
    loss_of(model, 0, rank).backward()
    return gradients(model), None if state is None else state.stats()


# The largest error of a gradient, relative to its largest element, if a rank's own gradient may be
# twice the mean: rounding by scale / 2, with scale = largest / 127 or / 7.
TOLERANCE = {"fp32": 1e-6, "int8": 2.1 / 254, "int4": 2.1 / 14}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", TOLERANCE)
def test_gradients_are_the_mean_of_all_ranks(codec, world):
    plain, _ = run(one_step, None, None, None, world=world)[0]
    ours = run(one_step, codec, None, None, world=world)
    for found, stats in ours:
        assert stats["steps"] == 1 and stats["exact_reductions"] == 0
        for name, gradient in found.items():
            assert torch.equal(gradient, ours[0][0][name])
            error = (gradient - plain[name]).abs().max() / plain[name].abs().max()
            assert error <= TOLERANCE[codec], name
            assert (error > 1e-4) == codec.startswith("int"), name


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, None), (torch.bfloat16, None), (None, 2.0), (None, 8.0), (torch.float16, 4.0)],
)
def test_every_operation_of_fsdp(dtype, factor):
    """AVG, pre-divided SUM of fp16, and PREMUL_SUM, which Gloo itself does not support."""
    plain, _ = run(one_step, None, None, None, world=2)[0]
    scale = 2 / factor if factor else 1.0
    for found, _ in run(one_step, "fp32", dtype, factor, world=2):
        for name, gradient in found.items():
            rtol, atol = (0.02, 1e-4) if dtype else (1e-5, 1e-7)
            torch.testing.assert_close(gradient, scale * plain[name], rtol=rtol, atol=atol)


def feedback(rank: int):
    """Make a second step with zero gradients: its result is the residuals alone."""
    model, state = sharded("int4")
    loss_of(model, 0, rank).backward()
    kept = state.state_dict()["residuals"]
    model.zero_grad()
    (loss_of(model, 1, rank) * 0.0).backward()
    return kept, gradients(model), state.state_dict()["residuals"]


@pytest.mark.parametrize("world", [2, 3])
def test_residuals_belong_to_parameters(world):
    ranks = run(feedback, world=world)
    sizes = {name: p.numel() for name, p in Net().named_parameters()}
    for name, result in ranks[0][1].items():
        owed = [sum(rank[i][name]["first"] for rank in ranks) for i in (0, 2)]
        assert owed[0].numel() == sizes[name] and owed[0].abs().max() > 0
        torch.testing.assert_close(
            world * result.flatten(), owed[0] - owed[1], rtol=1e-4, atol=1e-6
        )


def trained(rank: int, codec):
    model, state = sharded(codec)
    first = loss_of(model, 99, rank).item()
    train(model, 60, rank, lr=0.4)
    return first, loss_of(model, 99, rank).item(), None if state is None else state.stats()


def test_int4_trains_as_plain_does():
    first, plain, _ = run(trained, None)[0]
    _, ours, stats = run(trained, "int4")[0]
    assert ours < 0.7 * first and ours == pytest.approx(plain, rel=0.05)
    assert stats["steps"] == 60
    assert {row["codec"] for row in stats["parameters"]} == {"int4"}


def accumulated(rank: int, codec):
    model, state = sharded(codec)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, rank).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1, rank).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return gradients(model), None if state is None else state.stats()["steps"]


def test_accumulation_and_clipping():
    plain, ours = run(accumulated, None)[0][0], run(accumulated, "fp32")
    for found, steps in ours:
        assert steps == 1
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name])


def without_gradients(rank: int, codec):
    model, state = sharded(codec, spare=True)
    seen = []
    for step in range(4):
        model.skip = step % 2 == 1  # equal on every rank, as FSDP2 requires
        model.zero_grad()
        if state is not None and step == 1:
            with pytest.warns(UserWarning, match="parameters have no gradient"):
                loss_of(model, step, rank).backward()
        else:
            loss_of(model, step, rank).backward()
        seen.append(
            {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        )
    return seen, None if state is None else state.stats()


@pytest.mark.skipif(
    hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch reduces zeros for them"
)
def test_parameters_without_gradients_are_told():
    plain, ours = run(without_gradients, None)[0][0], run(without_gradients, "int8")
    for seen, stats in ours:
        assert stats["exact_reductions"] == 2 and stats["steps"] == 4
        for step, found in enumerate(seen):
            assert found.keys() == plain[step].keys()
            for name, gradient in found.items():
                size = plain[step][name].abs().max()
                exact = step % 2 == 1 and not name.startswith("layers")
                assert (gradient - plain[step][name]).abs().max() <= (
                    1e-6 if exact else 0.02
                ) * size


def unused(rank: int):
    """Leave a part of the root's parameters out of every second step."""
    model, state = sharded("int8", spare=True)
    seen = []
    for step in range(4):
        model.skip = step % 2 == 1
        model.zero_grad()
        loss_of(model, step, rank).backward()
        seen.append(gradients(model))
    return seen, state.stats()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs torch 2.13"
)
def test_parameters_without_gradients_go_compressed_as_zeros():
    plain, ours = run(without_gradients, None)[0][0], run(unused)
    for seen, stats in ours:
        assert stats["exact_reductions"] == 0 and stats["steps"] == 4
        for step, found in enumerate(seen):
            for name, gradient in found.items():
                assert torch.equal(gradient, ours[0][0][step][name])
                is_unused = name not in plain[step]
                assert is_unused == (step % 2 == 1 and name.startswith("spare"))
                exact = torch.zeros(()) if is_unused else plain[step][name]
                size = plain[step - is_unused][name].abs().max()
                assert (gradient - exact).abs().max() <= 0.02 * size  # a residual may be added


def refused(rank: int):
    def refuses(words: str, *arguments, **options):
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            compress(*arguments, **options)

    refuses("model is None", None)
    model, _ = sharded(None)
    refuses("a reduce-scatter leaves no rank", model, "onebit", momentum=0.9)
    for whole in ("onebit", "topk:density=0.01", {"*bias": "fp32", "*": "topk"}):
        refuses("a reduce-scatter leaves no rank.*take int8 or int4", model, whole)
    refuses("matches no parameter", model, {"layer.*": "int8", "*": "int4"})
    for gather in ("topk", "onebit", "int8:rounding=stochastic", 8):
        refuses("gather is", model, "int4", gather=gather)
    part = Net()
    fully_shard(part.layers[0])
    with pytest.warns(UserWarning, match=r"'layers\.1\.weight', one of 6, is trained outside"):
        compress(part, "int4")
    _, state = sharded("int4")
    saved = state.state_dict()
    saved["residuals"] = {"head.weight": {"first": torch.ones(3), "second": torch.ones(3)}}
    with pytest.raises(thinwire.InvalidArgumentError, match="3 elements, expected 960"):
        state.load_state_dict(saved)
    model, _ = sharded({"head.weight": "int8", "*": "int4"})
    with pytest.raises(thinwire.InvalidArgumentError, match="expected one in a reduce-scatter"):
        loss_of(model, 0, rank).backward()


def test_what_can_not_be_is_refused():
    run(refused)


def listed(rank: int):
    """One fully_shard() call gets a list, in another order than the model's."""
    found = []
    for codec, gather in ((None, None), ("fp32", None), ("int8", None), ("int8", "int8")):
        model = Net()
        model.spare.requires_grad_(False)
        fully_shard([model.layers[1], model.head, model.layers[0]])
        fully_shard(model)
        state = None if codec is None else compress(model, codec, gather=gather, min_bytes=0)
        loss_of(model, 0, rank).backward()
        found.append((gradients(model), None if state is None else state.stats()))
    return found


def test_modules_that_are_sharded_together_are_one_unit():
    for (plain, _), *ours in run(listed):
        for (found, stats), tolerance in zip(ours, (1e-6, 0.02, 0.05), strict=True):
            assert stats["exact_reductions"] == 0 and stats["all_reduces"] == 1
            for name, exact in plain.items():
                error = (found[name] - exact).abs().max() / exact.abs().max()
                assert error <= tolerance, name
                assert tolerance < 0.01 or error > 1e-4, name


def with_ignored(rank: int):
    found = []
    for codec in (None, "int8"):
        model = Net()
        fully_shard(model, ignored_params={model.head.bias, *model.spare.parameters()})
        if codec is not None:
            with pytest.warns(UserWarning, match=r"'head\.bias', one of 3, is trained outside"):
                state = compress(model, codec, min_bytes=0)
        loss_of(model, 0, rank).backward()
        found.append([p.grad.full_tensor() for p in model.layers.parameters()])
    return found, state.stats()


def test_ignored_parameters_are_left_out():
    for (plain, ours), stats in run(with_ignored):
        assert stats["exact_reductions"] == 0 and stats["all_reduces"] == 1
        for exact, found in zip(plain, ours, strict=True):
            assert 1e-4 < (found - exact).abs().max() / exact.abs().max() < 0.02


def compressed_twice(rank: int):
    model, first = sharded("int4")
    for part in (model, model.layers[1]):
        with pytest.raises(thinwire.InvalidArgumentError, match="compressed already, by a comp"):
            compress(part, "int8")
    loss_of(model, 0, rank).backward()  # the first model still trains
    after_refusal = first.stats()["steps"]
    first.close()
    second = compress(model, "int8")
    first.close()  # unrelated to the second model
    with pytest.raises(thinwire.InvalidArgumentError, match="of 'model' are compressed"):
        compress(model)
    loss_of(model, 1, rank).backward()
    return after_refusal, second.stats()


def test_a_model_is_compressed_once_at_a_time():
    for after_refusal, stats in run(compressed_twice):
        assert (after_refusal, stats["steps"]) == (1, 1)
        assert {row["codec"] for row in stats["parameters"]} == {"int8"}


def compiled(rank: int, first: str):
    """Call fully_shard() on the compiled module, or torch.compile() on the sharded one."""
    model = Net()
    if first == "torch.compile":
        model = torch.compile(model, backend="eager")
    fully_shard(model)
    if first == "fully_shard":
        model = torch.compile(model, backend="eager")
    compression = compress(model, "int4")
    train(model, 3, rank)
    names = {row["name"] for row in compression.stats()["parameters"]}
    whole = {name.replace("_orig_mod.", ""): each for name, each in weights(model).items()}
    return whole, names


@pytest.mark.parametrize("first", ["torch.compile", "fully_shard"])
def test_compiled_modules_train_as_they_do_uncompiled(first):
    plain, ours = run(compiled, ""), run(compiled, first)
    assert ours[0][1] == plain[0][1]
    for name, value in plain[0][0].items():
        torch.testing.assert_close(ours[0][0][name], value)


def unlike(rank: int):
    sharded("int4", gather="int4" if rank else None)


def test_options_that_differ_between_ranks_are_a_mismatch_on_every_rank():
    for outcome in outcomes_of(unlike):
        assert outcome.error == "MismatchError", outcome
        assert "got gather 'int4' on rank 1, expected None as on rank 0" in outcome.message


def evaluated_before(rank: int):
    model, _ = sharded(None)
    with torch.no_grad():
        loss_of(model, 0, rank)  # it leaves the root's parameters unsharded
    state = compress(model, "int4")
    train(model, 2, rank)
    return state.stats()["steps"]


def test_a_forward_pass_may_come_before_compress():
    assert run(evaluated_before) == [2, 2]


def by_module(rank: int):
    model, state = sharded({"layers.0.*": "int8", "*": "int4"})
    train(model, 2, rank)
    return {row["name"]: row["codec"] for row in state.stats()["parameters"]}


def test_rules_go_by_module():
    for codecs in run(by_module):
        assert codecs["layers.0.weight"] == codecs["layers.0.bias"] == "int8"
        assert codecs["layers.1.weight"] == codecs["head.bias"] == "int4"
