"""Differential privacy inside each site: torchrun --nproc-per-node 2 sites_private.py

Every rank is a site with its own records. Opacus (pip install thinwire[dp]) clips the gradient of
each record and adds noise (DP-SGD, arXiv 1607.00133), and LocalSGD exchanges updates every 16
steps. A site's messages depend only on its noisy gradients and on messages of others, so the site's
epsilon holds for all its updates, with any codec and error feedback."""

import argparse

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from thinwire.torch import sites

arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=4)
arguments.add_argument("--noise", type=float, default=1.0, help="in units of the clipped norm")
chosen = arguments.parse_args()
RECORDS, BATCH, DELTA = 4096, 256, 1e-5

dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())  # different records in every site
x = torch.randn(RECORDS, 64)
records = torch.utils.data.TensorDataset(x, (x[:, :8].sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = PrivacyEngine()
private, private_optimizer, batches = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=torch.utils.data.DataLoader(records, batch_size=BATCH),
    noise_multiplier=chosen.noise,
    max_grad_norm=1.0,
)
# The weight is the same in every round, because the random batch sizes would reveal something about
# the records. The optimizer is the one inside Opacus's, which steps once per batch.
with sites.LocalSGD(sites.static(), model, optimizer, sync_every=16, codec="int4", weight=1.0):
    for _ in range(chosen.epochs):
        for features, labels in batches:  # RECORDS / BATCH draws, the same number in every site
            private_optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(features), labels).backward()
            private_optimizer.step()
if dist.get_rank() == 0:
    torch.manual_seed(1)
    unseen = torch.randn(4096, 64)
    right = (model(unseen).argmax(1) == (unseen[:, :8].sum(1) > 0)).float().mean().item()
    print(f"accuracy {right:.3f}")
print(f"site {dist.get_rank()}: epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}")
dist.destroy_process_group()
