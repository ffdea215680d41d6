"""FSDP2's reductions in a predicted order: programs whose steps differ get the bits of announced
order, and no group fails."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fsdp_models import WIDTH, weights
from models import data
from ranks import outcomes_of, run
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

STEPS = 12


class Net(torch.nn.Module):
    """Layers that are separate units. Those in `out` are left out of the next pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out: set[int] = set()
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.out:
                y = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
                x = torch.tanh(y)
        return x


class Training:
    """A model under FSDP2, and methods that make its steps."""

    def __init__(self, rank: int, hybrid: bool = False, **options: object) -> None:
        self.rank, self.model, self._batches = rank, Net(), itertools.count()
        names = ("replicas", "shards") if hybrid else ("shards",)
        shape = (2, 1) if hybrid else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.state = compress(self.model, "int4", min_bytes=0, **options)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def loss(self) -> torch.Tensor:
        x = data(next(self._batches), self.rank, WIDTH)
        return (self.model(x) - torch.sin(x)).square().mean()

    def step(self, *out: int) -> None:
        """Make a step without these layers."""
        self.model.out = set(out)
        self._optimizer.zero_grad()
        self.loss().backward()
        self._optimizer.step()
        self.model.out = set()


def alike(training: Training) -> None:
    for _ in range(STEPS):
        training.step()


def leaves_layers_out(training: Training) -> None:
    for out in ((), (), (), (1,), (), (), (), (1,), (1,), (1, 2), (1, 2), (), (), (), (3,), (), ()):
        training.step(*out)


def starts_without_a_layer(training: Training) -> None:
    """The first steps have a layer that no later step has."""
    for out in ((), (1,), (1,), (1,), (1,), (2,), (2,), (2,)):
        training.step(*out)


def freezes_a_layer(training: Training) -> None:
    for step in range(STEPS):
        if step == STEPS // 3:
            training.model.layers[0].requires_grad_(False)
        if step == 2 * STEPS // 3:
            training.model.layers[0].requires_grad_(True)
        training.step()


def accumulates(training: Training) -> None:
    """Accumulate over two passes, only the last of which is reduced; later reduce each pass."""
    for _ in range(STEPS // 2):
        training.model.set_requires_gradient_sync(False)
        training.loss().backward()
        training.model.set_requires_gradient_sync(True)
        training.loss().backward()
        training._optimizer.step()
        training._optimizer.zero_grad()
    for _ in range(STEPS // 2):
        training.loss().backward()
        training.step()


def recomputes(training: Training) -> None:
    training.model.checkpointed = True
    alike(training)


def validates(training: Training) -> None:
    for _ in range(STEPS):
        training.step()
        with torch.no_grad():
            training.loss()


def runs_layers_twice(training: Training) -> None:
    """Two forward passes before one backward pass reduce every other unit twice."""
    for step in range(STEPS):
        training.model.out = {1} if step % 3 else set()
        losses = [training.loss() for _ in range(2)]
        sum(losses).backward()
        training._optimizer.step()
        training._optimizer.zero_grad()


def trained(rank: int, program: Callable[[Training], None], planned: bool, options: dict):
    training = Training(rank, planned=planned, **options)
    program(training)
    stats = training.state.stats()
    counts = stats.get("replicas", stats)
    return weights(training.model), counts["planned_chunks"], counts["steps"]


@pytest.mark.parametrize("options", [{}, {"gather": "int4"}, {"hybrid": True}, {"feedback": False}])
@pytest.mark.parametrize("program", [alike, leaves_layers_out])
def test_bits_are_those_of_the_announced_order(program, options):
    """Without residuals the ranks match reductions by their order, and no name is predicted."""
    check(program, options, predicts=options.get("feedback") is not False)


@pytest.mark.parametrize(
    "program", [starts_without_a_layer, freezes_a_layer, accumulates, recomputes, validates]
)
def test_so_they_are_where_steps_differ(program):
    check(program, {})


def test_nothing_is_predicted_of_units_that_come_twice_in_a_step():
    check(runs_layers_twice, {}, predicts=False)


def check(program: Callable[[Training], None], options: dict, predicts: bool = True) -> None:
    (ahead, planned, steps), _ = run(trained, program, True, options)
    (announced, none, _), _ = run(trained, program, False, options)
    assert none == 0
    assert (planned > 0) == predicts
    assert steps >= 6
    for name, parameter in ahead.items():
        assert torch.equal(parameter, announced[name])


def freezes_for_a_while(rank: int, planned: bool) -> tuple[dict, list[int]]:
    """Return the weights, and how many chunks of each step were predicted."""
    training = Training(rank, planned=planned, chunk_bytes=4096, timeout_s=100)
    counts = [0]
    for step in range(14):
        training.model.layers[1].requires_grad_(step not in range(4, 9))
        training.step()
        counts.append(training.state.stats()["planned_chunks"])
    return weights(training.model), [b - a for a, b in itertools.pairwise(counts)]


def test_prediction_comes_back_after_a_layer_is_frozen_and_after_it_is_thawed():
    """The layer has more chunks than can be held back, so the others would wait for it for ever."""
    ahead = run(freezes_for_a_while, True, world=3)
    announced = run(freezes_for_a_while, False, world=3)
    for (parameters, planned), (expected, none) in zip(ahead, announced, strict=True):
        assert not any(none)
        whole, frozen = planned[3], planned[8]
        assert whole > frozen > 0
        assert planned[13] == whole
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name])


def raises(rank: int, where: int) -> None:
    """The weights stay gathered, so that rank 0 is in a reduction of ours when rank 1 leaves."""
    training = Training(rank, planned=True, timeout_s=60)
    training.model.set_reshard_after_backward(False)
    for layer in training.model.layers:
        layer.set_reshard_after_forward(False)
        layer.set_reshard_after_backward(False)
    for _ in range(STEPS // 2):
        training.step()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a bad batch")

    if rank == 1:
        hook = training.model.layers[where].register_forward_hook
        hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    training.step()


@pytest.mark.parametrize("where", [0, 3])
def test_a_rank_that_raises_ends_the_others_with_a_typed_error(where):
    first, second = outcomes_of(raises, where)
    assert "a bad batch" in second.trace
    assert first.error == "PeerLostError", first.trace
