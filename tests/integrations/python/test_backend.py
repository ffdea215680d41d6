"""The backend "thinwire": the tested programs differ by one word from their exact twins. Gradients
are compressed, with error feedback; everything else is exact."""

import os
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import thinwire
import thinwire.torch as tw
import torch
import torch.distributed as dist
from ranks import outcomes_of, run
from thinwire import config
from thinwire.torch import backend, process_group
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Membership
from thinwire.torch.process_group import ProcessGroup
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256  # enough that a layer's weight is compressed
NUMEL = 100_000


def meet(rank: int, store: str, name: str, world: int = 2, **options: object) -> dist.ProcessGroup:
    """Make the default group again, over the backend `name`."""
    dist.destroy_process_group()
    dist.init_process_group(
        name, init_method=f"file://{store}", rank=rank, world_size=world,
        pg_options=backend.Options(**options) if options else None,
    )  # fmt: skip
    return dist.group.WORLD


def exchange(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of this tensor over all ranks, reduced as a gradient in a backward pass."""
    parameter = nn.Parameter(torch.zeros_like(value))

    def reduce(_: object) -> None:
        dist.all_reduce(parameter.grad)

    parameter.register_post_accumulate_grad_hook(reduce)
    (parameter * value).sum().backward()
    return parameter.grad


def step() -> None:
    """Make a step of an unrelated optimizer."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def model_of(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8, bias=False))


def train(rank: int, model: nn.Module, steps: int = 8) -> list[torch.Tensor]:
    """Return the whole parameters after that many steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(32, WIDTH, generator=generator)
        loss = (model(x) - x[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]


# Error feedback.


def sums_of_steps(rank: int, store: str) -> tuple[float, float, dict]:
    """Return the largest error of one exchange, that of the sum of 30 exchanges of the same values,
    and the statistics."""
    meet(rank, store, "thinwire", codec="int4")
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    exact = sum(torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(2))
    results = []
    for _ in range(30):
        results.append(exchange(value))
        step()
    one = (results[0] - exact).abs().max().item()
    return one, (sum(results) - 30 * exact).abs().max().item(), dist.group.WORLD.stats()


def test_what_a_step_loses_comes_back_in_later_ones(tmp_path):
    one, all_, stats = run(sums_of_steps, str(tmp_path / "store"))[0]
    assert one > 0 and all_ < 2 * one
    assert stats["ratio"] > 6 and stats["compressed"] == 30
    assert stats["residual_bytes"] == 4 * NUMEL
    assert stats["dropped_residuals"] == stats["without_feedback"] == 0


def change_the_sequence(rank: int, store: str) -> list[int]:
    """Return the dropped residuals after each step. Steps have 2, 2, 1 and 1 exchanges of one size,
    and one exchange of another size."""
    meet(rank, store, "thinwire", codec="int4")
    dropped = []
    for exchanges in (2, 2, 1, 1):
        for _ in range(exchanges):
            exchange(torch.ones(NUMEL))
        exchange(torch.ones(2 * NUMEL))
        step()
        step()  # like an optimizer inside another one
        dropped.append(dist.group.WORLD.stats()["dropped_residuals"])
    return dropped


def test_residuals_are_dropped_where_a_step_differs_from_the_last(tmp_path):
    assert run(change_the_sequence, str(tmp_path / "store")) == [[0, 0, 2, 2]] * 2


def without_memory(rank: int, store: str) -> tuple[float, dict]:
    process_group.SHARE = 1 << 50
    meet(rank, store, "thinwire", codec="int4")
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    error = (exchange(value) - 2 * value).abs() / value.abs()
    return error.max().item(), dist.group.WORLD.stats()


def test_without_memory_for_residuals_bf16_is_sent(tmp_path):
    error, stats = run(without_memory, str(tmp_path / "store"))[0]
    assert 0 < error < 0.01
    assert stats["without_feedback"] == 1 and stats["residual_bytes"] == 0


def of_one_parameter(rank: int, store: str, ours: bool) -> list[torch.Tensor]:
    if ours:
        meet(rank, store, "thinwire", codec="int4")
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Linear(WIDTH, 8 * WIDTH, bias=False))
    compression = None if ours else tw.compress(ddp, codec="int4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(32, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    if compression is not None:
        compression.close()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_bits_are_those_of_compress_where_the_layouts_agree(tmp_path):
    ours = run(of_one_parameter, str(tmp_path / "store"), True)
    theirs = run(of_one_parameter, "", False)
    assert torch.equal(ours[0][0], ours[1][0])
    assert torch.equal(ours[0][0], theirs[0][0])


# Scope.


class Normalize(torch.autograd.Function):
    """Normalizes by statistics of all ranks, reduced in forward and backward like SyncBatchNorm."""

    @staticmethod
    def forward(ctx, x, kept):
        mean = x.mean(0)
        dist.all_reduce(mean)
        kept.append(mean)
        ctx.kept = kept
        return x - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient):
        mean = gradient.mean(0)
        dist.all_reduce(mean)
        ctx.kept.append(mean)
        return gradient - mean / dist.get_world_size(), None


def beside_gradients(rank: int, store: str, name: str) -> tuple[list[torch.Tensor], dict]:
    """Return what is exchanged besides a layer's gradients."""
    meet(rank, store, name)
    torch.manual_seed(1)
    layer = nn.Linear(NUMEL, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    x = torch.randn(4, NUMEL, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    kept: list[torch.Tensor] = []
    ddp(Normalize.apply(x, kept)).sum().backward()
    metrics = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7 + rank))
    evaluated = metrics.clone()
    dist.all_reduce(metrics, dist.ReduceOp.AVG if name == "thinwire" else dist.ReduceOp.SUM)
    if name == "thinwire":
        metrics *= 2
    dist.all_reduce(evaluated)
    weights = layer.weight.detach().clone()
    dist.broadcast(weights, 0)
    parts = [torch.empty(NUMEL) for _ in range(2)]
    dist.all_gather(parts, evaluated)
    group = dist.group.WORLD
    return [*kept, metrics, evaluated, weights, *parts], group.stats() if name != "gloo" else {}


def test_all_but_gradients_is_exact(tmp_path):
    ours = run(beside_gradients, str(tmp_path / "a"), "thinwire")
    theirs = run(beside_gradients, str(tmp_path / "b"), "gloo")
    for mine, their in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine[0], their[0]))
    stats = ours[0][1]
    assert stats["compressed"] == 1 and stats["compressed_bytes"] == 4 * NUMEL
    assert stats["exact"] == 4 and stats["exact_bytes"] == 16 * NUMEL


