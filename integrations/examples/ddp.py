"""DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py

Only the lines that end in `# thinwire` differ from the uncompressed program."""

import thinwire.torch as tw  # thinwire
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)  # the same weights on every rank
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
ddp = DistributedDataParallel(model)
tw.compress(ddp, codec="int4")  # thinwire
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + dist.get_rank())  # different data on every rank
for _ in range(100):
    x = torch.randn(64, 256)
    loss = (ddp(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
