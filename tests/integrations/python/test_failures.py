"""Errors are typed, name the rank and a fix, reach every rank, and come within the deadline."""

import os
import signal
import time
from pathlib import Path

import pytest
import thinwire
import torch
import torch.distributed as dist
from models import data, make_mlp, train, wrap
from ranks import outcomes_of, run
from thinwire.torch import State, all_reduce, compress, hook

TIMEOUT_S = 12.0  # longer than all before the error; a quarter of it counts as a standstill
LONG_S = 100.0  # for tests without a timeout, even if the machine stands still for a while


def other_codec(rank: int):
    ddp, state = wrap(make_mlp(), ("int4", "int8")[rank])
    messages = []
    for _ in range(2):  # the state stays failed
        with pytest.raises(thinwire.MismatchError) as caught:
            ddp(data(0, rank)).sum().backward()
        messages.append(str(caught.value))
    with pytest.raises(thinwire.MismatchError):
        state._session.connect(torch.zeros(1))
    return messages


def test_another_codec_is_a_mismatch_on_every_rank():
    for rank, messages in enumerate(run(other_codec)):
        assert messages[0] == messages[1]
        assert f"rank {rank}" in messages[0] and "int4" in messages[0] and "int8" in messages[0]


def other_size(rank: int):
    all_reduce(torch.ones(100_000 + rank), name="x")


def test_another_size_is_a_mismatch_on_every_rank():
    for outcome in outcomes_of(other_size):
        assert outcome.error == "MismatchError" and "'x'" in outcome.message
        assert "100000" in outcome.message and "100001" in outcome.message


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def missing_call(rank: int, failed: Path):
    """Rank 1 makes no call until rank 0 has failed."""
    model = make_mlp()
    ddp, _ = wrap(model, "int4", timeout_s=TIMEOUT_S)
    train(ddp, 3)
    dist.barrier()
    with pytest.raises(thinwire.TimeoutError, match="rank 1 never submitted") as caught:
        if rank == 1:
            wait_for(failed)
        ddp(data(0, rank)).sum().backward()
    failed.touch()
    return str(caught.value)


def test_a_missing_call_ends_at_the_deadline(tmp_path):
    for message in run(missing_call, tmp_path / "failed"):
        assert "bucket0" in message


def stay_away(rank: int):
    ddp, _ = wrap(make_mlp(), "int4", timeout_s=TIMEOUT_S)
    if rank == 0:
        with pytest.raises(thinwire.TimeoutError, match="rank 1"):
            ddp(data(0, rank)).sum().backward()
    dist.barrier()


def test_a_rank_that_does_not_come():
    run(stay_away)


def lose_peer(rank: int) -> str:
    """Return rank 0's error message. Passing the deadline first would be another error."""
    ddp, _ = wrap(make_mlp(), "int4", timeout_s=LONG_S)
    train(ddp, 3)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(thinwire.PeerLostError) as caught:
        all_steps_until_error(ddp, rank)
    return str(caught.value)


def all_steps_until_error(ddp, rank: int):
    for step in range(1000):
        ddp(data(step, rank)).sum().backward()


def test_a_killed_peer():
    outcome = outcomes_of(lose_peer)[0]
    assert not outcome.error, outcome.trace
    assert "rank 1" in outcome.value and "bucket0" in outcome.value
    assert outcome.exit_code == 0


def lose_stopped_rank(rank: int, stopped: int, failed: Path):
    """Return the error of a step and the seconds until it. One rank is stopped until the others
    have their errors."""
    ddp, _ = wrap(make_mlp(), "int4", timeout_s=TIMEOUT_S)
    train(ddp, 3)
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(thinwire.TimeoutError) as caught:
        all_steps_until_error(ddp, rank)
    seconds = time.monotonic() - start
    if rank == 2:
        wait_for(failed)
        os.kill(pids[stopped], signal.SIGCONT)
    failed.touch()
    return str(caught.value), seconds


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_is_told_so(stopped, tmp_path):
    outcomes = outcomes_of(lose_stopped_rank, stopped, tmp_path / "failed", world=3)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, outcome.trace
        message, seconds = outcome.value
        assert f"rank {stopped}" in message
        assert (f"rank {stopped} itself was stopped for" in message) == (rank == stopped), message
        # Not before the deadline of the rank that began first and that tells the others.
        assert rank == stopped or seconds > TIMEOUT_S - 0.5


