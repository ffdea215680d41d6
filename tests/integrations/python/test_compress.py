"""compress(): one call for DDP, FSDP2, replicate() and plain modules."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import re
import subprocess
import sys
import weakref
from collections import OrderedDict

import pytest
import thinwire
import thinwire.torch as tw
import torch
from models import data, digest, loss_of, make_mlp
from ranks import HANG_S, outcomes_of, run
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

CODECS = [
    "fp32", "bf16", "int8", "int4", "adaptive", "int8:rounding=stochastic",
    {"0.*": "int8", "*.bias": "fp32", "*": "int4"},
]  # fmt: skip
WITH_MOMENTUM = ["onebit", "topk:density=0.02"]


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps=8) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()


def by_compress(rank: int, codec):
    model = make_mlp()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    made = tw.compress(ddp, codec, optimizer=optimizer, min_bytes=0)
    assert isinstance(made, tw.Compression)
    train(ddp, optimizer, rank)
    return digest(model), made.stats()["wire_bytes"]


def by_hook(rank: int, codec):
    model = make_mlp()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    momentum = 0.9 if codec in WITH_MOMENTUM else 0.0
    state = tw.State(codec, names=names, min_bytes=0, momentum=momentum)
    ddp.register_comm_hook(state, tw.hook)
    if momentum:
        state.take_momentum(optimizer)
    train(ddp, optimizer, rank)
    return digest(model), state.stats()["wire_bytes"]


@pytest.mark.parametrize("codec", CODECS + WITH_MOMENTUM, ids=str)
def test_its_bits_are_those_of_the_hook(codec):
    assert run(by_compress, codec) == run(by_hook, codec)


def replicated(rank: int, codec, ours: bool):
    model = make_mlp()
    if ours:
        model = replicate(model)
        made = tw.compress(model, codec, min_bytes=0)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model)
        made = tw.compress(wrapped, codec, min_bytes=0)
    train(wrapped, sgd(model), rank, steps=4)
    return digest(model), sorted(row["name"] for row in made.stats()["parameters"])


def test_a_replicated_module_has_the_bits_of_ddp():
    assert run(replicated, "int4", True) == run(replicated, "int4", False)


def plain(rank: int, codec, accumulate: bool):
    model = make_mlp(seed=7 + rank)  # this rank gets rank 0's parameters
    made = tw.compress(model, codec, min_bytes=0)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        if accumulate:
            with made.no_sync():
                loss_of(model, data(step, rank)).backward()
        loss_of(model, data(100 + step, rank)).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    return grads, digest(model), made.stats()["steps"]


def alone(rank: int, accumulate: bool):
    model = make_mlp()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        for other in range(2):
            if accumulate:
                (loss_of(model, data(step, other)) / 2).backward()
            (loss_of(model, data(100 + step, other)) / 2).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    return grads


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_plain_modules_means_are_there_after_backward(accumulate):
    first, second = run(plain, "fp32", accumulate)
    torch.testing.assert_close(first[0], run(alone, accumulate, world=1)[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:] and first[2] == 4


@pytest.mark.parametrize("codec", ["int4", {"*.bias": "fp32", "*": "int8"}], ids=str)
def test_a_plain_modules_replicas_are_equal_under_compression(codec):
    first, second = run(plain, codec, False)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.layers = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(3))
        self.order = (0, 1, 2, 0) if shared else (0, 1, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.requires_grad_()
        for number in self.order:
            x = checkpoint(self.layers[number], x, use_reentrant=self.reentrant).tanh()
        return {"out": [x]}


def checkpointed(rank: int, reentrant: bool, shared: bool):
    model = Checkpointed(reentrant, shared)
    made = tw.compress(model, "int4", min_bytes=0)
    for step in range(3):
        model(data(step, rank))["out"][0].square().mean().backward()
        if not reentrant:  # a backward pass that gives no parameter a gradient is no step
            x = data(step, rank)
            torch.autograd.grad(model(x)["out"][0].sum(), x)
    return [p.grad.sum().item() for p in model.parameters()], made.stats()["steps"]


@pytest.mark.parametrize("shared", [False, True])
def test_reentrant_checkpoints_are_one_step(shared):
    inside, flat = run(checkpointed, True, shared), run(checkpointed, False, shared)
    assert inside == flat and inside[0] == inside[1]
    assert inside[0][1] == 3


def failing(rank: int, layer: int):
    """On rank 1 a backward pass fails at the input of a layer, and the program goes on."""
    model = make_mlp(width=768)
    made = tw.compress(model, "int4", min_bytes=0, timeout_s=100)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("no memory")

    for step in range(3):
        out = model[0:layer](data(step, rank, 768))
        if step == 1 and rank == 1:
            out.register_hook(fail)
        try:
            model[layer:](out).square().mean().backward()
        except ValueError:
            loss_of(model, data(step, rank, 768)).backward()  # another batch instead
    return [p.grad.sum().item() for p in model.parameters()], made.stats()["steps"]


def test_a_backward_pass_that_failed_before_it_sent_anything_is_made_again():
    first, second = run(failing, 4)
    assert first == second and first[1] == 3


def test_one_that_failed_later_is_an_error_on_every_rank():
    for outcome in outcomes_of(failing, 2):
        assert outcome.error == "Error", outcome.trace
        assert "rank 1: the backward pass before this one failed" in outcome.message


def thawed(rank: int):
    model = make_mlp()
    model[0].requires_grad_(False)
    tw.compress(model, "int4", min_bytes=0)
    loss_of(model, data(0, rank)).backward()
    model[0].requires_grad_(True)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'0\.weight' is trained now"):
        loss_of(model, data(1, rank)).backward()


def replaced(rank: int):
    model = make_mlp()
    tw.compress(model, "int4", min_bytes=0)
    loss_of(model, data(0, rank)).backward()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'0\.weight' is trained now"):
        loss_of(model, data(1, rank)).backward()


def thawed_with_optimizer(rank: int):
    model = make_mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    tw.compress(model, "int4", optimizer=optimizer, min_bytes=0)
    train(model, optimizer, rank, steps=1)
    model[0].requires_grad_(True)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'0\.weight' is trained now"):
        train(model, optimizer, rank, steps=1)


@pytest.mark.parametrize("change", [thawed, thawed_with_optimizer, replaced])
def test_a_parameter_that_is_trained_later_is_an_error(change):
    run(change)


def stepped_in_backward(rank: int, before: bool):
    """Each parameter has an optimizer, which a hook steps as soon as its gradient is made."""
    model = make_mlp()
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    def add_hooks() -> None:
        for parameter in own:
            parameter.register_post_accumulate_grad_hook(hook)

    if before:
        add_hooks()
    tw.compress(model, "fp32")
    if not before:
        loss_of(model, data(0, rank)).backward()  # from the second pass on buckets are sent early
        add_hooks()
    loss_of(model, data(1, rank)).backward()


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_in_backward_is_an_error_since_its_gradients_are_not_reduced(before):
    for outcome in outcomes_of(stepped_in_backward, before):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "is None at its end" in outcome.message and "post_accumulate" in outcome.message


def dropped(rank: int, optimized: bool):
    model = make_mlp()
    optimizer = sgd(model)
    tw.compress(model, optimizer=optimizer if optimized else None)  # the model keeps it alive
    gc.collect()
    train(model, optimizer, rank, steps=2)
    assert len(set(model.state_dict())) == 6
    threads, kept = len(os.listdir("/proc/self/task")), weakref.ref(model)
    del model, optimizer
    gc.collect()
    return kept() is None, len(os.listdir("/proc/self/task")) < threads


@pytest.mark.parametrize("optimized", [False, True])
def test_a_plain_module_goes_with_its_connections(optimized):
    assert run(dropped, optimized) == [(True, True)] * 2


class Strided(torch.nn.Module):
    """Parameters and buffers whose elements are not stored in the order of their indices."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.weight = torch.nn.Parameter(torch.randn(96, 192)[:, ::2].t())
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("turned", torch.randn(3, 4).t())


