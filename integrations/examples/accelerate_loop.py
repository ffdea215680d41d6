"""Accelerate: torchrun --nproc-per-node 2 accelerate_loop.py

Only the lines that end in `# thinwire` differ from the uncompressed program."""

import thinwire.torch as tw  # thinwire
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(1)
x = torch.randn(2048, 256)
data = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True) / 8**0.5), 64)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
tw.compress(model, codec="int4")  # thinwire
for _ in range(8):
    for inputs, targets in data:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
accelerator.print(f"loss {loss.item():.3f}")
accelerator.end_training()