def of_scope(rank: int, store: str, codec: str | None) -> tuple[int, float]:
    meet(rank, store, "thinwire", codec=codec, scope="all")
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    result = value.clone()
    dist.all_reduce(result)
    error = (result - 2 * value).abs().max().item()
    return dist.group.WORLD.stats()["compressed"], error


def test_scope_all_compresses_every_sum_and_by_bf16_if_no_codec_is_named(tmp_path):
    compressed, error = run(of_scope, str(tmp_path / "a"), None)[0]
    assert compressed == 1 and 0 < error < 0.05
    compressed, error = run(of_scope, str(tmp_path / "b"), "int4")[0]
    assert compressed == 1 and error > 0.1


def many_at_once(rank: int, store: str) -> tuple[list[float], int, list[str]]:
    """Return the last elements of sums that only a barrier waits for, how many sums were
    compressed, and the messages for arguments that Gloo refuses."""
    group = meet(rank, store, "thinwire", codec="fp32", scope="all")
    tensors = [torch.full((NUMEL,), float(number)) for number in range(4)]
    for tensor in tensors:
        group.allreduce([tensor])
    group.barrier().wait()
    found = [tensor[-1].item() for tensor in tensors]
    refused = []
    for collective in (group.allreduce, group.allgather, group.broadcast):
        with pytest.raises(RuntimeError) as caught:
            collective(*[[]] * (1 + (collective == group.allgather)))
        refused.append(str(caught.value))
    return found, group.stats()["compressed"], refused


def test_exchanges_of_one_kind_overlap_and_a_barrier_waits_for_them(tmp_path):
    found, compressed, refused = run(many_at_once, str(tmp_path / "store"))[0]
    assert found == [0.0, 2.0, 4.0, 6.0] and compressed == 4
    assert all("requires" in text or "invalid root" in text for text in refused), refused


def by_environment(rank: int, store: str) -> tuple[int, float]:
    group = meet(rank, store, "thinwire")
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    result = value.clone()
    dist.all_reduce(result)
    return group.stats()["compressed"], (result - 2 * value).abs().max().item()


def test_the_environment_sets_codec_and_scope(tmp_path):
    environment = {"THINWIRE_CODEC": "int8", "THINWIRE_SCOPE": "all"}
    compressed, error = run(by_environment, str(tmp_path / "a"), environment=environment)[0]
    assert compressed == 1 and 0.005 < error < 0.1


# Wrappers.


