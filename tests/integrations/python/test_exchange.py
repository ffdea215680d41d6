"""GradientExchange, which all adapters share, and states that are made before the process group."""

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp, train
from policies import Wrapped
from ranks import run
from thinwire.torch import GradientExchange, State, hook
from thinwire.torch.advanced import Part
from torch.nn.parallel import DistributedDataParallel

# Before init_process_group.


def wrapped_by(state: State) -> DistributedDataParallel:
    ddp = DistributedDataParallel(make_mlp(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, hook)
    return ddp


def made_early(rank: int, folder: str):
    """Train with states made before the process group and with others made after it, and return the
    digests of both."""
    dist.destroy_process_group()
    early, second = State("int4", min_bytes=0), State("int8", min_bytes=0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    digests = []
    for state in (early, second, State("int4", min_bytes=0), State("int8", min_bytes=0)):
        ddp = wrapped_by(state)
        train(ddp, 4)
        digests.append(digest(ddp))
        assert (state.rank, state.world_size, state.stats()["steps"]) == (rank, 2, 4)
        assert state.stats()["ratio"] > 3
    return digests


def test_a_state_made_before_the_process_group_trains_as_usual(tmp_path):
    first, second = run(made_early, str(tmp_path))
    assert first == second
    early4, early8, late4, late8 = first
    assert (early4, early8) == (late4, late8) and early4 != early8


def made_in_two_orders(rank: int, folder: str):
    """States made before the group join in the order of first use, not of construction."""
    dist.destroy_process_group()
    states = {codec: State(codec, min_bytes=0) for codec in ("int4", "int8")[:: 1 - 2 * rank]}
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    for codec in ("int8", "int4"):
        train(wrapped_by(states[codec]), 2)


def test_states_made_before_the_process_group_join_in_the_order_of_their_use(tmp_path):
    run(made_in_two_orders, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"codec": "int9"}, "int8"),
        ({"codec": "int8:blok=256"}, "blok"),
        ({"codec": {"*.bias": "fp23", "*": "int4"}}, "fp32"),
        ({"codec": {"*": "int4;int8"}}, "name pattern"),
        ({"policy": "p4"}, "p4"),
        ({"codec": "onebit"}, "optimizer="),
        ({"lanes": 0}, "lanes"),
        ({"clip_norm": 0.0}, "clip_norm"),
    ],
)
def test_wrong_values_are_seen_at_construction(options, match):
    with pytest.raises(thinwire.InvalidArgumentError, match=match):
        State(**options)


# Training loops without a framework.


def loop(rank: int, way: str, codec, momentum: float, steps: int = 5):
    model = make_mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
    named = dict(model.named_parameters())
    options = {"codec": codec, "momentum": momentum, "min_bytes": 0}
    if way == "optimizer":
        sgd = Wrapped(sgd, model, policy="wfbp", **options)
    else:
        exchange = GradientExchange(**options)
        if momentum:
            names = {parameter: name for name, parameter in named.items()}
            exchange.take_momentum(sgd, names.get)
    for step in range(steps):
        sgd.zero_grad()
        loss_of(model, data(step, rank)).backward()
        if way == "gradients":
            exchange.reduce_gradients(named)
        elif way == "tensors":
            exchange.reduce({name: p.grad for name, p in named.items()})
        sgd.step()
    used = sgd if way == "optimizer" else exchange
    return digest(model), used.stats()


RULES = {"*.bias": "fp32", "*": "int4"}


@pytest.mark.parametrize(
    ("way", "codec", "momentum"),
    [("gradients", RULES, 0.0), ("tensors", RULES, 0.0), ("gradients", "onebit", 0.9)],
)
def test_a_plain_loop_makes_the_optimizers_steps_bit_by_bit(way, codec, momentum):
    (ours, stats, *_), (other, *_) = run(loop, way, codec, momentum)
    (theirs, their_stats), _ = run(loop, "optimizer", codec, momentum)
    assert ours == other == theirs
    assert stats["steps"] == 5 and stats["wire_bytes"] == their_stats["wire_bytes"] > 0
    assert stats["parameters"] == their_stats["parameters"] and len(stats["parameters"]) == 6


