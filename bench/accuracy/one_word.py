"""The accuracy of programs that differ from their exact twins by one word: each trains over paired
seeds with the backend "thinwire", with compress(), and with its own exchange in fp32.

    build/frameworks/bin/python -m bench.accuracy.one_word --out build/one_word_accuracy.json

The programs are those of `python -m bench one_word` (make bench-one-word), with an MLP on
Fashion-MNIST, two ranks, and an eighth of the steps of tasks.py; HSDP has two hosts of two ranks,
which requires root. The codec is int4 everywhere; FSDP2's gathers are compressed, too. A row has
the test accuracies by way and seed, the paired differences of the backend from compress() with
their standard error, and the number of seeds whose final parameters have the same bits both ways.

Bits can be the same only where both ways cut alike, so the MLP has no biases, and its matrices are
whole blocks. After the first step DDP lays its buckets out anew, in the order in which gradients
came: residuals of compress() follow their parameters there, and those of a group, which knows no
parameters, do not. The first and the third program keep their buckets (find_unused_parameters, as
Hugging Face's Trainer has it); the tutorial, Lightning and Accelerate have what is the default."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bench import harness, lab
from bench.accuracy.tasks import TASKS, Task, evaluate
from bench.accuracy.training import batches
from bench.subjects.steps import mesh_of_hosts
from demo import data

CODEC = "int4"
KEEPING = {"find_unused_parameters": True}  # DDP keeps its buckets
PLAIN, COMPRESS, BACKEND = WAYS = ("gloo", "compress()", "thinwire")
TIMEOUT_S = 3600.0
Inputs = dict[str, torch.Tensor]


class Learner(nn.Module):
    """A model and its loss, as Hugging Face's Trainer wants them."""

    def __init__(self, model: nn.Module, *, squares: bool) -> None:
        """squares: the loss is the squared error of one-hot labels, else cross entropy."""
        super().__init__()
        self.model, self._squares = model, squares

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Inputs:
        logits = self.model(x)
        if self._squares:
            return {"loss": mse_loss(logits, one_hot(y, data.CLASSES).float())}
        return {"loss": cross_entropy(logits, y)}


