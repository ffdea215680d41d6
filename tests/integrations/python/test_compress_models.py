"""Forms of models that compress() accepts besides a plain one: wrapped once more, compiled, in
parts, with another model's parameters, under several optimizers, not yet materialized."""

from __future__ import annotations

import pytest
import thinwire
import thinwire.torch as tw
import torch
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire.torch.parameter_server import ParameterServerOptimizer
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

EXACT = {"codec": "fp32", "min_bytes": 0}


def sgd(*parts: torch.nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05, **options)


def train(model, optimizers, rank: int, forward=None, steps: int = 4) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model if forward is None else forward, data(step, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()


def check_trained_as_one(model: torch.nn.Module, steps: int = 4) -> None:
    """Check that two ranks have trained the model like one process that has the data of both."""
    expected = make_mlp()
    optimizer = sgd(expected)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(expected, data(step, rank)) / 2).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            ours.full_tensor() if hasattr(ours, "full_tensor") else ours, theirs,
            rtol=1e-4, atol=1e-6,
        )  # fmt: skip


def twice(rank: int):
    model, other = make_mlp(), make_mlp()
    made = tw.compress(model, codec="int8")
    other[0].weight = model[0].weight
    for again in (model, model[0], torch.nn.Sequential(model), other, torch.compile(model)):
        with pytest.raises(thinwire.InvalidArgumentError, match=r"by compress\(model, codec='int8"):
            tw.compress(again)
    made.close()
    tw.compress(other).close()  # nothing else reduces it now

    ddp = DistributedDataParallel(model)
    made = tw.compress(ddp)
    for again in (model, model[0], ddp):
        with pytest.raises(thinwire.InvalidArgumentError, match="of a DistributedDataParallel"):
            tw.compress(again)
    tw.compress(DistributedDataParallel(model)).close()  # wrapped again
    made.close()
    tw.compress(model).close()


def test_gradients_are_compressed_once_whatever_holds_their_parameters():
    run(twice)


def inside(rank: int):
    for wrapped in (DistributedDataParallel(make_mlp()), replicate(make_mlp())):
        with pytest.raises(thinwire.InvalidArgumentError, match="whose part '0' is under"):
            tw.compress(torch.nn.Sequential(wrapped))


def test_a_part_under_ddp_is_what_to_compress():
    run(inside)


def compiled(rank: int, how: str):
    model = make_mlp()
    if how == "sharded":
        fully_shard(model)
    wrapped = {"ddp": DistributedDataParallel, "replicated": replicate}.get(how, lambda m: m)(model)
    forward = torch.compile(wrapped, backend="eager")
    made = tw.compress(forward, **EXACT)
    for step in range(4):
        made_loss = forward(data(step, rank))
        (made_loss - torch.sin(data(step, rank)[:, :10])).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    check_trained_as_one(model)
    return type(made).__name__


@pytest.mark.parametrize(
    ("how", "kind"),
    [("ddp", "State"), ("replicated", "State"), ("sharded", "ShardedCompression")],
)
def test_a_compiled_model_is_what_was_compiled(how, kind):
    assert run(compiled, how) == [kind, kind]


def parted(rank: int):
    model = make_mlp()
    first, second = sgd(model[:2], momentum=0.9), sgd(model[2:], momentum=0.9)
    for wrapped, options in [
        (model, {"optimizer": first, **EXACT}),
        (DistributedDataParallel(model), {"optimizer": first, "codec": "onebit"}),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=r"has no '2\.weight', one of 4"):
            tw.compress(wrapped, **options)
    first, second = sgd(model[:2]), sgd(model[2:])
    tw.compress(model, **EXACT)
    train(model, [first, second], rank)
    check_trained_as_one(model)
    return digest(model)


def test_an_optimizer_of_a_part_would_leave_the_rest_to_each_rank():
    first, second = run(parted)
    assert first == second


def of_shards(rank: int):
    model = make_mlp()
    early = sgd(model)
    fully_shard(model)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"6 parameter\(s\).*make the optimiz"):
        tw.compress(model, optimizer=early, **EXACT)
    with pytest.raises(thinwire.InvalidArgumentError, match="that the model has not"):
        tw.compress(model, optimizer=sgd(make_mlp()), **EXACT)
    optimizer = sgd(model, momentum=0.9)
    for codec in ("onebit", "topk:density=0.1", {"*": "topk:density=0.1"}):
        with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum=0\.9, expected neither"):
            tw.compress(model, codec, optimizer=optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    optimizer = sgd(model)
    tw.compress(model, optimizer=optimizer, **EXACT)  # the weight stays as it is
    train(model, [optimizer], rank)
    check_trained_as_one(model)


def test_an_optimizer_of_a_sharded_model_keeps_its_momentum():
    run(of_shards)


def replicas_of_shards(rank: int):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    model = make_mlp()
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model, momentum=0.9)
    options = {"codec": "topk:density=0.1", "inner": False}
    with pytest.raises(thinwire.InvalidArgumentError, match="or leave optimizer= out"):
        tw.compress(model, optimizer=optimizer, **options)
    tw.compress(model, **options)
    train(model, [optimizer], rank)


def test_topk_over_replicas_leaves_momentum_to_the_optimizer():
    run(replicas_of_shards)