def without_momentum_taken(rank: int):
    exchange = GradientExchange("onebit", momentum=0.9)
    with pytest.raises(thinwire.InvalidArgumentError, match="not paired"):
        exchange.reduce_gradients(dict(make_mlp().named_parameters()))
    with pytest.raises(thinwire.InvalidArgumentError, match="owns no momentum"):
        GradientExchange("int4").take_momentum(torch.optim.SGD(make_mlp().parameters()), str)


def test_momentum_must_be_taken_first():
    run(without_momentum_taken)


def resumed(rank: int):
    """Train six steps at once, and three and three with a checkpoint into another exchange."""
    digests = []
    for cuts in ([6], [3, 3]):
        model = make_mlp()
        named, done, saved = dict(model.named_parameters()), 0, None
        for steps in cuts:
            exchange = GradientExchange("int4:rounding=stochastic", min_bytes=0)
            if saved is not None:
                exchange.load_state_dict(saved)
            for step in range(done, done + steps):
                model.zero_grad()
                loss_of(model, data(step, rank)).backward()
                exchange.reduce_gradients(named)
                torch.optim.SGD(model.parameters(), lr=0.05).step()
            done, saved = done + steps, exchange.state_dict()
            exchange.close()
        assert saved["steps"] == 6
        digests.append(digest(model))
    return digests


def test_a_checkpoint_resumes_bit_by_bit():
    first, second = run(resumed)
    assert first == second and first[0] == first[1]


def absent(rank: int):
    """Rank 1 has no gradient in the second step: its residual stays unchanged, and zeros count."""
    weight = torch.nn.Parameter(torch.zeros(3000))
    exchange = GradientExchange("int4", min_bytes=0)
    exchange_of = {"w": weight}
    weight.grad = torch.randn(3000)
    exchange.reduce_gradients(exchange_of)
    before = exchange.state_dict()["residuals"]["w"]["first"]
    weight.grad = None if rank == 1 else torch.ones(3000)
    exchange.reduce_gradients(exchange_of)
    after = exchange.state_dict()["residuals"]["w"]["first"]
    # Rank 1 reduces its own shard unquantised, so that shard has no residual.
    return torch.equal(before, after), before.any().item(), weight.grad.mean().item()


def test_a_missing_gradient_counts_as_zeros_and_keeps_its_residual():
    (_, _, mean), (kept, lost, same) = run(absent)
    assert kept and lost
    assert mean == same == pytest.approx(0.5, rel=0.1)


# Buckets.


def buckets(rank: int):
    exchange = GradientExchange(RULES, min_bytes=0)
    parts = [Part("a.weight", 600), ("a.bias", 40), Part("b.weight", 360, offset=40, total=400)]
    bucket = exchange.bucket("first", parts, torch.float32)
    other = exchange.bucket("second", [("c.weight", 512)], torch.bfloat16, priority=1)
    for _ in range(3):
        flat, half = torch.full((1000,), rank + 1.0), torch.full((512,), rank + 1).bfloat16()
        submissions = [exchange.submit(bucket, flat), exchange.submit(other, half)]
        exchange.end_step()
        for submission in reversed(submissions):
            exchange.wait(submission)
        assert torch.allclose(flat, torch.tensor(1.5), rtol=0.1)
        assert (flat[600:640] == 1.5).all()
        assert torch.allclose(half.float(), torch.tensor(1.5), rtol=0.1)
    future = exchange.start(bucket, torch.ones(1000))
    assert torch.allclose(future.wait(), torch.tensor(1.0), rtol=0.1)
    wrong = [torch.ones(999), torch.ones(1000).double(), torch.ones(2000)[::2], half]
    for buffer in wrong:
        with pytest.raises(thinwire.InvalidArgumentError, match="'first'"):
            exchange.submit(bucket, buffer)
    with pytest.raises(thinwire.InvalidArgumentError, match="float64"):
        exchange.bucket("third", [("a.weight", 600)], torch.float64)
    dist.barrier()
    saved = exchange.state_dict()
    assert saved["steps"] == 3 and saved["residuals"]["b.weight"]["first"].numel() == 400
    return {row["name"]: (row["numel"], row["codec"]) for row in exchange.stats()["parameters"]}


