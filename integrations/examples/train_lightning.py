"""Lightning: ThinwireStrategy in place of "ddp"; here two ranks on the CPU.

python integrations/examples/train_lightning.py FOLDER [checkpoint to resume from]"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from thinwire.lightning import ThinwireStats, ThinwireStrategy
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EPOCHS, BATCHES, BATCH = 128, 8, 20, 32


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: str, resume_from: str | None = None) -> None:
    seed_everything(1, verbose=False)
    x = torch.randn(2 * BATCHES * BATCH, WIDTH)
    y = x[:, :8].sum(1, keepdim=True) / 8**0.5
    # find_unused_parameters keeps DDP from rebuilding its buckets after the first step, so that a
    # resumed run has the same bits. Without it no residual is lost, either.
    strategy = ThinwireStrategy(codec="int4", min_bytes=0, find_unused_parameters=True)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=EPOCHS,
        accumulate_grad_batches=2, gradient_clip_val=1.0, logger=CSVLogger(folder),
        callbacks=[
            ThinwireStats(every=10), ModelCheckpoint(folder, "{epoch}", save_top_k=-1),
        ],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    trainer.fit(model, DataLoader(TensorDataset(x, y), BATCH), ckpt_path=resume_from)
    if trainer.is_global_zero:
        stats = strategy.thinwire_state.stats()
        total = sum(p.double().sum().item() for p in model.parameters())
        print(
            f"int4: loss {model.losses[0]:.3f} to {model.losses[-1]:.3f} in {stats['steps']} steps,"
            f" {stats['ratio']:.1f} times fewer bytes than fp32; weights {total.hex()}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