def by_ddp(rank: int, store: str, name: str) -> list[torch.Tensor]:
    meet(rank, store, name)
    return train(rank, DistributedDataParallel(model_of()))


def by_tutorial(rank: int, store: str, name: str) -> list[torch.Tensor]:
    """Train like "Getting Started with Distributed Data Parallel" of pytorch.org."""
    meet(rank, store, name)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8, bias=False))
    ddp_model, loss_of = DistributedDataParallel(model), nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    torch.manual_seed(100 + rank)
    for _ in range(8):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, WIDTH))
        loss_of(outputs, torch.randn(20, 8)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in ddp_model.parameters()]


def by_replicate(rank: int, store: str, name: str) -> list[torch.Tensor]:
    meet(rank, store, name)
    model = model_of()
    replicate(model)
    return train(rank, model)


def by_fsdp2(rank: int, store: str, name: str) -> list[torch.Tensor]:
    meet(rank, store, name)
    model = model_of()
    fully_shard(model[0])
    fully_shard(model)
    return train(rank, model)


@pytest.mark.parametrize("program", [by_ddp, by_tutorial, by_replicate, by_fsdp2])
def test_a_program_that_differs_by_one_word(tmp_path, program):
    ours = run(compressed, program, str(tmp_path / "a"))
    theirs = run(program, str(tmp_path / "b"), "gloo")
    started = [parameter.detach() for parameter in model_of().parameters()]
    for (mine, stats), their in zip(ours, theirs, strict=True):
        assert stats["compressed"] == 8 and stats["ratio"] > 5
        for a, b, start in zip(mine, their, started, strict=True):
            assert (a - b).norm() < 0.2 * (b - start).norm()
        assert not all(map(torch.equal, mine, their))
    assert all(map(torch.equal, ours[0][0], ours[1][0]))


def compressed(rank: int, program, store: str) -> tuple[list[torch.Tensor], dict]:
    return program(rank, store, "thinwire"), dist.group.WORLD.stats()


def by_hsdp(rank: int, override: dict[str, str] | None) -> tuple[list[torch.Tensor], list[dict]]:
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override=override and dict(override),
    )
    model = model_of(WIDTH)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = train(rank, model)
    group = mesh.get_group("replicate")
    return parameters, group.stats() if override else {}


def test_the_outer_dimension_of_a_mesh_alone(tmp_path):
    ours = run(by_hsdp, {"replicate": "thinwire"}, world=4)
    theirs = run(by_hsdp, None, world=4)
    started = [parameter.detach() for parameter in model_of().parameters()]
    for (mine, stats), (their, _) in zip(ours, theirs, strict=True):
        assert stats["compressed"] == 8 and stats["ratio"] > 5
        for a, b, start in zip(mine, their, started, strict=True):
            assert (a - b).norm() < 0.2 * (b - start).norm()
    assert all(map(torch.equal, ours[0][0], ours[3][0]))


# FSDP2's gathers of parameters, on request.


GATHERING = {"THINWIRE_CODEC": "int4", "THINWIRE_GATHER": "int4"}


def deep() -> nn.Module:
    """Return a model that uses its second layer's weight in its backward pass."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 8, bias=False))


def fsdp2_gathering(
    rank: int, store: str, again: int | bool = True, name: str = "thinwire"
) -> tuple[list[torch.Tensor], dict, bool]:
    """Return the parameters, the stats, and whether a gather of something else is exact. again:
    FSDP2's reshard_after_forward."""
    world = dist.get_world_size()
    group, model = meet(rank, store, name, world), deep()
    for layer in model:
        fully_shard(layer, reshard_after_forward=again)
    fully_shard(model)
    parameters = train(rank, model)
    stats = {} if name == "gloo" else group.stats()
    found = torch.empty(world * NUMEL)
    mine = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    dist.all_gather_into_tensor(found, mine)
    return parameters, stats, torch.equal(found[rank * NUMEL :][:NUMEL], mine)


def test_gathers_of_parameters_are_compressed_on_request_and_others_are_not(tmp_path):
    ours = run(fsdp2_gathering, str(tmp_path / "a"), environment=GATHERING)
    theirs = run(fsdp2_gathering, str(tmp_path / "b"), True, "gloo")
    started = [parameter.detach() for parameter in deep().parameters()]
    for (mine, stats, exact), (their, *_) in zip(ours, theirs, strict=True):
        # The first gathers of the first two layers, and all gathers of the small one.
        assert stats["gather"]["exact"] == 2 + 2 * 8 and stats["gather"]["repeated"] == 2 * 8
        assert stats["gather"]["reference_bytes"] == 2 * 4 * WIDTH * WIDTH * 3 // 2
        assert stats["gather"]["ratio"] > 3 and exact
        for a, b, start in zip(mine, their, started, strict=True):
            assert (a - b).norm() < 0.2 * (b - start).norm()
    assert all(map(torch.equal, ours[0][0], ours[1][0]))


