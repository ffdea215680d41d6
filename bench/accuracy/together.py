"""Trains many runs of one method together on one device: many seeds, each at its own rate, because
a single run would leave a GPU idle. A hundred seeds show differences of 0.1 %.

The recipe is that of training.train(), with its optimizers, batches and exchange; only the order of
sums differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, pad

from bench.accuracy.batched_codecs import through
from bench.accuracy.tasks import CharLM, Task
from bench.accuracy.training import Method, batches, is_muons, row_of, spec_of, warm_up_of
from bench.accuracy.two_hop import BLOCK, TwoHop

_WARM_UP = 3  # steps before a graph is captured, for allocations and choices of kernels


@dataclass(frozen=True)
class Trial:
    """One run. split: "validation" or "test", on which it is evaluated."""

    rate: float
    seed: int
    split: str


def can_train(method: Method) -> bool:
    return not method.owns_momentum


class _Cells(nn.Module):
    """nn.LSTM with the same parameters, in operations that torch.func supports."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        for name, parameter in lstm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        own = self._parameters
        inputs = x @ own["weight_ih_l0"].T + (own["bias_ih_l0"] + own["bias_hh_l0"])
        weight = own["weight_hh_l0"].T
        h = c = torch.zeros_like(inputs[:, 0, : weight.shape[0]])
        outputs = []
        for gates in inputs.unbind(1):
            i, f, g, o = (gates + h @ weight).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1), None


