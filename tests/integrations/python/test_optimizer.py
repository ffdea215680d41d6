"""Plain modules with an optimizer get the same weights under every policy and on every rank,
whatever the model."""

import pytest
import thinwire
import torch
from models import Shuffled, data, digest, loss_of, make_mlp
from policies import POLICIES, alone, close_to, make_sgd, train, wrapped
from ranks import outcomes_of, run
from thinwire.comm import Bucket
from thinwire.torch import GradientExchange
from thinwire.torch.exchange.bucket import MERGE_BYTES, FlatBucket, lay_out
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint


def one_policy(rank: int, policy: str, codec: str, kind: str):
    model = make_mlp(seed=rank)  # all ranks get rank 0's
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
    """Has tied weights, a module that is used twice, a frozen parameter, attention (which reads a
    child's weight without calling the child), and a parameter that the parent itself uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Linear(96, 32)
        self.twice = torch.nn.Linear(32, 32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.holder = torch.nn.Linear(32, 32)  # is never called
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
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.inner, 2, gamma=0.5)
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


def never_used(rank: int):
    """Return whether a layer that no rank uses stays the same, and whether one that all use
    does."""
    model = Shuffled()
    model.skip = "a"
    before = [layer.weight.detach().clone() for layer in (model.a, model.b)]
    inner = make_sgd(model, weight_decay=0.1)
    optimizer = wrapped(model, optimizer=inner, find_unused_parameters=True)
    for step in range(3):
        loss_of(model, data(step, rank)).backward()
        torch.set_default_dtype(torch.bfloat16)
        optimizer.step()
        torch.set_default_dtype(torch.float32)
    optimizer.finish()
    after = [layer.weight.detach() for layer in (model.a, model.b)]
    return [torch.equal(*pair) for pair in zip(before, after, strict=True)]


def test_unused_parameters_are_found_whatever_torchs_default_dtype_is():
    assert run(never_used) == [[True, False]] * 2


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
    assert results[0][0][1]  # zero gradients move no fresh parameter


def kept_while_unused(rank: int, codec: str):
    """Return whether this rank has a residual of a.weight (not if it owns the shard), whether the
    residual is unchanged while no rank uses the layer, and whether it is used afterwards."""
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
    """Return how many parameters have not been updated yet when step() returns."""
    model = make_mlp()
    optimizer = wrapped(model)
    counts = []
    for step in range(3):
        train(model, optimizer, 1, rank, step)
        counts.append(len(optimizer._pipeline.deferred()))
    loss_of(model, data(9, rank))
    return counts, len(optimizer._pipeline.deferred()), len(optimizer._pipeline.buckets)


def hooked(rank: int, momentum: float):
    """Hooks of the optimizer's step in a model of several buckets, which p3 steps one by one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 520), *(torch.nn.Linear(520, 520),) * 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = wrapped(model, optimizer=sgd, momentum=momentum)
    weights, seen = [], []

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number, rank, width=256)).square().mean().backward()
        optimizer.step()
        weights.append(digest(model))

    def see(optimizer: torch.optim.Optimizer, *_) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        seen.append((count, digest(model)))

    step(0)
    optimizer.finish()
    weights = [digest(model)]
    sgd.register_step_pre_hook(see)
    sgd.register_step_post_hook(see)
    for number in (1, 2):
        with pytest.warns(UserWarning, match="as policy='wfbp' does"):
            step(number)
    assert seen == [(4, weights[i]) for i in (0, 1, 1, 2)]
    return weights


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_step_hooks_are_called_once_for_a_whole_step(momentum):
    first, second = run(hooked, momentum)
    assert first == second


def differentiated_by_func(rank: int):
    """Gradients of each sample between two steps, by a forward pass inside of torch.func."""
    model, expected = make_mlp(), make_mlp()
    optimizer = wrapped(model)

    def loss(weights, sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (sample[None],)).square().mean()

    of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0))
    for step in range(3):
        train(model, optimizer, 1, rank, start=step)
        found = of_samples(dict(model.named_parameters()), data(step, rank))
        assert all(gradient.isfinite().all() for gradient in found.values())
    optimizer.finish()
    alone(expected, make_sgd(expected), 3)
    close_to(model, expected)
    return digest(model)


def test_a_forward_pass_inside_of_torch_func_makes_the_step_that_is_due():
    first, second = run(differentiated_by_func)
    assert first == second


