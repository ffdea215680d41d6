"""One training run of the accuracy benchmark: a task, a method, a seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import thinwire
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.accuracy.tasks import Task, evaluate, loss_of
from bench.accuracy.two_hop import ExactRest, Exchange, TwoHop, Workers

POINTS = 40  # of a learning curve


@dataclass(frozen=True)
class Method:
    """A way of exchanging gradients. owns_momentum: the group holds it, not the optimizer. delay:
    of one step, after a tenth of the run, in which workers move their weights by the optimizer's
    step with their own gradient, as compress(..., delay=1) does. bf16: gradients are rounded to it
    before, as mixed precision does. exact_1d: norms and biases are exchanged in fp32. warm_up: the
    part of the run that goes in int8 before the codec takes over."""

    name: str
    codec: str
    feedback: bool = True
    owns_momentum: bool = False
    delay: bool = False
    bf16: bool = False
    exact_1d: bool = False
    warm_up: float = 0.0


METHODS = {
    method.name: method
    for method in (
        Method("fp32", "fp32"),
        Method("bf16", "bf16"),
        Method("int8", "int8"),
        Method("int4", "int4"),
        Method("int4 without feedback", "int4", feedback=False),
        Method("int4 Hadamard", "int4:hadamard=1"),
        Method("adaptive 3", "adaptive:bits=3"),
        Method("adaptive 2", "adaptive"),
        Method("adaptive 1", "adaptive:bits=1"),
        Method("adaptive 0.5", "adaptive:bits=0.5"),
        Method("onebit", "onebit", owns_momentum=True),
        Method("onebit both ways", "onebit:down=onebit", owns_momentum=True),
        Method("fp32 delay 1", "fp32", delay=True),
        Method("int4 delay 1", "int4", delay=True),
        Method("topk 1 %", "topk:density=0.01,warmup={warmup},masking=0", owns_momentum=True),
        Method("topk 0.1 % DGC", "topk:density=0.001,warmup={warmup}", owns_momentum=True),
    )
}
# The drift of a long run, by what is exchanged and how (drift.py).
DRIFTING = tuple(
    Method(
        name + (" bf16 gradients" if bf16 else "") + (" exact 1-d" if exact_1d else ""),
        codec, feedback="without" not in name, bf16=bf16, exact_1d=exact_1d,
    )
    for bf16 in (False, True)
    for name, codec in (
        ("fp32", "fp32"), ("int8", "int8"), ("int8 without feedback", "int8"), ("int4", "int4"),
        ("int4 without feedback", "int4"), ("adaptive 2", "adaptive"),
        ("adaptive 2 without feedback", "adaptive"),
    )
    for exact_1d in (False, True)
    if not (exact_1d and codec == "fp32")
)  # fmt: skip
# Ways to lose less than int4 does, for its bytes or a few more.
FINER = (
    Method("adaptive 4", "adaptive:bits=4"),
    Method("int4 block 128", "int4:block=128"),
    Method("int4 down int8", "int4:down=int8"),
)
# int8 while the loss falls fast, and then fewer bits.
WARMED = (
    Method("int4 after int8", "int4", warm_up=0.3),
    Method("adaptive 2 after int8", "adaptive", warm_up=0.3),
)
NAMED = tuple(METHODS)  # those of the main table
METHODS |= {method.name: method for method in DRIFTING + FINER + WARMED}


def spec_of(method: Method, task: Task) -> str:
    """DGC's density falls during the first quarter of the run."""
    return method.codec.format(warmup=task.steps // 4)


def warm_up_of(method: Method, task: Task) -> int:
    """Steps."""
    return round(method.warm_up * task.steps)


class Curve:
    """Training losses over a run: the means of POINTS parts of its steps."""

    def __init__(self, steps: int) -> None:
        self.points: list[tuple[int, float]] = []
        self._steps, self._step, self._recent = steps, 0, []

    def add(self, loss: float) -> None:
        """The next step's."""
        before = self._step * POINTS // self._steps
        self._step += 1
        self._recent.append(loss)
        if self._step * POINTS // self._steps != before:
            self.points.append((self._step, round(sum(self._recent) / len(self._recent), 4)))
            self._recent = []


def row_of(
    task: Task,
    method: Any,
    *,
    seed: int,
    split: str,
    workers: int,
    judged: tuple[float, float],
    curve: list[tuple[int, float]],
    ratio: float,
    seconds: float,
    **more: Any,
) -> dict[str, Any]:
    """A run's row. judged: accuracy and loss; ratio: bytes of fp32 over those sent. more: further
    fields, or others in place of the task's and the method's."""
    accuracy, loss = judged
    return {
        "task": task.name, "method": method.name, "codec": method.codec, "rate": task.rate,
        "seed": seed, "split": split, "workers": workers, "steps": task.steps,
        "accuracy": accuracy, "loss": loss, "train_loss": curve[-1][1], "ratio": ratio,
        "curve": curve, "seconds": seconds,
    } | more  # fmt: skip


def batches(task: Task, workers: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Rows for each worker, step by step: the same for every method."""
    generator = torch.Generator().manual_seed(seed)
    whole = task.batch * workers
    done = 0
    while done < task.steps:
        order = torch.randperm(task.data.train_size, generator=generator)
        for rows in order.split(whole)[: task.data.train_size // whole]:
            if done == task.steps:
                return
            yield list(rows.chunk(workers))
            done += 1


def gradients_of(
    task: Task, model: torch.nn.Module, rows: list[torch.Tensor]
) -> tuple[list[torch.Tensor], float]:
    """Every worker's flat gradient, and the mean loss."""
    flat, losses = [], []
    parameters = list(model.parameters())
    for part in rows:
        loss = loss_of(model, task.data.batch(part))
        flat.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        losses.append(loss.item())
    return flat, sum(losses) / len(losses)


class Displaced:
    """Workers' own weights under a delay: the common ones, moved by their last gradient."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        self._task, self._model = task, model
        self._steps: list[torch.Tensor] = []  # by worker: what its weights are off by

    def gradients(self, rows: list[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
        if not self._steps:
            return gradients_of(self._task, self._model, rows)
        parameters = list(self._model.parameters())
        common = parameters_to_vector(parameters).detach()
        flat, losses = [], []
        for part, step in zip(rows, self._steps, strict=True):
            vector_to_parameters(common + step, parameters)
            own, loss = gradients_of(self._task, self._model, [part])
            flat += own
            losses.append(loss)
        vector_to_parameters(common, parameters)
        return flat, sum(losses) / len(losses)

    def move(self, gradients: list[torch.Tensor], sgd: torch.optim.SGD) -> None:
        group = sgd.param_groups[0]
        steps = gradients
        buffers = [sgd.state[p].get("momentum_buffer") for p in self._model.parameters()]
        if buffers[0] is not None:
            velocity = torch.cat([buffer.flatten() for buffer in buffers])
            steps = [gradient.add(velocity, alpha=group["momentum"]) for gradient in gradients]
        self._steps = [-group["lr"] * step for step in steps]


def open_group(
    method: Method, task: Task, parameters: dict[str, torch.Tensor], workers: int, momentum: float
) -> Exchange:
    """The exchange between the workers: the engine's own where it is not two hops."""
    spec = spec_of(method, task)
    if thinwire.codec_info(spec).entries:
        return Workers(workers, parameters, spec, momentum, method.feedback)
    if method.exact_1d:
        taken = torch.cat([torch.full((p.numel(),), p.dim() > 1) for p in parameters.values()])
        numel = int(taken.sum())
        return ExactRest(TwoHop(workers, numel, spec, momentum, method.feedback), taken)
    numel = sum(p.numel() for p in parameters.values())
    return TwoHop(workers, numel, spec, momentum, method.feedback, warm_up_of(method, task))


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and "blocks." in name


def make_optimizers(
    task: Task, parameters: dict[str, torch.Tensor], momentum: float
) -> list[torch.optim.Optimizer]:
    """momentum: SGD's, which may live elsewhere. Muon takes the matrices between embedding and
    head, at AdamW's rate (Liu et al., arXiv 2502.16982, section 2.2), and AdamW the rest."""
    if task.optimizer == "muon":
        inside = [p for name, p in parameters.items() if is_muons(name, p)]
        rest = [p for p in parameters.values() if all(p is not other for other in inside)]
        muon = torch.optim.Muon(inside, lr=task.rate, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr=task.rate)]
    if task.optimizer == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=task.rate)]
    return [torch.optim.SGD(parameters.values(), lr=task.rate, momentum=momentum)]


