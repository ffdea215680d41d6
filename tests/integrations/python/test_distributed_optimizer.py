"""DistributedOptimizer: the same weights under every policy, on every rank, and what training loops
do with optimizers."""

import contextlib
import copy

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import Shuffled, data, digest, make_mlp
from ranks import outcomes_of, run
from thinwire.torch import DistributedOptimizer, GradientExchange
from thinwire.torch.exchange.flat_bucket import MERGE_BYTES, FlatBucket, lay_out

POLICIES = ("p3", "wfbp", "fifo")


def make_sgd(model: torch.nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def wrapped(model, policy="p3", optimizer=None, **options) -> DistributedOptimizer:
    inner = make_sgd(model) if optimizer is None else optimizer
    options = {"codec": "fp32", "min_bytes": 0, **options}
    return DistributedOptimizer(inner, model, policy=policy, **options)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return (out - torch.sin(x[:, : out.shape[1]])).square().mean()


def train(model, optimizer, steps: int, rank: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()


def alone(model, optimizer, steps: int, world: int = 2) -> None:
    """The weights that all ranks together must come to, up to rounding."""
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, data(step, rank)) / world).backward()
        optimizer.step()


def close_to(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def one_policy(rank: int, policy: str, codec: str, kind: str):
    model = make_mlp(seed=rank)  # rank 0's is taken
    optimizer = wrapped(
        model,
        policy,
        codec=codec,
        optimizer={
            "sgd": lambda: make_sgd(model, nesterov=True, weight_decay=1e-3),
            "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "rmsprop": lambda: torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False),
        }[kind](),
    )
    train(model, optimizer, 20, rank)
    optimizer.finish()
    return digest(model)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_every_policy_gives_the_same_weights(codec, kind):
    digests = [run(one_policy, policy, codec, kind) for policy in POLICIES]
    assert len({value for ranks in digests for value in ranks}) == 1


def against_one_process(rank: int, policy: str):
    model = make_mlp()
    train(model, optimizer := wrapped(model, policy), 10, rank)
    optimizer.finish()
    expected = make_mlp()
    alone(expected, make_sgd(expected), 10)
    close_to(model, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_as_one_process_does(policy):
    run(against_one_process, policy)


class Odd(torch.nn.Module):
    """Tied weights, a module used twice, a frozen parameter, attention (which reads a child's
    weight without calling it), and a parameter that the parent uses itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Linear(96, 32)
        self.twice = torch.nn.Linear(32, 32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.holder = torch.nn.Linear(32, 32)  # never called
        self.scale = torch.nn.Parameter(torch.ones(32))
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.embed(x)))
        x = self.twice(torch.tanh(x))[None]
        x = self.attention(x, x, x, need_weights=False)[0][0]
        x = self.frozen(x) * self.scale
        return torch.nn.functional.linear(self.tied(x), self.holder.weight, self.holder.bias)


def odd_model(rank: int, policy: str):
    model, expected = Odd(), Odd()
    optimizer = wrapped(model, policy)
    train(model, optimizer, 10, rank)
    optimizer.finish()
    alone(expected, make_sgd(expected), 10)
    close_to(model, expected)
    return digest(model)


def test_odd_models_train_as_they_do_alone():
    digests = [run(odd_model, policy) for policy in POLICIES]
    assert len({value for ranks in digests for value in ranks}) == 1


def scheduled(rank: int, policy: str):
    model = make_mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2:].parameters()}]
    optimizer = wrapped(model, policy, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rates = []
    for step in range(6):
        train(model, optimizer, 1, rank, step)
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    optimizer.finish()
    return digest(model), rates


def test_schedulers_and_param_groups():
    results = [run(scheduled, policy) for policy in POLICIES]
    assert len({rank[0] for ranks in results for rank in ranks}) == 1
    assert results[0][0][1][-1] == pytest.approx([0.01 / 8, 0.1 / 8])


def accumulated(rank: int, policy: str):
    model = make_mlp()
    optimizer = wrapped(model, policy)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with optimizer.no_sync():
            loss_of(model, data(2 * step, rank)).backward()
        loss_of(model, data(2 * step + 1, rank)).backward()
        optimizer.step()
    optimizer.finish()
    return digest(model), optimizer.stats()


def test_gradient_accumulation_sends_once():
    results = [run(accumulated, policy) for policy in POLICIES]
    assert len({rank[0] for ranks in results for rank in ranks}) == 1
    assert results[0][0][1]["steps"] == 5
    numel = sum(p.numel() for p in make_mlp().parameters())
    assert results[0][0][1]["raw_bytes"] == pytest.approx(5 * numel * 4, rel=0.01)


def unused(rank: int, policy: str, find: bool):
    model = Shuffled()
    optimizer = wrapped(model, policy, find_unused_parameters=find)
    never = model.a.weight.detach().clone()
    for step in range(6):
        model.skip = "a" if step < 3 else ("b", "c")[(step + rank) % 2]
        train(model, optimizer, 1, rank, step)
        if step == 2:
            optimizer.finish()
            unmoved = torch.equal(model.a.weight, never)
    optimizer.finish()
    return digest(model), unmoved


@pytest.mark.parametrize("find", [False, True])
def test_unused_parameters(find):
    results = [run(unused, policy, find) for policy in POLICIES]
    assert len({rank[0] for ranks in results for rank in ranks}) == 1
    assert results[0][0][1]  # zeros and nothing move a fresh parameter alike


def kept_while_unused(rank: int, codec: str):
    """Whether this rank keeps something of a.weight (not where it owns it), and whether that waits
    while nobody uses it, and goes on afterwards."""
    model = Shuffled()
    optimizer = wrapped(model, codec=codec, find_unused_parameters=True)
    train(model, optimizer, 3, rank)
    before = optimizer.state_dict()["thinwire"]["residuals"]["a.weight"]["first"]
    model.skip = "a"
    train(model, optimizer, 3, rank, 3)
    meanwhile = optimizer.state_dict()["thinwire"]["residuals"]["a.weight"]["first"]
    model.skip = ""
    train(model, optimizer, 1, rank, 6)
    after = optimizer.state_dict()["thinwire"]["residuals"]["a.weight"]["first"]
    keeps = before.any().item()
    return keeps, torch.equal(before, meanwhile), keeps == (not torch.equal(before, after))


@pytest.mark.parametrize("codec", ["int4", "topk:density=0.05"])
def test_what_was_kept_of_an_unused_parameter_waits(codec):
    found = run(kept_while_unused, codec)
    assert any(keeps for keeps, _, _ in found)
    assert all(waits and goes_on for _, waits, goes_on in found)


def clipped(rank: int, policy: str):
    model = make_mlp()
    optimizer = wrapped(model, policy)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        if policy == "p3":
            with pytest.warns(UserWarning, match="waits for them"):
                norm = optimizer.clip_grad_norm_(0.05)
        else:
            norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    expected = make_mlp()
    inner = make_sgd(expected)
    for step in range(5):
        inner.zero_grad()
        for r in range(2):
            (loss_of(expected, data(step, r)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        inner.step()
    close_to(model, expected)
    return digest(model), norm.item()


def test_clipping_by_norm_waits_for_all():
    results = [run(clipped, policy) for policy in POLICIES]
    assert len({rank for ranks in results for rank in ranks}) == 1


def clipped_too_early(rank: int):
    model = make_mlp()
    optimizer = wrapped(model)
    loss_of(model, data(0, rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"call optimizer.synchronize\(\)"):
        optimizer.step()
    dist.barrier()  # the group fails when the first rank goes


def test_gradients_changed_after_they_were_sent_are_an_error():
    run(clipped_too_early)


def scaled(rank: int):
    model = make_mlp()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, data(step, rank))
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.finish()
    return digest(model), scales


def test_a_loss_scaler_skips_the_step_on_all():
    first, second = run(scaled)
    assert first == second
    assert first[1] == [256, 128, 128, 128]


def resumed(rank: int, stop: int):
    """Eight steps; after `stop` of them everything is made anew from what was saved."""
    model = make_mlp()
    optimizer = wrapped(model, codec="int4")
    train(model, optimizer, stop, rank)
    saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    saved = copy.deepcopy(saved)
    optimizer.close()
    model = make_mlp(seed=99)
    optimizer = wrapped(model, codec="int4")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 8 - stop, rank, stop)
    optimizer.finish()
    return digest(model)


def test_a_resumed_run_goes_on_bit_by_bit():
    digests = [run(resumed, stop) for stop in (3, 5)]
    assert len({value for ranks in digests for value in ranks}) == 1


def saved_between(rank: int):
    """model.state_dict() right after step(), while the step is still under way."""
    model = make_mlp()
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.finish()
    return all(torch.equal(saved[name], p) for name, p in model.named_parameters())


def test_a_models_state_dict_has_the_whole_step():
    assert run(saved_between) == [True, True]


def predicted(rank: int, planned: bool):
    model = make_mlp()
    optimizer = wrapped(model, codec="int4", planned=planned)
    train(model, optimizer, 5, rank)
    optimizer.finish()
    return digest(model), optimizer.stats()["planned_chunks"]


def test_an_order_that_is_predicted_changes_no_weight():
    ahead, announced = run(predicted, True), run(predicted, False)
    assert len({digest for digest, _ in ahead + announced}) == 1
    assert all(chunks > 0 for _, chunks in ahead) and not any(chunks for _, chunks in announced)


def overlapping(rank: int):
    """How many parameters have not stepped yet when step() returns."""
    model = make_mlp()
    optimizer = wrapped(model)
    counts = []
    for step in range(3):
        train(model, optimizer, 1, rank, step)
        counts.append(len(optimizer._pipeline.deferred()))
    loss_of(model, data(9, rank))
    return counts, len(optimizer._pipeline.deferred()), len(optimizer._pipeline.buckets)


def test_p3_steps_as_the_next_forward_pass_reaches_a_layer(monkeypatch):
    for counts, left, all_units in run(overlapping):
        assert counts == [all_units] * 3
        assert left == 0


def test_buckets_merge_small_neighbours_and_keep_large_ones_apart():
    sizes = [10, 20, MERGE_BYTES // 4, 30, MERGE_BYTES, 40, MERGE_BYTES // 2]
    parameters = [(f"p{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    buckets = lay_out(FlatBucket, GradientExchange("int4"), parameters)
    assert [bucket.names for bucket in buckets] == [["p0", "p1", "p2", "p3"], ["p4", "p5"], ["p6"]]


def backward_twice(rank: int, on: set[int]):
    """On these ranks; the others learn of it when they wait for the next step."""
    model = make_mlp()
    optimizer = wrapped(model)
    with pytest.raises(thinwire.InvalidArgumentError, match=rf"rank {min(on)}.*no_sync\(\)"):
        for step in range(3):
            loss_of(model, data(step, rank)).backward()
            if rank in on:
                loss_of(model, data(9, rank)).backward()
            optimizer.step()
            optimizer.finish()
    dist.barrier()
    with contextlib.suppress(thinwire.InvalidArgumentError):  # what was in flight ends the same way
        optimizer.close()


@pytest.mark.parametrize("on", [{0}, {1}])
def test_two_backward_passes_without_no_sync_are_an_error_on_every_rank(on):
    run(backward_twice, on)


def made_anew(rank: int):
    """On the same model, half-way, with a layer that is unfrozen then."""
    model = make_mlp()
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank)
    before = model[0].weight.clone()
    optimizer.close()
    model[0].requires_grad_(True)
    optimizer = wrapped(model)
    train(model, optimizer, 3, rank, start=3)
    optimizer.finish()
    return digest(model), torch.equal(before, model[0].weight)


def test_a_closed_optimizer_lets_its_model_go():
    first, second = run(made_anew)
    assert first == second
    assert not first[1]


def one_rank_stops(rank: int):
    model = make_mlp()
    optimizer = wrapped(model, timeout_s=2)
    for step in range(10):
        if rank == 1 and step == 3:
            return
        train(model, optimizer, 1, rank, step)


def test_a_lost_rank_is_a_typed_error():
    outcomes = outcomes_of(one_rank_stops, timeout_s=30)
    assert outcomes[0].error in {"PeerLostError", "TimeoutError"}
    assert outcomes[0].seconds < 15


class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


def coupled(rank: int):
    model = make_mlp()
    inner = Coupled(model.parameters(), lr=0.1)
    inner.param_groups[0]["seen"] = 0
    optimizer = wrapped(model, optimizer=inner)
    with pytest.raises(thinwire.InvalidArgumentError, match="policy='wfbp'"):
        train(model, optimizer, 2, rank)
    dist.barrier()


def test_what_couples_parameters_is_refused():
    run(coupled)


def refused(rank: int):
    model = make_mlp()
    with pytest.raises(thinwire.InvalidArgumentError, match="LBFGS"):
        wrapped(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(thinwire.InvalidArgumentError, match="policy is 'best'"):
        wrapped(model, policy="best")
    with pytest.raises(thinwire.InvalidArgumentError, match="the model has not"):
        wrapped(model, optimizer=torch.optim.SGD(make_mlp().parameters(), lr=0.1))


def test_wrong_arguments_are_typed_errors():
    run(refused)