def strided(rank: int):
    model = Strided(rank)
    tw.compress(model, "int4")
    return [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]


def test_replicas_of_a_strided_model_begin_alike():
    first, second = run(strided)
    assert first == second


def overlapped(rank: int, codec, overlaps: bool, schedule: bool):
    model = make_mlp()
    optimizer = sgd(model)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    policy = "p3" if overlaps else "wfbp"
    made = tw.compress(model, codec, optimizer=optimizer, min_bytes=0, policy=policy)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, data(step, rank)).backward()
        optimizer.step()
        if rates is not None:
            rates.step()
    made.finish()
    return digest(model)


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "int4", "onebit"])
@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_an_optimizer_of_a_plain_module_steps_by_layers(codec, schedule):
    assert run(overlapped, codec, True, schedule) == run(overlapped, codec, False, schedule)


def resumed(rank: int, pause: bool):
    def make(seed: int):
        model = make_mlp(seed)
        optimizer = sgd(model)
        return model, optimizer, tw.compress(model, "int4", optimizer=optimizer, min_bytes=0)

    model, optimizer, made = make(7)
    train(model, optimizer, rank, steps=3)
    if pause:
        saved = model.state_dict(), optimizer.state_dict(), made.state_dict()
        made.close()
        model, optimizer, made = make(99)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        made.load_state_dict(saved[2])
    train(model, optimizer, rank, steps=3)
    made.finish()
    return digest(model)


