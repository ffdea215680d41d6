"""Trains with a warm-up under each of Lightning's strategies, and writes the bytes that each rank
has sent by the end of each step to FOLDER/RANK.json:
torchrun ... lightning_warm_up.py lightning FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mixed_precision import BATCH, RATE, Net, Samples
from torch.utils.data import DataLoader

WARM_UP = 3  # each of mixed_precision.BATCHES steps
OPTIONS: dict[str, Any] = {
    "codec": "int4", "min_bytes": 0, "warm_up_steps": WARM_UP, "warm_up_codec": "int8",
}  # fmt: skip


def trainer() -> list[int]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback
    from thinwire.lightning import ThinwireStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    sent: list[int] = []
    strategy = ThinwireStrategy(**OPTIONS)

    def note(*_: object) -> None:
        sent.append(strategy.thinwire_state.stats()["wire_bytes"])

    Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False,
        callbacks=[LambdaCallback(on_train_batch_end=note)], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), DataLoader(Samples(), BATCH))  # fmt: skip
    return sent


def fabric() -> list[int]:
    from lightning.fabric import Fabric
    from thinwire.lightning import ThinwireFabricStrategy

    sent: list[int] = []
    strategy = ThinwireFabricStrategy(**OPTIONS)
    setup = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    setup.launch()
    net = Net()
    model, optimizer = setup.setup(net, torch.optim.SGD(net.parameters(), lr=RATE))
    for batch in setup.setup_dataloaders(DataLoader(Samples(), BATCH)):
        optimizer.zero_grad()
        setup.backward(model(batch["x"])["loss"])
        optimizer.step()
        sent.append(strategy.states[0].stats()["wire_bytes"])
    return sent


if __name__ == "__main__":
    _, folder = sys.argv[1:]
    sent = {"trainer": trainer(), "fabric": fabric()}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(sent))