def wrong_tensors(rank: int):
    cases = {
        "dtype torch.float64": torch.ones(4, dtype=torch.float64),
        "dtype torch.int64": torch.ones(4, dtype=torch.int64),
        "device meta": torch.ones(4, device="meta"),
        "layout torch.sparse_coo": torch.eye(3).to_sparse(),
        "list": [1.0],
    }
    for got, tensor in cases.items():
        with pytest.raises(thinwire.InvalidArgumentError) as caught:
            all_reduce(tensor, name="loss")
        for part in (f"rank {rank}", "'loss'", got, "expected"):
            assert part in str(caught.value)
    for dtype, fix in {
        torch.float64: r"\.float\(\), or .*torch\.distributed\.all_reduce",
        torch.int32: r"torch\.distributed\.all_reduce, which is exact",
        torch.bool: r"torch\.distributed\.all_reduce, which is exact",
        torch.complex64: r"torch\.view_as_real\(tensor\)",
    }.items():
        with pytest.raises(thinwire.InvalidArgumentError, match=fix):
            all_reduce(torch.ones(4, dtype=dtype))
    with pytest.raises(thinwire.InvalidArgumentError, match="MAX"):
        all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
    with pytest.raises(thinwire.InvalidArgumentError, match="int8"):
        all_reduce(torch.ones(1), codec="int9")
    good = torch.ones(1)
    all_reduce(good)
    return good.item()


def test_wrong_tensors_are_refused_before_anything_is_sent():
    assert run(wrong_tensors) == [2.0, 2.0]


def wrong_models(rank: int):
    double = torch.nn.parallel.DistributedDataParallel(make_mlp().double())
    with pytest.raises(thinwire.InvalidArgumentError, match=r"0\.weight.*float64"):
        compress(double)
    double.register_comm_hook(State("int4"), hook)
    with pytest.raises(thinwire.InvalidArgumentError, match="float64"):
        double(data(0, rank).double()).sum().backward()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(50, 8, sparse=True))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'weight'.*sparse"):
        compress(ddp)
    ddp.register_comm_hook(State("int4"), hook)
    with pytest.raises(thinwire.InvalidArgumentError, match="sparse"):
        ddp(torch.tensor([1, 2])).sum().backward()
    ddp, _ = wrap(make_mlp(), "int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="remove one of the two calls"):
        compress(ddp)


def test_wrong_models_are_refused():
    run(wrong_models)


def closed(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 1)
    state.close()
    state.close()
    with pytest.raises(thinwire.Error, match="closed"):
        ddp(data(0, rank)).sum().backward()


def test_a_closed_state_says_so():
    run(closed)


def close_early(rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 3)
    if rank == 1:
        return state.close()
    with pytest.raises(thinwire.PeerLostError) as caught:
        ddp(data(3, rank)).sum().backward()
    return str(caught.value)


def test_a_rank_that_closes_early_is_named():
    message = run(close_early)[0]
    assert "rank 1 closed its communicator after" in message and "bucket0" in message


def test_using_a_state_needs_a_process_group():
    state = State("int4")
    for _ in range(2):  # the error comes each time, and the state does not stay failed
        with pytest.raises(thinwire.InvalidArgumentError, match="init_process_group"):
            assert state.rank
    with pytest.raises(thinwire.InvalidArgumentError, match="init_process_group"):
        state.state_dict()
    assert state._session.error is None


def leave_with_work_in_flight(rank: int):
    """Rank 1 never calls, and rank 0 leaves without waiting."""
    if rank == 0:
        all_reduce(torch.ones(4))
        all_reduce(torch.ones(100_000), name="x", async_op=True)
    else:
        all_reduce(torch.ones(4))


def test_leaving_with_work_in_flight_neither_hangs_nor_crashes():
    assert [outcome.exit_code for outcome in outcomes_of(leave_with_work_in_flight)] == [0, 0]
