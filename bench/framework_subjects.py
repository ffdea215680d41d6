"""One model under each framework, by the framework's own exchange of gradients and by ours: what
bench/frameworks.py times. A framework is imported where it is used."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS, BATCH, RATE = 1024, 4, 2, 0.01
OWN = ""  # in place of a codec: the framework's own exchange
WARM_UP = 3  # steps that are not counted: DDP lays its buckets out anew in the second

Turn = Callable[[int], list[float]]  # so many steps, the seconds of each


class Net(nn.Module):
    """4 x Linear 1024 x 1024 without bias, as in bench/ddp_step.py: 16.8 MB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}  # as Hugging Face's Trainer wants it


class Batches(Dataset):
    """As many random samples as the loops of the frameworks ask for."""

    def __init__(self, samples: int) -> None:
        self._x = torch.randn(samples, WIDTH)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[index]}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def differences(ends: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends)]


def loop(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> Turn:
    """The turns of a training loop of one's own, which is warm already."""

    def turn(steps: int) -> list[float]:
        ends = [time.perf_counter()]
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model(torch.randn(BATCH, WIDTH))["loss"])
            optimizer.step()
            ends.append(time.perf_counter())
        return differences(ends)

    turn(WARM_UP)
    return turn


@contextlib.contextmanager
def ddp(codec: str) -> Iterator[Turn]:
    from thinwire.torch import compress

    model = DistributedDataParallel(Net())
    state = compress(model, codec=codec) if codec else None
    yield loop(model, sgd(model))
    if state is not None:
        state.close()


@contextlib.contextmanager
def fsdp2(codec: str, gather: str | None = None, **sharding: Any) -> Iterator[Turn]:
    from thinwire.torch import compress
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **sharding)
    fully_shard(model, mesh=mesh, **sharding)
    state = compress(model, codec=codec, gather=gather) if codec else None
    yield loop(model, sgd(model))
    if state is not None:
        state.close()


def fsdp2_rounded(codec: str) -> contextlib.AbstractContextManager[Turn]:
    """Parameters are gathered in int8, on request."""
    return fsdp2(codec, gather="int8")


def fsdp2_kept(codec: str) -> contextlib.AbstractContextManager[Turn]:
    """Parameters are gathered once a step."""
    return fsdp2(codec, reshard_after_forward=False)


@contextlib.contextmanager
def accelerate(codec: str) -> Iterator[Turn]:
    from accelerate import Accelerator
    from thinwire.accelerate import prepare

    accelerator, model, state = Accelerator(cpu=True), Net(), None
    if codec:
        model, optimizer, state = prepare(accelerator, model, sgd(model), codec=codec)
    else:
        model, optimizer = accelerator.prepare(model, sgd(model))
    yield loop(model, optimizer, accelerator.backward)
    if state is not None:
        state.close()


@contextlib.contextmanager
def horovod(codec: str) -> Iterator[Turn]:
    """Horovod itself is not here: its own exchange is Compression.none of the same API."""
    import thinwire.horovod as hvd

    hvd.init()
    model = Net()
    compression = getattr(hvd.Compression, codec) if codec else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), compression=compression
    )
    yield loop(model, optimizer)


@contextlib.contextmanager
def lightning(codec: str) -> Iterator[Turn]:
    """A Trainer for each turn, which warms up first."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from thinwire.lightning import ThinwireStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    def turn(steps: int) -> list[float]:
        clock, place = Clock(), TorchElasticEnvironment()
        options = {"cluster_environment": place}
        strategy = ThinwireStrategy(codec=codec, **options) if codec else DDPStrategy(**options)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=torch.distributed.get_world_size(),
            max_steps=WARM_UP + steps, callbacks=[clock], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        samples = Batches((WARM_UP + steps) * BATCH * torch.distributed.get_world_size())
        trainer.fit(Module(), DataLoader(samples, BATCH))
        return differences(clock.ends)[-steps:]

    yield turn


@contextlib.contextmanager
def transformers(codec: str) -> Iterator[Turn]:
    """A Trainer for each turn, as for Lightning."""
    from thinwire.transformers import ThinwireCallback
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    def turn(steps: int) -> list[float]:
        clock, model = Clock(), Net()
        arguments = TrainingArguments(
            max_steps=WARM_UP + steps, per_device_train_batch_size=BATCH, use_cpu=True,
            disable_tqdm=True, logging_strategy="no", save_strategy="no", report_to=[],
            max_grad_norm=0.0, remove_unused_columns=False, ddp_backend="gloo",
        )  # fmt: skip
        optimizer = sgd(model)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        samples = Batches((WARM_UP + steps) * BATCH * torch.distributed.get_world_size())
        trainer = Trainer(
            model, arguments, train_dataset=samples, callbacks=[clock],
            optimizers=(optimizer, constant),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        callback = ThinwireCallback(trainer, codec=codec) if codec else None
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train()
        if callback is not None:
            callback.state.close()
        return differences(clock.ends)[-steps:]

    yield turn


FRAMEWORKS = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP2, reshard_after_forward=False": fsdp2_kept,
    'FSDP2, gather="int8"': fsdp2_rounded,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Hugging Face's Trainer": transformers,
    "Horovod's API": horovod,
}