def test_without_a_word_and_without_memory_gathers_are_exact(tmp_path):
    asked_not, stats, _ = run(fsdp2_gathering, str(tmp_path / "a"))[0]
    function, store = without_memory_for_references, str(tmp_path / "b")
    no_memory, without, _ = run(function, store, environment=GATHERING)[0]
    assert all(map(torch.equal, asked_not, no_memory))
    assert "gather" not in stats
    assert without["gather"]["exact"] == 3 * 2 * 8 and without["gather"]["reference_bytes"] == 0


def without_memory_for_references(rank: int, store: str) -> tuple[list[torch.Tensor], dict, bool]:
    budget = process_group.GroupGather.__init__

    def with_none(gather, session, least, _budget) -> None:
        budget(gather, session, least, lambda _on_gpu: 0)

    process_group.GroupGather.__init__ = with_none
    return fsdp2_gathering(rank, store)


def test_backward_passes_that_gather_in_smaller_groups_get_the_weights_of_today(tmp_path):
    """These groups are used in backward passes only, so a reference would be out of date."""
    parts = run(fsdp2_gathering, str(tmp_path / "a"), 2, world=4, environment=GATHERING)
    whole = run(fsdp2_gathering, str(tmp_path / "b"), True, world=4, environment=GATHERING)
    assert parts[0][1]["gather"]["repeated"] == 0 < whole[0][1]["gather"]["repeated"]
    assert all(map(torch.equal, parts[0][0], whole[0][0]))