@dataclass
class Run:
    """A program's training, exchanged in one way; the default group is that of the way."""

    way: str
    task: Task
    inputs: list[Inputs]  # of this rank's steps
    learner: Learner
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the compression

    def optimizer(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        parameters, momentum = self.learner.parameters(), self.task.momentum
        optimizer = torch.optim.SGD(parameters, lr=self.task.rate, momentum=momentum)
        return optimizer, LambdaLR(optimizer, self.task.rate_factor)

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        schedule: LambdaLR,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> None:
        for inputs in self.inputs:
            optimizer.zero_grad()
            backward(model(**inputs)["loss"])
            optimizer.step()
            schedule.step()

    @contextlib.contextmanager
    def compressing(self, model: nn.Module, **options: Any) -> Iterator[None]:
        """compress() of the model, if that is the way."""
        from thinwire.torch import compress

        made = compress(model, codec=CODEC, **options) if self.way == COMPRESS else None
        yield
        if made is not None:
            self.stats = made.stats()
            made.close()


def make_model() -> nn.Module:
    """The MLP of tasks.py, without biases, and wider."""
    return nn.Sequential(
        nn.Linear(data.PIXELS, 256, bias=False), nn.ReLU(), nn.Linear(256, 512, bias=False),
        nn.ReLU(), nn.Linear(512, data.CLASSES, bias=False),
    )  # fmt: skip


def plain_loop(run: Run) -> None:
    loop(run, **KEEPING)


def loop(run: Run, **options: Any) -> None:
    """options: of DDP."""
    model = DistributedDataParallel(run.learner, **options)
    with run.compressing(model):
        run.train(model, *run.optimizer())


def replicate(run: Run) -> None:
    from torch.distributed._composable.replicate import replicate

    replicate(run.learner, **KEEPING)
    with run.compressing(run.learner):
        run.train(run.learner, *run.optimizer())


def shard(run: Run, mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(run.learner.model[0], mesh=mesh)
    fully_shard(run.learner, mesh=mesh)  # the other two layers
    with run.compressing(run.learner, **options):
        run.train(run.learner, *run.optimizer())


def fsdp2(run: Run) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shard(run, init_device_mesh("cpu", (dist.get_world_size(),)), gather=CODEC)


def hsdp(run: Run) -> None:
    from thinwire.torch import backend

    ours = {"replicate": ("thinwire", backend.Options(CODEC))}
    mesh = mesh_of_hosts(ours if run.way == BACKEND else None)
    shard(run, mesh, inner=False)
    if run.way == BACKEND:
        run.stats = mesh.get_group("replicate").stats()


def lightning(run: Run) -> None:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from thinwire.lightning import ThinwireStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.learner = run.learner

        def training_step(self, inputs: Inputs, _: int) -> torch.Tensor:
            return self.learner(**inputs)["loss"]

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer, schedule = run.optimizer()
            lr_scheduler = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    place = {"cluster_environment": TorchElasticEnvironment()}
    ours = run.way == COMPRESS
    strategy = ThinwireStrategy(codec=CODEC, **place) if ours else DDPStrategy(**place)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_epochs=1,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(run.inputs, batch_size=None))


def accelerate(run: Run) -> None:
    from accelerate import Accelerator
    from thinwire.accelerate import prepare

    accelerator, (optimizer, schedule) = Accelerator(cpu=True), run.optimizer()
    if run.way == COMPRESS:
        model, optimizer, state = prepare(accelerator, run.learner, optimizer, codec=CODEC)
    else:
        model, optimizer = accelerator.prepare(run.learner, optimizer)
    run.train(model, optimizer, schedule, accelerator.backward)
    if run.way == COMPRESS:
        run.stats = state.stats()
        state.close()


def transformers(run: Run) -> None:
    from thinwire.transformers import ThinwireCallback
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class OfBatches(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(run.inputs, batch_size=None)

    arguments = TrainingArguments(
        max_steps=len(run.inputs), use_cpu=True, disable_tqdm=True, logging_strategy="no",
        save_strategy="no", report_to=[], max_grad_norm=0.0, ddp_backend="gloo",
    )  # fmt: skip
    trainer = OfBatches(
        run.learner, arguments, train_dataset=run.inputs, optimizers=run.optimizer()
    )
    trainer.remove_callback(PrinterCallback)
    callback = ThinwireCallback(trainer, codec=CODEC) if run.way == COMPRESS else None
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train()
    if callback is not None:
        run.stats = callback.state.stats()
        callback.state.close()


TUTORIAL = "torch's DDP tutorial"  # it has a squared error
PROGRAMS: dict[str, Callable[[Run], None]] = {
    "plain DDP loop": plain_loop, TUTORIAL: loop, "replicate": replicate, "FSDP2": fsdp2,
    "Lightning": lightning, "Accelerate": accelerate, "Hugging Face's Trainer": transformers,
}  # fmt: skip
ON_HOSTS: dict[str, Callable[[Run], None]] = {"HSDP": hsdp}


def train(name: str, way: str, task: Task, seed: int) -> dict[str, Any]:
    """In every rank: a program trains from the seed. Its accuracy, bits, and ratio of bytes."""
    from bench.subjects.steps import OWN, meet_again

    program = (PROGRAMS | ON_HOSTS)[name]
    meet_again(CODEC if way == BACKEND and name in PROGRAMS else OWN)
    torch.manual_seed(seed)
    learner = Learner(task.make_model(), squares=name == TUTORIAL)
    rows = [each[dist.get_rank()] for each in batches(task, dist.get_world_size(), seed)]
    inputs = [dict(zip("xy", task.data.batch(row), strict=True)) for row in rows]
    run = Run(way, task, inputs, learner)
    program(run)
    if way == BACKEND and name in PROGRAMS:
        run.stats = dist.group.WORLD.stats()
    with torch.no_grad():
        parameters = [getattr(p, "full_tensor", p.detach)() for p in learner.parameters()]
    whole = parameters_to_vector(parameters)
    model = task.make_model()
    vector_to_parameters(whole, model.parameters())
    accuracy, loss = evaluate(model, task.data.test())
    return {
        "program": name, "way": way, "seed": seed, "accuracy": accuracy, "loss": loss,
        "ratio": run.stats.get("ratio"), "sha256": hashlib.sha256(whole.numpy()).hexdigest(),
    }  # fmt: skip


def train_all(names: list[str], task: Task, seeds: int) -> list[dict[str, Any]]:
    found = []
    for name in names:
        for seed in range(1, seeds + 1):
            found += [train(name, way, task, seed) for way in WAYS]
            if dist.get_rank() == 0:
                last = ", ".join(f"{row['way']} {row['accuracy']:.2f}" for row in found[-3:])
                print(f"{name}, seed {seed}: {last}", flush=True)
    return found


def summary_of(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A program's row."""
    by_way = {way: [r for r in runs if (r["program"], r["way"]) == (name, way)] for way in WAYS}
    accuracies = {way: [run["accuracy"] for run in by_way[way]] for way in WAYS}
    pairs = list(zip(by_way[BACKEND], by_way[COMPRESS], strict=True))
    differences = [ours["accuracy"] - theirs["accuracy"] for ours, theirs in pairs]
    return {
        "program": name, "accuracy": accuracies, "difference": statistics.mean(differences),
        "standard_error": statistics.stdev(differences) / len(pairs) ** 0.5,
        "spread": statistics.stdev(accuracies[COMPRESS]),
        "seeds": len(pairs), "same_bits": sum(a["sha256"] == b["sha256"] for a, b in pairs),
        "ratio": by_way[BACKEND][0]["ratio"],
        **{f"mean_{number}": statistics.mean(accuracies[way]) for number, way in enumerate(WAYS)},
    }  # fmt: skip


COLUMNS = {
    "program": "{program}",
    "seeds": "{seeds}",
    PLAIN: "{mean_0:.2f}",
    COMPRESS: "{mean_1:.2f}",
    BACKEND: "{mean_2:.2f}",
    "backend minus compress(), paired": "{difference:+.3f} ± {standard_error:.3f}",
    "compress()'s deviation over seeds": "{spread:.3f}",
    "same bits": "{same_bits} of {seeds}",
    "fewer bytes": "{ratio:.1f} x",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="two at least")
    parser.add_argument("--steps_part", type=int, default=8, help="so many times fewer steps")
    parser.add_argument("--programs", default="", help="names, with ; between them")
    parser.add_argument("--out", type=Path, default=Path("build/one_word_accuracy.json"))
    given = parser.parse_args()
    task = TASKS["mlp"]
    task = dataclasses.replace(task, make_model=make_model, steps=task.steps // given.steps_part)
    names = given.programs.split(";") if given.programs else [*PROGRAMS, *ON_HOSTS]
    if harness.is_rank():
        several = int(os.environ["LOCAL_WORLD_SIZE"]) < int(os.environ["WORLD_SIZE"])
        mine = [name for name in names if name in (ON_HOSTS if several else PROGRAMS)]
        return harness.be_rank(lambda: train_all(mine, task, given.seeds))
    os.environ["HF_HUB_OFFLINE"] = "1"
    runs = []
    for link, hosts, each, all_ in ((lab.LOOPBACK, 2, 1, PROGRAMS), (lab.NONE, 2, 2, ON_HOSTS)):
        if not any(name in all_ for name in names):
            continue
        if link != lab.LOOPBACK and (refusal := lab.can_shape()):
            print(f"{', '.join(all_)}: skipped, {refusal}")
            continue
        with lab.open_lab(hosts, link, ranks_per_host=each) as place:
            runs += harness.run_ranks(place, sys.argv[1:], TIMEOUT_S, "bench.accuracy.one_word")
    rows = [summary_of(name, runs) for name in dict.fromkeys(run["program"] for run in runs)]
    harness.write(given.out, rows, "lightning", "accelerate", "transformers", runs=runs)
    print(harness.table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
