"""Forked children of a rank, such as DataLoader's workers, cannot take part, and their attempts
must not disturb their parent."""

import atexit
import gc
import os
import signal
import traceback

import pytest
import thinwire
import torch
from models import data, make_mlp, train, wrap
from policies import Wrapped
from ranks import run
from thinwire.torch import all_reduce
from torch.utils.data import DataLoader, TensorDataset

CHILD_S = 100  # after which a child that hangs is killed


def in_child(body) -> int:
    """Run `body` in a forked child that ends like a script, and return its exit code."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            body()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect_refusals(state) -> None:
    """Check that every call that would send, or wait for a thread, is refused."""
    calls = {
        "all_reduce": lambda: all_reduce(torch.ones(4)),
        "a named one": lambda: all_reduce(torch.ones(100_000), name="x"),
        "another codec's": lambda: all_reduce(torch.ones(4), codec="fp32"),
        "stats": state.stats,
        "state_dict": state.state_dict,
        "describe": state.describe,
        "connect": lambda: state._session.connect(torch.ones(1)),
    }
    for what, call in calls.items():
        with pytest.raises(thinwire.InvalidArgumentError, match="forked"):
            call()
            pytest.fail(f"{what} was not refused")


def children_of_a_rank(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 2)
    all_reduce(torch.ones(4))
    codes = []
    if rank == 0:
        codes.append(in_child(lambda: expect_refusals(state)))
        codes.append(in_child(state.close))
        codes.append(in_child(gc.collect))
    train(ddp, 2)
    result = torch.full((4,), float(rank))
    all_reduce(result)
    return codes, result.tolist()


def test_a_child_is_refused_at_once_and_its_parent_goes_on():
    (codes, result), (_, other) = run(children_of_a_rank)
    assert codes == [0, 0, 0]
    assert result == other == [1.0] * 4


def load_data_with_a_step_in_flight(rank: int):
    """Under p3 a step is in flight when the workers start."""
    model = make_mlp()
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, "int4")
    rows = data(0, rank)
    for step in range(2):
        batches = DataLoader(TensorDataset(rows), batch_size=len(rows), num_workers=step)
        for (batch,) in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    optimizer.finish()
    return [p.detach().sum().item() for p in model.parameters()]


@pytest.mark.slow  # a worker takes seconds to start
def test_workers_that_load_data_leave_the_step_in_flight_alone():
    first, second = run(load_data_with_a_step_in_flight)
    assert first == second
