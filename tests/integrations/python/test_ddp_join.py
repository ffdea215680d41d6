"""DDP.join(): ranks with fewer batches than other ranks."""

import pytest
import thinwire.torch
import torch
from models import data, gradients, loss_of, make_mlp
from ranks import run
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, ours: bool, by_initial: bool):
    model = make_mlp()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if ours:
        thinwire.torch.compress(ddp, "fp32", min_bytes=0)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), lr=0.05), []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(3 + 3 * rank):
            optimizer.zero_grad()
            loss_of(ddp, data(step, rank)).backward()
            seen.append(gradients(model).clone())
            optimizer.step()
    return torch.stack(seen), torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_its_means_are_those_of_torch(by_initial, world):
    theirs, ours = (run(train, ours, by_initial, world=world) for ours in (False, True))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-6)
    for _, weights in ours[1:]:
        assert torch.equal(weights, ours[0][1])  # ranks that joined get the last rank's
