"""Training steps under each framework and each way of exchanging gradients: context managers that
yield the turn of a warmed-up model (bench/harness.py). A framework is imported only when it is
used.

A way is OWN (the framework's own exchange), BF16 (a communication hook of five lines), ALONE (no
exchange: the part of a step that no exchange can save), or a codec of thinwire."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from bench.harness import Turn

LAYERS, BATCH, RATE = 4, 2, 0.01
WIDTH = 1024  # 16.8 MB of gradients; 256 and 2048 make 1 and 67 MB
OWN, BF16, ALONE = "plain", "bf16 hook", "alone"
WARM_UP = 3  # steps that are not counted; DDP rebuilds its buckets in the second one
MEASURING = 75  # more such steps with codec="auto", which measures the first steps
MEASURING_FSDP2 = 131  # likewise under FSDP2: the most steps in which "auto" compares codecs
chosen: dict[str, dict[str, str]] = {}  # by way: the codec that codec="auto" has chosen


class Net(nn.Module):
    """LAYERS x Linear WIDTH x WIDTH without bias."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}  # as Hugging Face's Trainer wants it


class Batches(Dataset):
    """A number of random samples for the frameworks' loops."""

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
    width: int = WIDTH,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    warm_up: int = WARM_UP,
    device: str = "cpu",
) -> Turn:
    """Return the turn of a warmed-up training loop: forward and backward passes, with all
    exchanges. On a GPU a step ends when its stream has no more work."""

    def turn(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            backward(model(torch.randn(BATCH, width, device=device))["loss"])
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
            optimizer.step()  # not timed: it takes the same time in every way
        return found

    turn(warm_up)
    return turn


def _keep(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that leaves the bucket unchanged."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bf16 hook; torch's bf16_compress_hook does not support Gloo."""
    buffer = bucket.buffer()
    wire = buffer.to(torch.bfloat16)
    sent = dist.all_reduce(wire, group=group, async_op=True).get_future()
    return sent.then(lambda done: buffer.copy_(done.value()[0]).div_(group.size()))


for _hook in (_keep, _bf16):
    _hook.__annotations__ = {}  # DDP requires types there, but they are strings in this file


def _warm(
    way: str, compression: Any, measuring: int, *of_loop: Any, **options: Any
) -> Iterator[Turn]:
    """Yield the turn of loop(), and close the compression afterwards. measuring: more steps of
    warm-up with codec="auto"."""
    auto = way == "auto"
    turn = loop(*of_loop, warm_up=WARM_UP + measuring * auto, **options)
    if auto:
        # Under FSDP2 the exchange has it.
        chosen[way] = {"chosen": getattr(compression, "exchange", compression).codec}
    yield turn
    if compression is not None:
        compression.close()


@contextlib.contextmanager
def ddp(way: str, width: int = WIDTH, device: str = "cpu") -> Iterator[Turn]:
    from thinwire.torch import compress

    model, compression = DistributedDataParallel(Net(width).to(device)), None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if way == ALONE:
        model.register_comm_hook(None, _keep)
    elif way == BF16:
        model.register_comm_hook(model.process_group, _bf16)
    elif way != OWN:
        compression = compress(model, codec=way, optimizer=optimizer)
    yield from _warm(way, compression, MEASURING, model, optimizer, width, device=device)


def shard(model: nn.Module, layers: Iterable[nn.Module], mesh: Any, **options: Any) -> None:
    """Call fully_shard() on a model, with a unit per layer. options: of fully_shard()."""
    from torch.distributed.fsdp import fully_shard

    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, **options)


@contextlib.contextmanager
def fsdp2(way: str, width: int = WIDTH, **options: Any) -> Iterator[Turn]:
    """Yield the turn with FSDP2. options: of fully_shard(), except gather, of compress()."""
    from thinwire.torch import compress
    from torch.distributed.device_mesh import init_device_mesh

    gather = options.pop("gather", None)
    model = Net(width)
    shard(model, model.layers, init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    compression = compress(model, codec=way, gather=gather) if way != OWN else None
    yield from _warm(way, compression, MEASURING_FSDP2, model, sgd(model), width)


@contextlib.contextmanager
def accelerate(way: str) -> Iterator[Turn]:
    from accelerate import Accelerator
    from thinwire.accelerate import prepare

    accelerator, model, state = Accelerator(cpu=True), Net(), None
    if way != OWN:
        model, optimizer, state = prepare(accelerator, model, sgd(model), codec=way)
    else:
        model, optimizer = accelerator.prepare(model, sgd(model))
    yield from _warm(way, state, 0, model, optimizer, backward=accelerator.backward)


@contextlib.contextmanager
def horovod(way: str) -> Iterator[Turn]:
    """Yield the turn with thinwire.horovod. Horovod itself is not used: OWN is Compression.none of
    the same API."""
    import thinwire.horovod as hvd

    hvd.init()
    model = Net()
    compression = getattr(hvd.Compression, way) if way != OWN else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), compression=compression
    )

    def backward(loss: torch.Tensor) -> None:
        """Wait for the exchange in backward(): step(), which would wait, is not timed."""
        loss.backward()
        optimizer.synchronize()

    yield loop(model, optimizer, backward=backward)


@contextlib.contextmanager
def lightning(way: str) -> Iterator[Turn]:
    """Yield the turn with Lightning: a Trainer for each turn, which warms up first."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback
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

    def turn(steps: int) -> list[float]:
        ends, place = [], TorchElasticEnvironment()
        clock = LambdaCallback(on_train_batch_end=lambda *_: ends.append(time.perf_counter()))
        options = {"cluster_environment": place}
        strategy = ThinwireStrategy(codec=way, **options) if way != OWN else DDPStrategy(**options)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=dist.get_world_size(),
            max_steps=WARM_UP + steps, callbacks=[clock], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        samples = Batches((WARM_UP + steps) * BATCH * dist.get_world_size())
        trainer.fit(Module(), DataLoader(samples, BATCH))
        return differences(ends)[-steps:]

    yield turn


@contextlib.contextmanager
def transformers(way: str) -> Iterator[Turn]:
    """Yield the turn with transformers: a Trainer for each turn, as with Lightning."""
    from thinwire.transformers import ThinwireCallback
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []

    def turn(steps: int) -> list[float]:
        model = Net()
        arguments = TrainingArguments(
            max_steps=WARM_UP + steps, per_device_train_batch_size=BATCH, use_cpu=True,
            disable_tqdm=True, logging_strategy="no", save_strategy="no", report_to=[],
            max_grad_norm=0.0, remove_unused_columns=False, ddp_backend="gloo",
        )  # fmt: skip
        optimizer = sgd(model)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        samples = Batches((WARM_UP + steps) * BATCH * dist.get_world_size())
        trainer = Trainer(
            model, arguments, train_dataset=samples, callbacks=[Clock()],
            optimizers=(optimizer, constant),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        callback = ThinwireCallback(trainer, codec=way) if way != OWN else None
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train()
        if callback is not None:
            callback.state.close()
        return differences(ends)[-steps:]

    yield turn


FRAMEWORKS = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    # Parameters are gathered once per step.
    "FSDP2, reshard_after_forward=False": lambda way: fsdp2(way, reshard_after_forward=False),
    # Differences of parameters are gathered with the gradients' codec.
    "FSDP2, gather=": lambda way: fsdp2(way, gather=way),
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Hugging Face's Trainer": transformers,
    "Horovod's API": horovod,
}