class ManyTwoHop(TwoHop):
    """The exchanges of many groups at once."""

    def __init__(
        self, count: int, numel: int, codec: str, feedback: bool, warm_up: int = 0
    ) -> None:
        super().__init__(count, numel, codec, feedback=feedback, warm_up=warm_up)
        self._count, self._numel = count, numel
        by_blocks: dict[int, list[int]] = {}  # owners by length of their shards, coded together
        for owner, shard in enumerate(self._shards):
            by_blocks.setdefault(-(-(shard.stop - shard.start) // BLOCK), []).append(owner)
        self._alike = list(by_blocks.items())
        self._kept: list[tuple[Tensor, Tensor]] = []  # residuals of both hops, by shards' length

    def all_reduce(self, gradients: Tensor) -> Tensor:
        """Return the means of (groups, ranks, elements) as (groups, elements)."""
        filled = pad(gradients, (0, -self._numel % BLOCK))
        first, second = self._hops()
        means: list[Tensor | None] = [None] * self._count
        for place, (blocks, owners) in enumerate(self._alike):
            # (groups, owners, ranks, elements)
            parts = torch.stack([self._of(filled, owner, blocks) for owner in owners], 1)
            foreign = torch.stack(
                [_without(parts[:, i], owner) for i, owner in enumerate(owners)], 1
            )
            up, down = self._residuals_at(place, foreign)
            decoded = through(first, foreign, up)
            self._clear_tail(owners, decoded, up)
            totals = []
            for i, owner in enumerate(owners):
                ranks = list(decoded[:, i].unbind(1))
                ranks.insert(owner, parts[:, i, owner])
                total = ranks[0].clone()
                for part in ranks[1:]:
                    total.add_(part)
                totals.append(total.mul_(1 / self._count))
            result = through(second, torch.stack(totals, 1), down)
            self._clear_tail(owners, down)
            for i, owner in enumerate(owners):
                means[owner] = result[:, i]
        self.steps += 1
        return torch.cat(means, 1)[:, : self._numel]

    def _clear_tail(self, owners: list[int], *of_owners: Tensor | None) -> None:
        """Set the elements after the last one to zero, as a codec pads them."""
        tail = self._shards[-1].stop - self._shards[-1].start
        for tensor in of_owners:
            if tensor is not None and owners[-1] == self._count - 1:
                tensor[:, -1, ..., tail:] = 0

    def _of(self, filled: Tensor, owner: int, blocks: int) -> Tensor:
        start = self._shards[owner].start
        return filled[:, :, start : start + blocks * BLOCK]

    def _residuals_at(self, place: int, foreign: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._residuals is None:
            return None, None
        if place == len(self._kept):
            self._kept.append((torch.zeros_like(foreign), torch.zeros_like(foreign[:, :, 0])))
        return self._kept[place]


def _without(parts: Tensor, rank: int) -> Tensor:
    return torch.cat([parts[:, :rank], parts[:, rank + 1 :]], 1)


class Optimizer:
    """Steps all runs at once; parameters are (runs, elements). SGD, AdamW and Muon are those of
    torch.optim, with a rate for each run."""

    def __init__(self, task: Task, parameters: dict[str, Tensor], device: torch.device) -> None:
        self._task, numel = task, sum(p.numel() for p in parameters.values())
        self._steps = torch.zeros((), device=device)
        self._moments: list[Tensor] = []  # first and second moments, and Muon's momentum
        self._inside: list[tuple[slice, torch.Size]] = []
        self._decay = torch.full((numel,), 0.01, device=device)
        end = 0
        for name, p in parameters.items():
            place, end = slice(end, end + p.numel()), end + p.numel()
            if task.optimizer == "muon" and is_muons(name, p):
                self._inside.append((place, p.shape))
                self._decay[place] = 0.1

    def step(self, parameters: Tensor, gradients: Tensor, rates: Tensor) -> None:
        """Make a step in place. rates: (runs, 1)."""
        if not self._moments:
            self._moments = [torch.zeros_like(gradients) for _ in range(3)]
        first, second, velocity = self._moments
        if self._task.optimizer == "sgd":
            first.mul_(self._task.momentum).add_(gradients)
            parameters.sub_(rates * first)
            return
        self._steps.add_(1)
        first.lerp_(gradients, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
        root = second.sqrt() / (1 - 0.999**self._steps).sqrt()
        update = first / (1 - 0.9**self._steps) / (root + 1e-8)
        for place, shape in self._inside:
            gradient, momentum = gradients[:, place], velocity[:, place]
            momentum.lerp_(gradient, 1 - 0.95)
            matrix = _orthogonal(gradient.lerp(momentum, 0.95).unflatten(1, shape))
            update[:, place] = matrix.flatten(1).float() * (0.2 * max(shape) ** 0.5)
        parameters.mul_(1 - rates * self._decay).sub_(rates * update)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Make five Newton-Schulz iterations in bf16 (Jordan et al., "Muon", 2024), as
    torch.optim.Muon does, for (runs, rows, columns)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if tall else x


class _Together:
    """The state of all runs, and their step."""

    def __init__(
        self, task: Task, method: Method, trials: list[Trial], workers: int, device: torch.device
    ) -> None:
        self._task, self._method, self.device = task, method, device
        models = []
        for trial in trials:
            torch.manual_seed(trial.seed)
            models.append(task.make_model())
        self._model = models[0]
        named = dict(self._model.named_parameters())
        self._shapes = {name: p.shape for name, p in named.items()}
        flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
        self.parameters = torch.stack(flat).to(device)
        if isinstance(self._model, CharLM):
            self._model.lstm = _Cells(self._model.lstm)
        self._model.to(device)
        self._optimizer = Optimizer(task, named, device)
        warm_up = warm_up_of(method, task)
        numel = self.parameters.shape[1]
        self.group = ManyTwoHop(workers, numel, spec_of(method, task), method.feedback, warm_up)
        self._rate = torch.tensor([[trial.rate] for trial in trials], device=device)
        # A step reads rows and factor, and writes losses.
        self.rows = torch.zeros(
            (len(trials), workers, task.batch), dtype=torch.int64, device=device
        )
        self.factor = torch.zeros((), device=device)
        self.losses = torch.zeros(len(trials), device=device)

    def _named(self) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = self.parameters.split(sizes, 1)
        return {
            name: part.unflatten(1, shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def step(self) -> None:
        def loss_of(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(functional_call(self._model, parameters, (inputs,)), targets)

        per_worker = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
        batch = self._task.data.batch(self.rows)
        with sdpa_kernel(SDPBackend.MATH):  # torch.func can batch it on all devices
            gradients, losses = vmap(per_worker)(self._named(), *batch)
        flat = torch.cat([gradients[name].flatten(2) for name in self._shapes], 2)
        if self._method.bf16:
            flat = flat.bfloat16().float()
        mean = self.group.all_reduce(flat)
        self._optimizer.step(self.parameters, mean, self._rate * self.factor)
        self.losses.copy_(losses.mean(1))

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[list[float], list[float]]:
        """Return each run's accuracy in percent, and mean loss."""
        forward = vmap(lambda p, x: functional_call(self._model, p, (x,)), in_dims=(0, None))
        named, places = self._named(), 0
        hits = losses = torch.zeros_like(self.losses, dtype=torch.float64)
        for batch in getattr(self._task.data, split)():
            inputs, targets = (part.to(self.device) for part in batch)
            with sdpa_kernel(SDPBackend.MATH):
                logits = forward(named, inputs)
            hits = hits + (logits.argmax(2) == targets).flatten(1).sum(1)
            every = targets.expand(len(logits), *targets.shape)
            loss = cross_entropy(logits.flatten(0, 1), every.flatten(0, 1), reduction="none")
            losses = losses + loss.view(len(logits), -1).double().sum(1)
            places += targets.numel()
        return (100 * hits / places).tolist(), (losses / places).tolist()


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step as a CUDA graph, with a single launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def train_together(
    task: Task, method: Method, trials: list[Trial], workers: int, device: torch.device
) -> list[dict[str, Any]]:
    """Train all trials; return the rows of training.train(), one for each. On a GPU the step is one
    CUDA graph."""
    start = time.monotonic()
    runs = _Together(task, method, trials, workers, device)
    rows = torch.stack(
        [
            torch.stack([torch.stack(step) for step in batches(task, workers, trial.seed)])
            for trial in trials
        ],
        1,
    ).to(device)
    losses = torch.zeros((task.steps, len(trials)), device=device)
    changes = {0, warm_up_of(method, task)}  # after these steps a new graph is captured
    for number in range(task.steps):
        runs.rows.copy_(rows[number])
        runs.factor.fill_(task.rate_factor(number))
        runs.group.steps = number  # a graph does not count steps
        if number in changes:
            step = runs.step
        if number - _WARM_UP in changes and device.type == "cuda":
            step = _captured(runs.step)
        step()
        losses[number].copy_(runs.losses)
    runs.group.steps = task.steps
    stats = runs.group.stats()
    judged = {split: runs.evaluate(split) for split in sorted({t.split for t in trials})}
    found, by_trial = [], losses.T.tolist()
    for place, trial in enumerate(trials):
        accuracies, losses_of = judged[trial.split]
        found.append(row_of(
            task, method, seed=trial.seed, split=trial.split, workers=workers, rate=trial.rate,
            codec=runs.group.codec(), judged=(accuracies[place], losses_of[place]),
            losses=by_trial[place], ratio=stats["raw_bytes"] / stats["wire_bytes"],
            seconds=(time.monotonic() - start) / len(trials),
        ))  # fmt: skip
    return found
