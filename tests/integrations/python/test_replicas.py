"""Diverged replicas are found. The error names the rank, tensor and step on every rank."""

import pytest
import thinwire
import torch
from models import make_mlp
from ranks import run
from thinwire.torch import check_replicas


def diverge(rank: int):
    model = make_mlp()
    check_replicas(model)
    with torch.no_grad():
        if rank == 2:
            bits = model[2].weight.view(torch.int32)
            bits[3, 5] ^= 1
    with pytest.raises(thinwire.MismatchError) as caught:
        check_replicas(model, step=12)
    return str(caught.value)


def test_a_parameter_of_other_bits_is_named_on_every_rank():
    messages = run(diverge, world=3)
    assert len(set(messages)) == 1
    for part in ("'2.weight'", "step 12", "rank 2 has digest", "as on rank 0"):
        assert part in messages[0]


def other_model(rank: int):
    with pytest.raises(thinwire.MismatchError, match="rank 1 has parameters"):
        check_replicas(torch.nn.Linear(3, 3) if rank == 0 else make_mlp())


def test_other_models_are_a_mismatch():
    run(other_model)