def test_a_plain_module_resumes_bit_by_bit():
    assert run(resumed, True) == run(resumed, False)


def closed(rank: int):
    model = make_mlp()
    optimizer = sgd(model)
    made = tw.compress(model, optimizer=optimizer)
    train(model, optimizer, rank, steps=2)
    made.close()
    assert type(optimizer).step is optimizer.step.__func__
    train(model, optimizer, rank, steps=2)  # without compression
    again = tw.compress(model, "int8")
    train(model, optimizer, rank, steps=2)
    again.close()


def test_after_close_the_model_is_free():
    run(closed)


def twice(rank: int):
    ddp = DistributedDataParallel(make_mlp())
    tw.compress(ddp, codec="int8")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"compress\(model, codec='int8'\)"):
        tw.compress(ddp)
    lower = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    mixed = DistributedDataParallel(make_mlp())
    mixed.mixed_precision = lower  # the argument makes a stream: an error of a torch for GPUs here
    with pytest.raises(thinwire.InvalidArgumentError, match=r"mixed_precision=.*autocast"):
        tw.compress(mixed)
    hooked = DistributedDataParallel(make_mlp())
    hooked.register_comm_hook(tw.State(), tw.hook)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"remove the register_comm_hook\(\)"):
        tw.compress(hooked)
    closed = DistributedDataParallel(make_mlp())
    tw.compress(closed).close()
    with pytest.raises(thinwire.InvalidArgumentError, match="wrap the module in a new Distrib"):
        tw.compress(closed)
    module = make_mlp()
    tw.compress(module)
    with pytest.raises(thinwire.InvalidArgumentError, match="remove one of the two calls"):
        tw.compress(torch.nn.Sequential(module))
    sharded = make_mlp()
    fully_shard(sharded)
    tw.compress(sharded)
    with pytest.raises(thinwire.InvalidArgumentError, match="remove one of the two calls"):
        tw.compress(sharded)


def test_a_model_compressed_twice_says_which_call_to_remove():
    run(twice)


