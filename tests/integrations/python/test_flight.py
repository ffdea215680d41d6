"""The flight recorder from Python: which rank waits for which, and a failed group's last events."""

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes_of, run
from thinwire import errors
from thinwire.torch import GradientExchange
from thinwire.torch.advanced import Part


def waiting(rank: int):
    exchange = GradientExchange(codec="int4", min_bytes=0)
    bucket = exchange.bucket("layer", [Part("weight", 5000)], torch.float32)
    gradient = torch.randn(5000)
    first = exchange.bucket("first", [Part("bias", 5000)], torch.float32)
    exchange.start(first, torch.randn(5000)).wait()  # now the group is connected
    future = exchange.start(bucket, gradient) if rank == 0 else None
    dist.barrier()
    text = exchange.describe()
    dist.barrier()
    future = future or exchange.start(bucket, gradient)
    future.wait()
    return text


def test_describe_says_who_waits_for_whom():
    text = run(waiting)[0]
    assert "tensor 'layer' call 0 waits for rank 1 to submit it" in text
    assert "submitted 'layer' 5000 elements" in text


def failing(rank: int):
    exchange = GradientExchange(codec="int4", min_bytes=0, timeout_s=100)
    bucket = exchange.bucket("layer", [Part("weight", 5000 + rank)], torch.float32)
    with pytest.raises(errors.MismatchError):
        exchange.start(bucket, torch.zeros(5000 + rank)).wait()
    return True


def test_the_first_failure_writes_the_last_events_of_every_rank(tmp_path):
    path = tmp_path / "flight.txt"
    outcomes = outcomes_of(failing, environment={"THINWIRE_FLIGHT": str(path)})
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
    for rank in range(2):
        text = (tmp_path / f"flight.rank{rank}.txt").read_text()
        assert text.startswith(f"rank {rank} of 2 failed: ") and "5001" in text
        assert "submitted 'layer'" in text