def sharded_of_one_parameter(rank: int, store: str, ours: bool) -> list[torch.Tensor]:
    if ours:
        meet(rank, store, "thinwire", codec="int4", gather="int4")
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
    fully_shard(model)
    compression = None if ours else tw.compress(model, codec="int4", gather="int4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    if compression is not None:
        compression.close()
    return [parameter.full_tensor() for parameter in model.parameters()]


def test_bits_of_gathers_are_those_of_compress_where_the_layouts_agree(tmp_path):
    ours = run(sharded_of_one_parameter, str(tmp_path / "store"), True)
    theirs = run(sharded_of_one_parameter, "", False)
    assert torch.equal(ours[0][0], ours[1][0])
    assert torch.equal(ours[0][0], theirs[0][0])


def with_uneven_inputs(rank: int, store: str) -> torch.Tensor:
    """Train with 3 more steps on rank 0."""
    meet(rank, store, "thinwire", codec="int8", timeout_s=100)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for number in range(5 - 3 * rank):
            optimizer.zero_grad()
            ddp(torch.full((2, WIDTH), 1.0 + number)).square().mean().backward()
            optimizer.step()
    return ddp.module.weight.detach()


def test_uneven_inputs_are_joined(tmp_path):
    first, second = run(with_uneven_inputs, str(tmp_path / "store"))
    assert torch.equal(first, second)


# Other ranks.


class Opts:
    """torch 2.14's ReconfigureOptions."""

    def __init__(self, uuid: int, handles: list[str] | set[str]) -> None:
        self.uuid, self.handles, self.timeout = uuid, handles, None


def reconfigure(rank: int) -> list[tuple[float, int, int]]:
    """Return (sum, rank, size) among all ranks, among all again (given as a set), without rank 1,
    and with rank 1 but without rank 2."""
    group = ProcessGroup("int8", scope="all", timeout_s=100)
    assert group.supports_reconfigure
    handles: list[str] = [""] * 3
    dist.all_gather_object(handles, group.get_reconfigure_handle())
    found = []
    first, second, third = handles
    for uuid, ranks in enumerate((handles, set(handles), [third, first], [second, first])):
        dist.barrier()
        if handles[rank] not in ranks:
            with pytest.raises(thinwire.InvalidArgumentError, match="handles"):
                group.reconfigure(Opts(uuid, ranks))
            found.append((0.0, -1, 0))
            continue
        assert group.reconfigure(Opts(uuid, ranks)).wait()
        tensor = torch.full((NUMEL,), 1.0 + rank)
        group.allreduce([tensor]).wait()
        found.append((round(tensor[0].item(), 1), group.rank(), group.size()))
    dist.barrier()
    return found


def test_ranks_meet_as_the_same_as_fewer_and_as_others():
    found = run(reconfigure, world=3)
    assert [each[0] for each in found] == [(6.0, 0, 3), (6.0, 1, 3), (6.0, 2, 3)]
    assert sorted(each[1] for each in found) == [(6.0, 0, 3), (6.0, 1, 3), (6.0, 2, 3)]
    assert [each[2] for each in found] == [(4.0, 1, 2), (0.0, -1, 0), (4.0, 0, 2)]
    assert [each[3] for each in found] == [(3.0, 1, 2), (3.0, 0, 2), (0.0, -1, 0)]


# Torch's side.


def lose_a_peer(rank: int, store: str) -> bool:
    meet(rank, store, "thinwire", codec="int8", scope="all", timeout_s=100)
    dist.all_reduce(torch.ones(NUMEL))
    if rank == 1:
        os._exit(3)
    with pytest.raises(thinwire.PeerLostError, match="rank 1") as caught:
        for _ in range(50):
            dist.all_reduce(torch.ones(NUMEL))
    return isinstance(caught.value, dist.DistNetworkError)


def test_errors_are_torchs_and_ours(tmp_path):
    outcomes = outcomes_of(lose_a_peer, str(tmp_path / "store"))
    assert outcomes[0].value is True, outcomes[0].trace


def test_wrong_options_say_what_is_expected():
    with pytest.raises(thinwire.InvalidArgumentError, match="scope"):
        backend.Options(scope="some")
    with pytest.raises(thinwire.InvalidArgumentError, match="momentum"):
        backend.Options("onebit")
    with pytest.raises(thinwire.InvalidArgumentError, match="gather"):
        backend.Options(gather="topk")
    with pytest.raises(TypeError, match="lane"):
        backend.Options(lane=3)


def test_torch_finds_the_backend_by_its_entry_point():
    root = Path(__file__).resolve().parents[3]
    group = r'entry-points."torch.distributed.backends"\]\nthinwire = "([\w.]+):(\w+)"'
    module, function = re.search(group, (root / "pyproject.toml").read_text()).groups()
    assert getattr(import_module(module), function)() is None
    assert dist.Backend("thinwire") == "thinwire"


def changing(rank: int, store: str, planned: bool, steps: list[list[int]]):
    """steps: the elements of each exchange in each step. Each step also has a sum of another length
    that is no gradient."""
    meet(rank, store, "thinwire", planned=planned, scope="all", min_bytes=0)
    results = []
    for number, numels in enumerate(steps):
        torch.manual_seed(number)
        sums = [exchange(torch.randn(numel) * (rank + 1)) for numel in numels]
        metric = torch.full([NUMEL + 1000 * number], float(rank))
        dist.all_reduce(metric)
        results.append([*sums, metric])
        step()
    return results, dist.group.WORLD.stats()["planned_chunks"]


@pytest.mark.parametrize(
    "steps",
    [
        # A program that freezes layers has fewer exchanges from one step on. The step before was
        # like its predecessor, so its order was predicted.
        [[NUMEL] * count for count in (3, 3, 3, 2, 2, 2, 3, 3, 3, 1, 1, 1)],
        # Exchanges that only the first step has, since DDP rebuilds its buckets after it.
        [[NUMEL] * count for count in (3, 2, 2, 2, 2)],
        [[2 * NUMEL], *[[NUMEL, NUMEL]] * 4],
    ],
)
def test_an_order_that_is_predicted_bears_steps_that_differ(tmp_path, steps):
    (ahead, planned), _ = run(changing, f"{tmp_path}/ahead", True, steps)
    (announced, none), _ = run(changing, f"{tmp_path}/announced", False, steps)
    assert planned > 0
    assert none == 0
    for a, b in zip(ahead, announced, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("by_order", "predicted"), [(False, [False, True]), (True, [False, False])]
)
def test_steps_are_not_predicted_where_all_chunks_start_in_one_order(by_order, predicted):
    """With one common order, a predicted chunk that does not come would block all others."""
    told = []
    session = Session(Membership(None, "test"), config.resolve(codec="int4"))
    session._communicator = SimpleNamespace(
        matches_by_order=lambda: by_order,
        end_step=lambda: told.append(True),
        forget_step=lambda: told.append(False),
    )
    bucket = Bucket("g", 1000, "float32", parts=[Part("g", 1000)], codecs=[0])
    for _ in predicted:
        session.ledger.submitted(bucket)
        session.end_step(repeats=None)
    assert told == predicted