def one_graph(rank: int, when: str, optimized: bool):
    """Call torch.compile(fullgraph=True) before compress() or after it, or compile in place."""
    model = make_mlp()
    optimizer = sgd(model)
    forward = model
    if when == "before":
        forward = torch.compile(model, backend="eager", fullgraph=True)
    elif when == "in place":
        model.compile(backend="eager", fullgraph=True)
    tw.compress(forward, optimizer=optimizer if optimized else None, **EXACT)
    if when == "after":
        forward = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(4):
        optimizer.zero_grad()
        x = data(step, rank)
        (forward(x) - torch.sin(x[:, :10])).square().mean().backward()
        optimizer.step()
    check_trained_as_one(model)


@pytest.mark.parametrize("when", ["before", "in place", "after"])
def test_a_model_that_is_one_graph_goes_without_an_optimizer(when):
    run(one_graph, when, False)
    for outcome in outcomes_of(one_graph, when, True):
        assert outcome.error == "InvalidArgumentError" if when == "before" else "Unsupported"
        assert "which is no part of a graph; compile" in outcome.message


def compiled_and_used(rank: int, policy: str, resets: bool):
    """Dynamo does not see hooks that a module gets after its first compiled pass."""
    model = torch.nn.Linear(96, 10)
    model.load_state_dict({"weight": torch.eye(10, 96), "bias": torch.zeros(10)})
    optimizer = sgd(model)
    forward = torch.compile(model, backend="eager")
    forward(data(0, rank))
    made = tw.compress(model, optimizer=optimizer, policy=policy, **EXACT)
    if resets:
        torch.compiler.reset()
    for step in range(3):
        optimizer.zero_grad()
        forward(data(step, rank)).square().mean().backward()
        optimizer.step()
    made.finish()
    return [p.detach().clone() for p in model.parameters()]


def test_a_pass_that_does_not_wait_for_a_step_is_an_error():
    expected = run(compiled_and_used, "wfbp", False)[0]
    for resets in (False, True):
        for outcome in outcomes_of(compiled_and_used, "p3", resets):
            if resets:
                torch.testing.assert_close(outcome.value, expected)
            else:
                assert outcome.error == "InvalidArgumentError", outcome.trace
                assert "torch.compiler.reset() after compress()" in outcome.message


def unmade(rank: int):
    def lazy() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LazyLinear(96), torch.nn.Linear(96, 10))

    def holding(buffer: torch.Tensor) -> torch.nn.Module:
        model = make_mlp()
        model.register_buffer("held", buffer)
        return model

    frozen = lazy()
    frozen[0].weight.requires_grad = False
    lazy_buffer = torch.nn.Sequential(
        torch.nn.Linear(96, 96), torch.nn.LazyBatchNorm1d(affine=False)
    )
    with torch.device("meta"):
        on_meta = make_mlp()
    words = "of a lazy module, which has no shape yet.*run one forward pass"
    for model, message in [
        (lazy(), words),
        (frozen, words),
        (replicate(lazy()), words),
        (lazy_buffer, words),
        (on_meta, r"got device meta.*to_empty\(\)"),
        (holding(torch.zeros(3, device="meta")), "'held': got layout torch.strided on meta"),
        (holding(torch.eye(3).to_sparse()), "'held': got layout torch.sparse_coo"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=message):
            tw.compress(model)
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        tw.State(names={p: name for name, p in lazy().named_parameters()})
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        tw.GradientExchange().reduce_gradients(dict(lazy().named_parameters()))
    model = lazy()
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        ParameterServerOptimizer(sgd(model), model, mode="local")
    counts = torch.tensor([rank, 3]), torch.tensor([1j * rank]), torch.tensor(rank > 0)
    model = lazy()
    model(data(0, rank))
    for number, buffer in enumerate(counts):
        model.register_buffer(f"held{number}", buffer)
    tw.compress(model, **EXACT)
    train(model, [sgd(model)], rank)
    return digest(model), [buffer.tolist() for buffer in model.buffers()]


def test_what_has_no_values_yet_is_told():
    first, second = run(unmade)
    assert first == second and first[1] == [[0, 3], [0], False]


def trained_later(rank: int, how: str):
    """DDP does not reduce the parameter, so each rank would train its own."""
    model = make_mlp()
    if how == "thawed":
        model[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    tw.compress(ddp, **EXACT)
    train(model, [sgd(model)], rank, ddp, steps=16)
    if how == "thawed":
        model[0].weight.requires_grad_(True)
    else:
        model.append(torch.nn.Linear(10, 10))
    words = "'0.weight' is trained now" if how == "thawed" else "'5.weight' is trained now"
    with pytest.raises(thinwire.InvalidArgumentError, match=f"{words}.*new DistributedDataPar"):
        train(model, [sgd(model)], rank, ddp, steps=1)


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_a_parameter_that_ddp_does_not_reduce_is_told(how):
    run(trained_later, how)


class WithEmpty(torch.nn.Module):
    """A model whose only bf16 parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_mlp()
        self.empty = torch.nn.Parameter(torch.zeros(3, 0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.empty.float().sum()


def trained_with_empty(rank: int, how: str):
    model = WithEmpty()
    optimizer = sgd(model)
    forward = DistributedDataParallel(model) if how == "ddp" else model
    options = {"optimizer": optimizer, "policy": how} if how in ("p3", "wfbp") else {}
    compression = tw.compress(forward, **EXACT, **options)
    train(model, [optimizer], rank, forward)
    compression.state_dict()
    if how in ("p3", "wfbp"):
        compression.finish()
    check_trained_as_one(model.inner)


@pytest.mark.parametrize("how", ["ddp", "p3", "wfbp", "plain"])
def test_a_parameter_without_elements_is_trained(how):
    run(trained_with_empty, how)
