"""Ray Train: python ray_train.py

Only the lines that end in `# thinwire` differ from the uncompressed program."""

import ray
import ray.train
import thinwire.torch as tw  # thinwire
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train():
    torch.manual_seed(1)  # the same weights on every rank
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    )
    tw.compress(model, codec="int4")  # thinwire
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + ray.train.get_context().get_world_rank())  # different data on each rank
    for _ in range(100):
        x = torch.randn(64, 256)
        loss = (model(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        print(f"loss {loss.item():.3f}")


ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
