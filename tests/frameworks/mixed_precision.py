"""Trains under a framework with accumulation, clipping and autocast, and writes what each rank saw
to FOLDER/RANK.json: torchrun ... mixed_precision.py lightning|accelerate|transformers FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

BATCHES, BATCH, WIDTH, ACCUMULATE, CLIP, RATE = 8, 4, 64, 2, 0.01, 0.1
# topk sends few entries, so residuals differ most between ranks; the examples have a dense codec.
CODEC = "topk:density=0.1"
BAD = 4  # the batch in which rank 1's loss is Inf, if there is a loss scaler


class Samples(Dataset):
    def __len__(self) -> int:
        return BATCHES * BATCH * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.computed_in = ""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        self.computed_in = str(y.dtype)
        return {"loss": y.float().square().mean()}


class Watch:
    """Records the norms of the gradients that the optimizer steps with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.net, self.norms, self.scale = Net(), [], 0.0
        self.losses = [self._loss()]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.optimizer.register_step_pre_hook(lambda *_: self.norms.append(self._norm()))

    def _norm(self) -> float:
        gradients = [p.grad for p in self.net.parameters()]
        assert all(g.dtype == torch.float32 for g in gradients)
        return torch.nn.utils.get_total_norm(gradients).item()

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss over all samples."""
        samples = Samples()
        x = torch.stack([samples[i]["x"] for i in range(len(samples))])
        return self.net(x)["loss"].item()

    def report(self, state: Any) -> None:
        computed_in = self.net.computed_in
        self.losses.append(self._loss())
        total = sum(p.double().sum().item() for p in self.net.parameters())
        stats = state.stats()
        row = {
            "norms": self.norms, "weights": total.hex(), "computed_in": computed_in,
            "exchanges": stats["steps"], "ratio": stats["ratio"], "scale": self.scale,
            "losses": self.losses,
        }  # fmt: skip
        (self.folder / f"{dist.get_rank()}.json").write_text(json.dumps(row))


def lightning(watch: Watch) -> None:
    """Train in fp16, with a loss scaler on the CPU."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from thinwire.lightning import ThinwireStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = watch.net

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss = self.net(batch["x"])["loss"]
            return loss * float("inf") if (number, self.global_rank) == (BAD, 1) else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return watch.optimizer

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    strategy = ThinwireStrategy(codec=CODEC, min_bytes=0)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, gradient_clip_val=CLIP,
        accumulate_grad_batches=ACCUMULATE, plugins=MixedPrecision("16-mixed", "cpu", scaler),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Samples(), BATCH))
    trainer.save_checkpoint(watch.folder / "after.ckpt")
    watch.scale = scaler.get_scale()
    watch.report(strategy.thinwire_state)


def accelerate(watch: Watch) -> None:
    from accelerate import Accelerator
    from thinwire.accelerate import prepare

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    model, optimizer, loader, state = prepare(
        accelerator, watch.net, watch.optimizer, DataLoader(Samples(), BATCH),
        codec=CODEC, min_bytes=0,
    )  # fmt: skip
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"])["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    watch.report(state)
    accelerator.end_training()


def transformers(watch: Watch) -> None:
    from thinwire.transformers import ThinwireCallback
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(watch.folder), num_train_epochs=1, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE, max_grad_norm=CLIP, use_cpu=True, bf16=True,
        disable_tqdm=True, save_strategy="no", ddp_backend="gloo", remove_unused_columns=False,
        report_to=[],
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(watch.optimizer, lambda _: 1.0)
    trainer = Trainer(
        watch.net, arguments, train_dataset=Samples(), optimizers=(watch.optimizer, constant)
    )
    callback = ThinwireCallback(trainer, codec=CODEC, min_bytes=0)
    trainer.add_callback(callback)
    trainer.train()
    watch.report(callback.state)


if __name__ == "__main__":
    {"lightning": lightning, "accelerate": accelerate, "transformers": transformers}[sys.argv[1]](
        Watch(Path(sys.argv[2]))
    )
