"""A loop without any wrapper: torchrun --nproc-per-node 2 plain_loop.py

Only the lines that end in `# thinwire` differ from the uncompressed program. Without them each rank
trains a separate model; with them the gradients are the means of all ranks."""

import thinwire.torch as tw  # thinwire
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(1)  # the same weights on every rank
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
tw.compress(model, codec="int4")  # thinwire
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + dist.get_rank())  # different data on every rank
for _ in range(100):
    x = torch.randn(64, 256)
    loss = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
