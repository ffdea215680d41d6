"""Accelerate: prepare() of thinwire in place of the accelerator's.

accelerate launch --cpu --num_processes 2 integrations/examples/train_accelerate.py FOLDER [resume]
(or torchrun --nproc-per-node 2)"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from thinwire.accelerate import prepare
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EPOCHS, BATCHES, BATCH = 128, 8, 20, 32


def main(folder: str, resume: str = "") -> None:
    set_seed(1)
    # So that a resumed run has the same bits: see train_lightning.py.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[ddp])
    x = torch.randn(2 * BATCHES * BATCH, WIDTH)
    y = x[:, :8].sum(1, keepdim=True) / 8**0.5
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), BATCH)
    model, optimizer, loader, state = prepare(
        accelerator, model, optimizer, loader, codec="int4", min_bytes=0
    )
    if resume:
        accelerator.load_state(folder)
    losses = []
    for epoch in range(EPOCHS // 2 if resume else 0, EPOCHS):
        if epoch == EPOCHS // 2 and not resume:
            accelerator.save_state(folder)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    total = sum(p.double().sum().item() for p in model.parameters())
    stats = state.stats()
    accelerator.print(
        f"int4: loss {losses[0]:.3f} to {losses[-1]:.3f} in {stats['steps']} steps, "
        f"{stats['ratio']:.1f} times fewer bytes than fp32; weights {total.hex()}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
