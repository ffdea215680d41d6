"""One training run of the accuracy benchmark: a task, a method, a seed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import thinwire
import torch

from bench.accuracy.tasks import Task, evaluate, loss_of
from bench.accuracy.two_hop import TwoHop, Workers

POINTS = 40  # of a learning curve


@dataclass(frozen=True)
class Method:
    """A way of exchanging gradients. owns_momentum: the group has the momentum, and not the
    optimizer. bf16: gradients are first rounded to bf16, as with mixed precision. warm_up: the
    first part of the run, which uses int8 in place of the codec."""

    name: str
    codec: str
    feedback: bool = True
    owns_momentum: bool = False
    bf16: bool = False
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
        Method("topk 1 %", "topk:density=0.01,warmup={warmup},masking=0", owns_momentum=True),
        Method("topk 0.1 % DGC", "topk:density=0.001,warmup={warmup}", owns_momentum=True),
    )
}
# The methods of drift.py: the drift of a long run.
DRIFTING = tuple(
    Method(name + suffix, codec, feedback="without" not in name, bf16=bool(suffix))
    for suffix in ("", " bf16 gradients")
    for name, codec in (
        ("fp32", "fp32"), ("int8", "int8"), ("int8 without feedback", "int8"), ("int4", "int4"),
        ("int4 without feedback", "int4"), ("adaptive 2", "adaptive"),
        ("adaptive 2 without feedback", "adaptive"),
    )
)  # fmt: skip
# Methods with int8 while the loss falls fast, and fewer bits later.
WARMED = (
    Method("int4 after int8", "int4", warm_up=0.3),
    Method("adaptive 2 after int8", "adaptive", warm_up=0.3),
)
NAMED = tuple(METHODS)  # the methods of the main table
METHODS |= {method.name: method for method in DRIFTING + WARMED}


def spec_of(method: Method, task: Task) -> str:
    """Return the method's spec. DGC's density falls during the first quarter of the run."""
    return method.codec.format(warmup=task.steps // 4)


def warm_up_of(method: Method, task: Task) -> int:
    """Return the number of steps of the warm-up."""
    return round(method.warm_up * task.steps)


def curve_of(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return a run's training losses as (last step, mean loss) of POINTS parts."""
    ends = sorted({-(-part * len(losses) // POINTS) for part in range(POINTS + 1)})
    return [(b, round(sum(losses[a:b]) / (b - a), 4)) for a, b in itertools.pairwise(ends)]


def row_of(
    task: Task,
    method: Any,
    *,
    seed: int,
    split: str,
    workers: int,
    judged: tuple[float, float],
    losses: Sequence[float],
    ratio: float,
    seconds: float,
    **more: Any,
) -> dict[str, Any]:
    """Return a run's row. judged: accuracy and loss; losses: of training, by step; ratio: bytes of
    fp32 divided by those sent. more: fields that are added, or replace those of the task and the
    method."""
    (accuracy, loss), curve = judged, curve_of(losses)
    return {
        "task": task.name, "method": method.name, "codec": method.codec, "rate": task.rate,
        "seed": seed, "split": split, "workers": workers, "steps": task.steps,
        "accuracy": accuracy, "loss": loss, "train_loss": curve[-1][1], "ratio": ratio,
        "curve": curve, "seconds": seconds,
    } | more  # fmt: skip


def batches(task: Task, workers: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Yield the rows of each worker, step by step, the same for every method."""
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
    """Return every worker's flat gradient, and the mean loss."""
    flat, losses = [], []
    parameters = list(model.parameters())
    for part in rows:
        loss = loss_of(model, task.data.batch(part))
        flat.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        losses.append(loss.item())
    return flat, sum(losses) / len(losses)


def open_group(
    method: Method, task: Task, parameters: dict[str, torch.Tensor], workers: int, momentum: float
) -> TwoHop | Workers:
    """Return the exchange between the workers: TwoHop, or the engine for other algorithms."""
    spec = spec_of(method, task)
    if thinwire.codec_info(spec).entries:
        return Workers(workers, parameters, spec, momentum, method.feedback)
    numel = sum(p.numel() for p in parameters.values())
    return TwoHop(workers, numel, spec, momentum, method.feedback, warm_up_of(method, task))


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and "blocks." in name


def make_optimizers(
    task: Task, parameters: dict[str, torch.Tensor], momentum: float
) -> list[torch.optim.Optimizer]:
    """Return the optimizers. momentum: of SGD; 0 if the exchange has it. Muon trains the matrices
    between embedding and head, at AdamW's rate (Liu et al., arXiv 2502.16982, section 2.2), and
    AdamW the rest."""
    if task.optimizer == "muon":
        inside = [p for name, p in parameters.items() if is_muons(name, p)]
        rest = [p for p in parameters.values() if all(p is not other for other in inside)]
        muon = torch.optim.Muon(inside, lr=task.rate, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr=task.rate)]
    if task.optimizer == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=task.rate)]
    return [torch.optim.SGD(parameters.values(), lr=task.rate, momentum=momentum)]


def train(task: Task, method: Method, seed: int, workers: int, split: str) -> dict[str, Any]:
    """Train from the seed. Return the run's row. split: "validation" or "test", on which it is
    evaluated."""
    torch.manual_seed(seed)
    model = task.make_model()
    parameters = dict(model.named_parameters())
    momentum = task.momentum if method.owns_momentum else 0.0
    group = open_group(method, task, parameters, workers, momentum)
    optimizers = make_optimizers(task, parameters, task.momentum - momentum)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, task.rate_factor) for o in optimizers]
    sizes = [p.numel() for p in parameters.values()]

    losses, start = [], time.monotonic()
    for rows in batches(task, workers, seed):
        flat, loss = gradients_of(task, model, rows)
        losses.append(loss)
        if method.bf16:
            flat = [gradient.bfloat16().float() for gradient in flat]
        mean = group.all_reduce(flat)
        for p, g in zip(parameters.values(), mean.split(sizes), strict=True):
            p.grad = g.view_as(p)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    stats, codec = group.stats(), group.codec()
    group.close()
    return row_of(
        task, method, seed=seed, split=split, workers=workers, codec=codec, losses=losses,
        judged=evaluate(model, getattr(task.data, split)()),
        ratio=stats["raw_bytes"] / stats["wire_bytes"], seconds=time.monotonic() - start,
    )  # fmt: skip