def train(task: Task, method: Method, seed: int, workers: int, split: str) -> dict[str, Any]:
    """Trains from the seed; the run's row. split: "validation" or "test", what it is judged by."""
    torch.manual_seed(seed)
    model = task.make_model()
    parameters = dict(model.named_parameters())
    momentum = task.momentum if method.owns_momentum else 0.0
    group = open_group(method, task, parameters, workers, momentum)
    optimizers = make_optimizers(task, parameters, task.momentum - momentum)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, task.rate_factor) for o in optimizers]
    sizes = [p.numel() for p in parameters.values()]

    def apply(mean: torch.Tensor) -> None:
        for p, g in zip(parameters.values(), mean.split(sizes), strict=True):
            p.grad = g.view_as(p)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()

    displaced, late = Displaced(task, model), None
    curve, start = Curve(task.steps), time.monotonic()
    for step, rows in enumerate(batches(task, workers, seed), 1):
        flat, loss = displaced.gradients(rows)
        if method.bf16:
            flat = [gradient.bfloat16().float() for gradient in flat]
        own = [gradient.clone() for gradient in flat] if method.delay else []
        mean = group.all_reduce(flat)
        if late is not None:
            apply(late)
        if method.delay and step > task.steps // 10:
            late = mean.clone()
            displaced.move(own, optimizers[0])
        else:
            apply(mean)
        curve.add(loss)
    if late is not None:
        apply(late)
    stats, codec = group.stats(), group.codec()
    group.close()
    return row_of(
        task, method, seed=seed, split=split, workers=workers, codec=codec, curve=curve.points,
        judged=evaluate(model, getattr(task.data, split)()),
        ratio=stats["raw_bytes"] / stats["wire_bytes"], seconds=time.monotonic() - start,
    )  # fmt: skip
