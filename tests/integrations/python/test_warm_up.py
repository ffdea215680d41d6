"""compress(ddp, codec, warm_up_steps=n): n steps in fp32 or by warm_up_codec, then the codec,
starting in the same step on all ranks."""

import re

import pytest
import thinwire
import thinwire.torch as tw
import torch
import torch.distributed as dist
from models import data, digest, gradients, loss_of, make_mlp, wrap
from ranks import outcomes_of, run
from test_recovery import regroup
from thinwire.torch import State
from torch.nn.parallel import DistributedDataParallel

STEPS = 3  # steps of a warm-up
ALL = 6
DEFAULT = {"1d": "fp32", "*": "int4"}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def step(ddp, optimizer, number: int) -> torch.Tensor:
    """Return the gradients that the optimizer got."""
    optimizer.zero_grad()
    loss_of(ddp, data(number, dist.get_rank())).backward()
    found = gradients(ddp)
    optimizer.step()
    return found


class InTurns:
    """State of a hook that uses one State for some steps and then another one, so that both get the
    same buckets."""

    def __init__(self, first: State, then: State) -> None:
        self._first, self._then = first, then

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._first.steps == STEPS and self._then.steps == 0 and bucket.index() == 0:
            self._then.load_state_dict(self._first.state_dict())
        state = self._first if self._first.steps < STEPS else self._then
        return state.reduce_bucket(bucket)


def reduce_bucket(state: InTurns, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce_bucket(bucket)


def exchanged(rank: int, codec, whole: bool, first: str = "fp32"):
    model = make_mlp()
    if whole:
        ddp, _ = wrap(model, codec, warm_up_steps=STEPS, warm_up_codec=first)
    else:
        ddp = DistributedDataParallel(model)
        options = {
            "names": {p: name for name, p in model.named_parameters()},
            "structure": thinwire.torch.tensors.structure_of(model),
            "min_bytes": 0,
        }
        ddp.register_comm_hook(
            InTurns(State(first, **options), State(codec, **options)), reduce_bucket
        )
    optimizer = adamw(model)
    return [step(ddp, optimizer, number) for number in range(ALL)], digest(model)


@pytest.mark.parametrize(
    ("first", "codec", "world"),
    [
        ("fp32", "int4", 3),
        ("fp32", "adaptive:bits=2", 2),
        ("fp32", DEFAULT, 2),
        ("fp32", "bf16", 2),
        ("int8", "int4", 3),
        ("int8", "adaptive:bits=1", 2),
        ("bf16", DEFAULT, 2),
    ],
)
def test_it_is_the_first_codec_and_then_the_other_one(first, codec, world):
    """The bits are those of the two codecs in turn, and the first codec's residuals are kept."""
    ours = run(exchanged, codec, True, first, world=world)
    apart = run(exchanged, codec, False, first, world=world)
    assert len({bits for _, bits in ours}) == 1
    plain = run(exchanged, first, False, first, world=world)[0][0]
    for number in range(ALL):
        assert torch.equal(ours[0][0][number], apart[0][0][number]), number
        assert torch.equal(ours[0][0][number], plain[number]) == (number < STEPS), number


def accumulated(rank: int):
    model = make_mlp()
    ddp, state = wrap(model, "int4", warm_up_steps=STEPS)
    optimizer = sgd(model)
    used = []
    for number in range(ALL):
        with ddp.no_sync():
            loss_of(ddp, data(100 + number, rank)).backward()
        step(ddp, optimizer, number)
        used.append((state.codec, state.warmed_up))
    return used


def test_it_counts_the_steps_of_the_optimizer():
    """Backward passes that accumulate gradients do not count."""
    before, after = [("fp32", False)] * STEPS, [("int4", True)] * (ALL - STEPS)
    assert run(accumulated)[0] == before + after


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, None: None}
WAYS = [("int4", None), (DEFAULT, "adamw"), ("onebit", "sgd"), ("onebit", "adamw"),
        ("topk:density=0.02", "sgd")]  # fmt: skip


def make(codec, optimized: str | None, seed: int, **options):
    model = make_mlp(seed=seed)
    optimizer = OPTIMIZERS[optimized or "adamw"](model)
    if optimized is not None:
        options["optimizer"] = optimizer
    # With unused parameters, DDP keeps its first buckets.
    ddp, state = wrap(model, codec, find_unused_parameters=True, warm_up_steps=STEPS, **options)
    return model, ddp, state, optimizer


def resumed(rank: int, codec, optimized: str | None, pause: int | None, used: bool):
    model, ddp, state, optimizer = make(codec, optimized, 7)
    for number in range(ALL):
        if number == pause:
            saved = state.state_dict(), model.state_dict(), optimizer.state_dict()
            if used:  # the same state goes back from a step after the warm-up
                saved = [clone(one) for one in saved]
                for later in range(number, ALL + 1):
                    step(ddp, optimizer, later)
            else:
                state.close()
                model, ddp, state, optimizer = make(codec, optimized, 99)
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
            state.load_state_dict(saved[0])
        step(ddp, optimizer, number)
    return digest(model), state.warmed_up


def clone(saved):
    if isinstance(saved, torch.Tensor):
        return saved.clone()
    if isinstance(saved, dict):
        return type(saved)((key, clone(value)) for key, value in saved.items())
    return saved


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("codec", "optimized"), WAYS)
def test_resuming_in_it_and_behind_it_is_bitwise_never_having_stopped(codec, optimized, used):
    straight = run(resumed, codec, optimized, None, False)
    assert straight[0] == straight[1]
    for pause in (STEPS - 1, STEPS, STEPS + 1):
        assert run(resumed, codec, optimized, pause, used) == straight, pause