def test_buckets_are_made_once_and_submitted_in_every_step():
    first, second = run(buckets)
    assert first == second == {
        "a.bias": (40, "fp32"), "a.weight": (600, "int4"),
        "b.weight": (400, "int4"), "c.weight": (512, "int4"),
    }  # fmt: skip


def closed(rank: int):
    exchange = GradientExchange("int4", min_bytes=0)
    exchange.reduce({"x": torch.ones(70_000)})
    before = exchange.stats()
    exchange.close()
    after = exchange.stats()
    return [before[key] == after[key] > 1 for key in ("raw_bytes", "wire_bytes", "ratio")]


def test_statistics_outlive_the_connections():
    assert run(closed) == [[True] * 3] * 2


def wrong_names(rank: int):
    with pytest.raises(thinwire.InvalidArgumentError, match="embd"):
        GradientExchange({"embd.*": "int8", "*": "int4"}, parameters={"embed.weight": 10})
    with pytest.raises(thinwire.InvalidArgumentError, match="matches no pattern"):
        GradientExchange({"*.bias": "int8"}, parameters={"embed.weight": 10})
    exchange = GradientExchange("int4", parameters={"w": 10})
    saved = {
        "format": 2, "codec": {"*": "int4"}, "world": 2, "rank": rank, "steps": 7, "sparse": [],
        "residuals": {"w": {"first": torch.ones(10), "second": torch.zeros(10)}},
    }  # fmt: skip
    exchange.load_state_dict(saved)
    assert exchange.steps == 7
    with pytest.raises(thinwire.InvalidArgumentError, match="expected 11"):
        exchange.bucket("b", [("w", 11)], torch.float32)
    saved["residuals"]["v"] = saved["residuals"]["w"]
    with pytest.raises(thinwire.InvalidArgumentError, match="'v', which is no parameter"):
        exchange.load_state_dict(saved)
    with pytest.raises(thinwire.InvalidArgumentError, match="pickle"):
        exchange.__getstate__()


def test_names_and_sizes_are_checked():
    run(wrong_names)


def failing(rank: int):
    """A bad gradient on one rank ends the step on both, and the exchange stays failed."""
    exchange = GradientExchange("int4", min_bytes=0, timeout_s=300)
    weights = {name: torch.nn.Parameter(torch.zeros(400_000)) for name in "ab"}
    for name, weight in weights.items():
        weight.grad = torch.ones(400_000)
        if rank == 1 and name == "b":
            weight.grad = weight.grad.to_sparse()
    for _ in range(2):
        with pytest.raises(thinwire.Error):
            exchange.reduce_gradients(weights)
    dist.barrier()  # rank 1 must not end rank 0's step by leaving
    return True


def test_a_failure_on_one_rank_ends_the_step_on_all():
    assert run(failing) == [True, True]  # before the exchange's timeout


def buckets_before(rank: int):
    """The first step has a bucket that never comes again, as DDP's may. Later steps repeat."""
    exchange = GradientExchange("int4", min_bytes=0, planned=True)
    names = ("once", "always")
    buckets = {n: exchange.bucket(n, [(n, 5000)], torch.float32) for n in names}
    results = []
    for step in range(5):
        used = names if step == 0 else names[1:]
        torch.manual_seed(10 * step + rank)
        sent = [exchange.submit(buckets[name], torch.randn(5000)) for name in used]
        exchange.end_step(repeats=step > 0)
        for each in sent:
            exchange.wait(each)
        results.append(sent[-1].tensor)
    return results, exchange.stats()["planned_chunks"]


def test_a_step_that_does_not_repeat_is_forgotten_when_an_order_is_predicted():
    (first, planned), (second, _) = run(buckets_before)
    assert planned > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def in_a_destroyed_group(rank: int):
    group = dist.new_group()
    exchange = GradientExchange("int4", group)
    dist.destroy_process_group(group)
    with pytest.raises(thinwire.InvalidArgumentError, match="a process group that was destroyed"):
        exchange.reduce({"a": torch.ones(8)})


def test_a_group_that_was_destroyed_is_a_typed_error():
    run(in_a_destroyed_group)
