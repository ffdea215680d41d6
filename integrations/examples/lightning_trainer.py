"""Lightning's Trainer, which starts two ranks itself: python lightning_trainer.py

Only the lines that end in `# thinwire` differ from the uncompressed program; a line that one of
them replaces is after `was:`."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from thinwire.lightning import ThinwireStrategy  # thinwire
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
        )

    def training_step(self, batch, _):
        self.loss = (self.net(batch[0]) - batch[1]).square().mean()
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    seed_everything(1, verbose=False)
    x = torch.randn(2048, 256)
    data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True) / 8**0.5), 64)
    trainer = Trainer(
        strategy=ThinwireStrategy(codec="int4"),  # thinwire, was: strategy="ddp",
        accelerator="cpu", devices=2, max_epochs=8, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"loss {model.loss.item():.3f}")
