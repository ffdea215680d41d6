"""FSDP2 with compressed reduce-scatters, on the CPU over gloo."""

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data
from ranks import run
from thinwire.torch.fsdp import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH = 96  # its products are no multiples of 3, and the last layer's 10 rows none of 3 or 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 10)
        self.spare = torch.nn.Linear(WIDTH, 10)
        self.skip = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) if self.skip else self.head(x) + self.spare(x)


def sharded(codec, mesh=None, spare=False, **options):
    """(model, compression); codec None: plain FSDP2. spare: the last part is trained, too."""
    policy = {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    model = Net()
    model.spare.requires_grad_(spare)
    model.skip = not spare
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model, None if codec is None else compress(model, codec, **options)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank, WIDTH)
    return (model(x) - torch.sin(x[:, :10])).square().mean()


def train(model, steps: int, rank: int, start: int = 0, lr: float = 0.1) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = torch.zeros(())
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
    return loss.item()


def gradients(model) -> dict[str, torch.Tensor]:
    """Whole ones; every rank calls it."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def one_step(rank: int, codec, dtype: torch.dtype | None, factor: float | None):
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model, state = sharded(codec, mp_policy=policy)
    if factor is not None and codec is not None:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)
    loss_of(model, 0, rank).backward()
    return gradients(model), None if state is None else state.stats()


# The largest error of a gradient, relative to its largest element, where a rank's own gradient may
# be twice the mean of all: nearest rounding to scale / 2, with scale = largest / 127 or / 7.
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
    """AVG, pre-divided SUM of fp16, and PREMUL_SUM, which gloo itself does not have."""
    plain, _ = run(one_step, None, None, None, world=2)[0]
    scale = 2 / factor if factor else 1.0
    for found, _ in run(one_step, "fp32", dtype, factor, world=2):
        for name, gradient in found.items():
            rtol, atol = (0.02, 1e-4) if dtype else (1e-5, 1e-7)
            torch.testing.assert_close(gradient, scale * plain[name], rtol=rtol, atol=atol)


def feedback(rank: int):
    """Second step with zero gradients: what comes out is the residuals' alone."""
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


def resumed(rank: int, path: str):
    model, state = sharded("int4:rounding=stochastic")
    train(model, 3, rank)
    kept, saved = weights(model), state.state_dict()
    gathered = state.gathered_state_dict()
    if rank == 0:
        torch.save(gathered, path)
    train(model, 3, rank, start=3)
    ends = [weights(model)]
    dist.barrier()
    for source in (saved, torch.load(path)):
        again, other = sharded("int4:rounding=stochastic")
        with torch.no_grad():
            for name, p in again.named_parameters():
                mesh = p.device_mesh
                p.copy_(distribute_tensor(kept[name], mesh, p.placements))
        other.load_state_dict(source)
        train(again, 3, rank, start=3)
        ends.append(weights(again))
    return ends


def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    for ends in run(resumed, str(tmp_path / "all.pt")):
        for end in ends[1:]:
            assert all(torch.equal(end[name], value) for name, value in ends[0].items())


def loaded(rank: int, path: str):
    _, state = sharded("int4")
    state.load_state_dict(torch.load(path))
    return state.state_dict()["residuals"]


def saved_by(rank: int, path: str):
    model, state = sharded("int4")
    train(model, 2, rank)
    gathered = state.gathered_state_dict()
    if rank == 0:
        torch.save(gathered, path)
    return state.state_dict()["residuals"]


def test_a_checkpoint_goes_into_another_world(tmp_path):
    path = str(tmp_path / "all.pt")
    old, new = run(saved_by, path, world=3), run(loaded, path, world=2)
    for name in old[0]:
        sums = [sum(rank[name]["first"] for rank in ranks) for ranks in (old, new)]
        torch.testing.assert_close(*sums)
        assert sums[0].abs().max() > 0


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
        model.skip = step % 2 == 1  # the same on every rank, as FSDP2 wants it
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


def hybrid(rank: int, codec, own: bool):
    """Two shards times two replicas: by HSDP's mesh, or by a group of one's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    if own:
        options = {"replicas": mesh["replica"].get_group(), "min_bytes": 0}
        model, state = sharded(codec, mesh["shard"], **options)
    else:
        model, state = sharded(codec, mesh)
    loss_of(model, 0, rank).backward()
    return gradients(model), None if state is None else state.stats()


@pytest.mark.parametrize("own", [True, False])
def test_hybrid_sharding(own):
    plain = run(one_step, None, None, None, world=4)[0][0]
    ours = run(hybrid, "int8", own, world=4)
    for found, stats in ours:
        assert ("replicas" in stats) == own
        assert stats["steps"] == 1 and (not own or stats["replicas"]["steps"] == 1)
        assert not own or stats["replicas"]["ratio"] > 3
        for name, gradient in found.items():
            assert torch.equal(gradient, ours[0][0][name])
            error = (gradient - plain[name]).abs().max() / plain[name].abs().max()
            assert error <= 0.02, name


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


def refused(rank: int):
    def refuses(words: str, *arguments, **options):
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            compress(*arguments, **options)

    refuses("expected a model that torch.distributed.fsdp.fully_shard", Net())
    model, _ = sharded(None)
    refuses("a reduce-scatter leaves no rank the whole mean", model, "auto")
    refuses("a reduce-scatter leaves no rank", model, "onebit", momentum=0.9)
    refuses("matches no parameter", model, {"layer.*": "int8", "*": "int4"})
    for gather in ("topk", "onebit", "int8:rounding=stochastic", 8):
        refuses("gather is", model, "int4", gather=gather)
    across = Net()
    fully_shard(across.head, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    refuses(r"'head\.weight': it lies as .*expected Shard\(0\)", across)
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


def by_module(rank: int):
    model, state = sharded({"layers.0.*": "int8", "*": "int4"})
    train(model, 2, rank)
    return {row["name"]: row["codec"] for row in state.stats()["parameters"]}


def test_rules_go_by_module():
    for codecs in run(by_module):
        assert codecs["layers.0.weight"] == codecs["layers.0.bias"] == "int8"
        assert codecs["layers.1.weight"] == codecs["head.bias"] == "int4"