def frozen_in_turns(rank: int, policy: str):
    """Freeze a layer after every second step, like the discriminator of a GAN."""
    model = make_mlp()
    optimizer = wrapped(model, policy, optimizer=make_sgd(model, weight_decay=0.1))
    for step in range(6):
        model[0].requires_grad_(step % 2 == 0)
        train(model, optimizer, 1, rank, step)
    optimizer.finish()
    return digest(model)


def test_a_layer_that_is_frozen_after_a_step_has_taken_it():
    assert len({found for policy in POLICIES for found in run(frozen_in_turns, policy)}) == 1


def normed(rank: int, policy: str):
    """weight_norm's own hook reads parameters before the module's forward pass."""
    torch.manual_seed(2)
    model = weight_norm(torch.nn.Linear(96, 8))
    optimizer = wrapped(model, policy)
    train(model, optimizer, 3, rank)
    optimizer.finish()
    return digest(model)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_hooks_that_read_parameters_find_them_stepped():
    assert len({found for policy in ("p3", "wfbp") for found in run(normed, policy)}) == 1


def lowered(rank: int, policy: str):
    model = make_mlp()
    optimizer = wrapped(model, policy)
    train(model, optimizer, 1, rank)
    optimizer.finish()
    model.bfloat16()
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, data(step, rank).bfloat16()).backward()
        optimizer.step()
    optimizer.finish()
    return digest(model)


def test_a_model_may_get_another_dtype_later():
    assert len({found for policy in ("p3", "wfbp") for found in run(lowered, policy)}) == 1


def test_p3_steps_as_the_next_forward_pass_reaches_a_layer():
    for counts, left, all_units in run(overlapping):
        assert counts == [all_units] * 3
        assert left == 0


def test_buckets_merge_small_neighbours_and_keep_large_ones_apart():
    sizes = [10, 20, MERGE_BYTES // 4, 30, MERGE_BYTES, 40, MERGE_BYTES // 2]
    parameters = [(f"p{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    buckets = lay_out(FlatBucket, GradientExchange("int4").bucket, parameters)
    assert [bucket.names for bucket in buckets] == [["p0", "p1", "p2", "p3"], ["p4", "p5"], ["p6"]]


def made_twice(rank: int, last_inside: bool):
    """A reentrant checkpoint computes a gradient of a layer that is also used in another
    checkpoint, or directly."""
    model = make_mlp(width=768)
    optimizer = wrapped(model, "p3")

    def inside(step: int) -> torch.Tensor:
        return checkpoint(model[0], data(step, rank, 768).requires_grad_(), use_reentrant=True)

    if last_inside:
        first, second = inside(0), inside(1)
    else:  # autograd runs in reverse
        first, second = model[0](data(0, rank, 768)), inside(1)
    (model[1:](first).square().mean() + model[1:](second).square().mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("last_inside", [True, False])
def test_a_gradient_that_checkpoints_make_twice_is_told_from_two_backward_passes(last_inside):
    for outcome in outcomes_of(made_twice, last_inside):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "made again before step()" in outcome.message
        assert "use_reentrant=False" in outcome.message
        assert ("no_sync" in outcome.message) != last_inside


def interrupted(rank: int, policy: str):
    """Rank 0 gets Ctrl-C while it waits for a mean, lives on until the others have an error, and
    then calls close(), as a finally would."""
    model = make_mlp()
    optimizer = wrapped(model, policy)
    train(model, optimizer, 1, rank)
    wait = Bucket.wait_stream

    def wait_and_stop(*arguments):
        wait(*arguments)
        raise KeyboardInterrupt

    if rank == 0:
        Bucket.wait_stream = wait_and_stop
    try:
        train(model, optimizer, 3, rank)
    except KeyboardInterrupt:
        Bucket.wait_stream = wait
        with pytest.raises(thinwire.Error, match="interrupted by KeyboardInterrupt"):
            train(model, optimizer, 2, rank)
        torch.distributed.barrier()
        optimizer.close()
        optimizer.close()
        return ""
    except thinwire.Error as error:
        torch.distributed.barrier()
        return str(error)
    return "no error"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_reaches_the_peers_and_close_after_it_is_quiet(policy):
    first, other = (outcome.value for outcome in outcomes_of(interrupted, policy))
    assert first == "" and "rank 0 was interrupted by KeyboardInterrupt" in other