def with_momentum(rank: int, codec):
    """Return SGD's change of the parameters in each step, divided by the learning rate."""
    model = make_mlp()
    optimizer = sgd(model)
    options = {} if codec is None else {"optimizer": optimizer, "momentum": 0.9}
    warm_up = {} if codec is None else {"warm_up_steps": STEPS}
    ddp, _ = wrap(model, codec, **options, **warm_up)
    moved = []
    for number in range(STEPS + 1):
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        step(ddp, optimizer, number)
        moved.append(before - torch.cat([p.detach().flatten() for p in model.parameters()]))
    return moved


def test_the_momentum_that_the_exchange_owns_goes_on_after_it():
    plain, ours = run(with_momentum, None)[0], run(with_momentum, "int8")[0]
    for number in range(STEPS):
        torch.testing.assert_close(ours[number], plain[number], rtol=1e-3, atol=1e-6)
    assert (ours[-1] - plain[-1]).norm() < 0.02 * plain[-1].norm()


def cut_off(rank: int, codec, optimized: str | None, made: int, ahead: int | None, folder: str):
    """Cut a run off after `made` steps. The next step has begun on no rank or on one; it switches
    to the codec if it is the first one after the warm-up."""
    model, ddp, state, optimizer = make(codec, optimized, 7, recoverable=True, timeout_s=10.0)
    for number in range(ALL):
        if number == made:
            if rank == ahead:
                with pytest.raises(thinwire.Error):
                    step(ddp, optimizer, number)
            else:
                state.fail(thinwire.Error("this rank stops here"))
            regroup(folder, rank, 2)
            result = state.recover(module=model, optimizer=optimizer)
            assert (result.step, result.equal) == (made, True)
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            ddp.register_comm_hook(state, tw.hook)
        step(ddp, optimizer, number)
    return digest(model), state.codec


@pytest.mark.parametrize("ahead", [None, 0, 1])
@pytest.mark.parametrize(("codec", "optimized"), [(DEFAULT, None), ("onebit", "adamw")])
def test_ranks_that_were_cut_off_on_both_sides_of_its_end_go_on_alike(
    codec, optimized, ahead, tmp_path
):
    straight = run(cut_off, codec, optimized, ALL, None, str(tmp_path))
    assert straight[0] == straight[1] and straight[0][1] == codec
    for made in (STEPS - 1, STEPS, STEPS + 1):
        folder = tmp_path / str(made)
        folder.mkdir()
        assert run(cut_off, codec, optimized, made, ahead, str(folder)) == straight, made


def refused(rank: int):
    ddp, module = DistributedDataParallel(make_mlp()), make_mlp()
    for codec, steps, words in [
        ("auto", 3, "codec='auto'"),
        ("fp32", 3, "codec 'fp32'.*leave warm_up_steps out"),
        ({"1d": "fp32", "*": "fp32"}, 3, "codec 'fp32'"),
        ("int4", 0, "warm_up_steps is 0"),
        ("int4", 1.5, "warm_up_steps is 1.5"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            tw.compress(ddp, codec, warm_up_steps=steps)
    with pytest.raises(thinwire.InvalidArgumentError, match="without delay=1"):
        tw.compress(module, "int4", optimizer=sgd(module), warm_up_steps=3)
    with pytest.raises(thinwire.InvalidArgumentError, match="a model under DDP"):
        tw.compress(module, "int4", warm_up_steps=3)
    for codec, options, words in [
        ("int8", {"warm_up_steps": 3, "warm_up_codec": "int8"}, "change to after so many.*in int8"),
        ("int4", {"warm_up_steps": 3, "warm_up_codec": "int4"}, "expected one of fp32, bf16, int8"),
        ("int4", {"warm_up_codec": "int8"}, "without warm_up_steps"),
        (
            "onebit",
            {"warm_up_steps": 3, "warm_up_codec": "int8", "optimizer": adamw(ddp)},
            "1-bit Adam",
        ),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            tw.compress(ddp, codec, **options)
    tw.compress(ddp)  # the refusals have left nothing behind


def test_where_it_can_not_be_meant_it_is_a_typed_error():
    run(refused)


def unlike(rank: int, of_ranks, made):
    """One step with this rank's options, from a state dict with this rank's number of steps."""
    ddp, state = wrap(make_mlp(), **of_ranks[rank], timeout_s=10.0)
    if made is not None:
        state.load_state_dict({**state.state_dict(), "steps": made[rank]})
    loss_of(ddp, data(0, rank)).backward()


WARM = {"codec": "int4", "warm_up_steps": 3}


@pytest.mark.parametrize(
    ("first", "second", "made", "option", "values"),
    [
        (WARM, {**WARM, "warm_up_steps": 5}, None, "warm_up_steps", ("3", "5")),
        (WARM, {"codec": "int4"}, None, "warm_up_steps", ("3", "None")),
        (WARM, {**WARM, "warm_up_codec": "int8"}, None, "warm_up_codec", ("fp32", "int8")),
        ({"codec": "fp32"}, WARM, None, "codec", ("fp32", "int4")),
        ({"codec": "auto"}, {"codec": "fp32"}, None, "codec", ("auto", "fp32")),
        ({"codec": "auto"}, {"codec": "int4"}, None, "codec", ("auto", "int4")),
        (WARM, WARM, (2, 0), "steps_before", ("2", "0")),
    ],
)
def test_ranks_that_would_change_the_codec_apart_get_an_error_with_both_values(
    first, second, made, option, values
):
    for outcome in outcomes_of(unlike, [first, second], made):
        assert outcome.error == "MismatchError", outcome
        for rank, value in enumerate(values):
            assert re.search(rf"rank {rank} (was set up )?with {option}={value}\b", outcome.message)
