"""Lightning's Fabric: ThinwireFabricStrategy in place of "ddp"; here two ranks on the CPU.

python integrations/examples/train_fabric.py FOLDER [checkpoint to resume from]"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from thinwire.lightning import ThinwireFabricStrategy
from thinwire.torch.advanced import GatheredState
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EPOCHS, BATCHES, BATCH = 128, 8, 20, 32


def main(folder: str, resume_from: str | None = None) -> None:
    # So that a resumed run has the same bits: see train_lightning.py.
    strategy = ThinwireFabricStrategy(codec="int4", min_bytes=0, find_unused_parameters=True)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(1)
    x = torch.randn(2 * BATCHES * BATCH, WIDTH)
    y = x[:, :8].sum(1, keepdim=True) / 8**0.5
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), BATCH))
    (state,) = strategy.states
    kept = {"model": model, "optimizer": optimizer, "thinwire": GatheredState(state), "epoch": 0}
    if resume_from is not None:
        fabric.load(resume_from, kept)
    losses = []
    for epoch in range(kept["epoch"], EPOCHS):
        for batch, (inputs, targets) in enumerate(loader):
            accumulates = batch % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = (model(inputs) - targets).square().mean()
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        # All ranks call it, and rank 0 writes.
        fabric.save(Path(folder) / f"epoch={epoch}.ckpt", {**kept, "epoch": epoch + 1})
    stats = state.stats()
    total = sum(p.double().sum().item() for p in net.parameters())
    fabric.print(
        f"int4: loss {losses[0]:.3f} to {losses[-1]:.3f} in {stats['steps']} steps, "
        f"{stats['ratio']:.1f} times fewer bytes than fp32; weights {total.hex()}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