def refused(rank: int):
    ddp, module = DistributedDataParallel(make_mlp()), make_mlp()
    bare = torch.optim.SGD(ddp.parameters(), lr=0.1)
    others = torch.optim.SGD(make_mlp().parameters(), lr=0.1, momentum=0.9)
    for model, options, words in [
        ("model", {}, "model is 'model'"),
        (ddp, {"optimizer": 5}, "optimizer is 5"),
        (ddp, {"delay": 1}, "delay=1 for a DistributedDataParallel, expected a plain module"),
        (ddp, {"gather": "int8"}, "expected a model under FSDP2"),
        (module, {"clip_value": 1.0}, "expected a model under DDP"),
        (module, {"warm_up_steps": 3}, "with optimizer="),
        (module, {"momentum": 0.9}, "no optimizer to take it out of"),
        (make_mlp().requires_grad_(False), {}, "without trained parameters"),
        (ddp, {"codec": "onebit"}, "Pass optimizer="),
        (ddp, {"codec": "onebit", "optimizer": bare}, "an SGD with momentum"),
        (ddp, {"codec": "onebit", "optimizer": others}, "rank .: the optimizer has no parameter"),
        (FullyShardedDataParallel(make_mlp(), device_id=CPU), {}, "expected one under FSDP2"),
        (ddp, {"codec": 4}, "codec is 4, expected a codec such as 'int4'"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            tw.compress(model, **options)
    with pytest.raises(TypeError, match="min_bytes"):
        tw.compress(ddp, min_byte=5)
    for inside in ("names", "structure", "purpose", "parameters"):
        with pytest.raises(TypeError, match=f"'{inside}' is not a setting"):
            tw.compress(ddp, **{inside: {}})
    adam = torch.optim.Adam(ddp.parameters(), weight_decay=0.1)
    for options, words in [({}, "needs warm_up_steps"), ({"warm_up_steps": 3}, "AdamW")]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            tw.compress(ddp, "onebit", optimizer=adam, **options)
    tw.compress(ddp)  # the refusals have left nothing behind


def test_wrong_calls_are_typed_errors():
    run(refused)


def unlike(rank: int, case: str):
    """Rank 1's model or options differ from rank 0's."""
    model, options = make_mlp(width=WIDTH + rank if case == "width" else WIDTH), {}
    if case == "layer" and rank:
        model.append(torch.nn.Linear(10, 10))
    elif case == "dtype" and rank:
        model.to(torch.bfloat16)
    elif case == "frozen":
        model[0].requires_grad_(rank == 0)
    elif case == "order" and rank:
        model = torch.nn.Sequential(OrderedDict(reversed(list(model.named_children()))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if case == "lr" and rank else 0.1)
    if case == "kind" and rank:
        optimizer = torch.optim.Adam(model.parameters())
    elif case in ("delay", "find_unused_parameters"):
        options = {case: bool(rank)} if case.startswith("find") else {case: rank}
    if case in ("lr", "kind", "delay", "find_unused_parameters"):
        options["optimizer"] = optimizer
    tw.compress(model, "int4", **options)


WIDTH = 96
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("width", r"parameter '0.weight' trained float32 \[97, 97\] on rank 1, expected .*96, 96"),
        ("layer", "parameter '5.weight' .* on rank 1, expected missing as on rank 0"),
        ("dtype", "parameter '0.weight' trained bfloat16 .* expected trained float32"),
        ("frozen", "parameter '0.weight' frozen .* expected trained"),
        ("order", "parameter '4.weight' on rank 1, expected parameter '0.weight' there"),
        ("lr", "optimizer group 0 lr 0.5 on rank 1, expected 0.1 as on rank 0"),
        ("kind", "optimizer Adam on rank 1, expected SGD as on rank 0"),
        ("delay", "delay 1 on rank 1, expected 0 as on rank 0"),
        ("find_unused_parameters", "find_unused_parameters True on rank 1, expected False"),
    ],
)
def test_plain_modules_that_differ_between_ranks_are_a_mismatch_on_every_rank(case, named):
    for rank, outcome in enumerate(outcomes_of(unlike, case)):
        assert outcome.error == "MismatchError", outcome
        assert f"rank {rank}: compress got" in outcome.message
        assert re.search(named, outcome.message), outcome.message


class Rule:
    def __repr__(self) -> str:
        return f"<Rule of process {os.getpid()}>"


def trained_apart(rank: int):
    """Each rank has trained alone before compress(), so its optimizer has its own momentum."""
    model = make_mlp()
    optimizer = sgd(model)
    # repr() of a function contains its address, so only plain values are compared.
    optimizer.param_groups[0]["rule"] = Rule()
    train(model, optimizer, rank, steps=2)
    made = tw.compress(model, "int4", optimizer=optimizer)
    train(model, optimizer, rank, steps=3)
    made.finish()
    return digest(model)


def test_an_optimizers_state_becomes_that_of_rank_0():
    assert len(set(run(trained_apart))) == 1


def one_after_the_other(rank: int, way: str):
    """Compress one model after the other, like a notebook cell that is run again. Return how many
    models are left after each."""
    gc.disable()
    models, left = [], []
    for _ in range(4):
        model = fully_shard(make_mlp()) if way == "fsdp2" else make_mlp()
        optimizer = sgd(model)
        made = tw.compress(model, "int4", **({"optimizer": optimizer} if way == "steps" else {}))
        train(model, optimizer, rank, steps=2)
        models.append(weakref.ref(model))
        left.append(sum(former() is not None for former in models))
    made.close()
    return left


@pytest.mark.parametrize("way", ["plain", "steps", "fsdp2"])
def test_models_that_a_program_has_dropped_are_freed(way):
    # `made` belongs to the former model until compress() returns, so two are left.
    assert run(one_after_the_other, way) == [[1, 2, 2, 2]] * 2


def under_ddp(rank: int, optimized: bool):
    model = make_mlp()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    tw.compress(ddp.module, "int4", **({"optimizer": optimizer} if optimized else {}))
    train(ddp, optimizer, rank)


@pytest.mark.parametrize("optimized", [False, True])
def test_a_module_of_ddp_that_is_compressed_as_a_plain_one_is_refused(optimized):
    for outcome in outcomes_of(under_ddp, optimized):
        assert outcome.error == "InvalidArgumentError"
        assert "call compress(ddp) on what DistributedDataParallel() returned" in outcome.message


def beside_ddp(rank: int):
    """DDP ignores the gradients that compress() reduces."""
    model = make_mlp()
    ignored = [name for name, _ in model.named_parameters() if name.startswith("0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    tw.compress(ddp.module[0], "int4")
    train(ddp, optimizer, rank)
    return digest(model)


def test_a_part_that_ddp_ignores_may_be_compressed_as_a_plain_one():
    assert len(set(run(beside_ddp))) == 1


def first_pass_raises(rank: int, optimized: bool):
    model = make_mlp()
    optimizer = sgd(model)
    tw.compress(model, "int4", **({"optimizer": optimizer} if optimized else {}))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    train(model, optimizer, rank, steps=2)


@pytest.mark.parametrize("optimized", [False, True])
def test_an_error_of_the_first_forward_pass_is_the_programs_own(optimized):
    run(first_pass_raises, optimized, world=1)


def on_one_rank(rank: int):
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        tw.compress(make_mlp(), "int4", process_group=group)
    else:  # a collective of another size, on which Gloo ends the process
        torch.distributed.all_reduce(torch.ones(100_000), group=group)


def again_on_all(rank: int, alone: int):
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=4))
    if rank == alone:
        with pytest.raises(thinwire.PeerLostError, match="did not come"):
            tw.compress(make_mlp(), "int4", process_group=group)
    torch.distributed.barrier()
    tw.compress(make_mlp(), "int4", process_group=group)


@pytest.mark.parametrize("alone", [0, 1])
def test_the_call_that_was_made_on_one_rank_alone_may_be_made_again_on_all(alone):
    """As in a notebook whose cell was interrupted on one rank."""
    run(again_on_all, alone)


def test_a_call_on_one_rank_alone_is_a_typed_error():
    outcome = outcomes_of(on_one_rank)[0]
    assert outcome.error == "PeerLostError", outcome
    assert "rank 1 did not come; make the call on all 2 ranks" in outcome.message


def test_the_public_names_fit_one_page():
    from thinwire.torch import advanced

    assert len(thinwire.__all__) + len(tw.__all__) + len(advanced.__all__) <= 45


def test_importing_leaves_fsdp_out():
    """Importing FSDP takes a second per process, even in those that do not use it."""
    code = "import sys, thinwire.torch; sys.exit('torch.distributed.fsdp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0
