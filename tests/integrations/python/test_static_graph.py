"""DDP(static_graph=True), whose first step passes all buckets at once, each with the number 0."""

import pytest
import torch
from models import data, gradients
from ranks import run
from thinwire.torch import State, compress, hook
from torch.nn.parallel import DistributedDataParallel


class Mixed(torch.nn.Module):
    """Has parameters of two dtypes, which DDP never puts into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = torch.nn.Linear(96, 96)
        self.second = torch.nn.Linear(96, 96).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).bfloat16())


def steps_of(rank: int, way: str):
    """Return the gradients after each of three steps, and the counts of steps."""
    model = Mixed()
    ddp = DistributedDataParallel(model, static_graph=True)
    state = None
    if way == "compress":
        state = compress(ddp, codec="fp32", min_bytes=0)
    elif way == "hook":
        state = State("fp32", min_bytes=0)
        ddp.register_comm_hook(state, hook)
    found, counts = [], []
    for step in range(3):
        model.zero_grad()
        ddp(data(step, rank)).float().square().sum().backward()
        found.append(gradients(model))
        counts.append(state and state.stats()["steps"])
    names = [] if state is None else sorted(state.state_dict()["residuals"])
    return found, counts, names


@pytest.mark.parametrize("way", ["compress", "hook"])
def test_two_dtypes_in_a_static_graph(way):
    plain, ours = run(steps_of, "plain"), run(steps_of, way)
    for step in range(3):
        assert torch.equal(ours[0][0][step], ours[1][0][step])
        torch.testing.assert_close(ours[0][0][step], plain[0][0][step], rtol=2e-2, atol=2e-2)
    counts = ours[0][1]
    assert counts[1:] == [2, 3]
    if way == "compress":  # compress() knows when all parameters of the first step have arrived
        assert counts[0] == 1
