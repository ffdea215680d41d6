"""FSDP2 keeps residuals if they fit into the memory of every rank, or on request."""

from __future__ import annotations

import warnings

import pytest
import thinwire
import torch
from fsdp_models import Net, gradients, loss_of, sharded, train
from ranks import run
from thinwire.torch import compress
from thinwire.torch.fsdp import residuals
from torch.distributed.device_mesh import init_device_mesh

TRAINED = [name for name, _ in Net().named_parameters() if not name.startswith("spare")]
# 4 bytes an element; nothing is padded with 2 ranks.
BYTES = 4 * sum(p.numel() for name, p in Net().named_parameters() if name in TRAINED)
FITS = residuals.SHARE * BYTES


def compressed(rank: int, codec, available: list[int], hosts: list[str], **options):
    """Return (model, compression, warnings); the rank's host has available[rank] free bytes."""
    # Each rank has its own process, so this replaces only its own function.
    residuals.memory_of_host = lambda: (hosts[rank], available[rank])
    model, _ = sharded(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = compress(model, codec, **options)
    return model, made, [str(one.message) for one in caught]


def outcome(rank: int, codec, available: list[int], hosts: list[str], options: dict):
    model, made, caught = compressed(rank, codec, available, hosts, **options)
    train(model, 2, rank)
    named = made.state_dict()["residuals"]
    codecs = {row["codec"] for row in made.stats()["parameters"]}
    return sorted(named), codecs, caught, made.describe(), gradients(model)


def check(codec, available, hosts, options, kept: bool, used: str, warned: bool) -> None:
    ranks = run(outcome, codec, available, hosts, options)
    for names, codecs, caught, text, found in ranks:
        assert names == (sorted(TRAINED) if kept else [])
        assert codecs == {used}
        assert len(caught) == warned, caught
        assert f"{BYTES:,} bytes" in text.splitlines()[0]
        for message in caught:
            assert f"{BYTES:,} bytes" in message and "feedback=True" in message
        for name, gradient in found.items():
            assert torch.equal(gradient, ranks[0][4][name])


APART, TOGETHER = ["a", "b"], ["a", "a"]


@pytest.mark.parametrize(("codec", "used"), [(None, "bf16"), ("int4", "int4")])
def test_auto_keeps_residuals_only_where_they_fit_on_every_rank(codec, used):
    check(codec, [FITS, FITS], APART, {}, True, "int4", False)
    check(codec, [FITS, FITS - 1], APART, {"feedback": "auto"}, False, used, True)
    check(codec, [FITS, FITS], TOGETHER, {}, False, used, True)  # two ranks share these free bytes
    check(codec, [2 * FITS, 2 * FITS], TOGETHER, {}, True, "int4", False)


def test_residuals_are_kept_or_not_on_request():
    check(None, [0, 0], APART, {"feedback": True}, True, "int4", False)
    check(None, [FITS, FITS], APART, {"feedback": False}, False, "bf16", False)
    check("int8", [FITS, FITS], APART, {"feedback": False}, False, "int8", False)


def test_a_codec_without_residuals_needs_no_memory():
    for _, codecs, caught, text, _ in run(outcome, "bf16", [0, 0], APART, {}):
        assert codecs == {"bf16"} and not caught
        assert text.startswith("residuals: 0 bytes")


def after_a_step_of_zeros(rank: int):
    model, _, _ = compressed(rank, "int4", [0, 0], APART, feedback=False)
    loss_of(model, 0, rank).backward()
    model.zero_grad()
    (loss_of(model, 1, rank) * 0.0).backward()
    return gradients(model)


def test_without_residuals_nothing_is_carried_over():
    for found in run(after_a_step_of_zeros):
        assert all(not gradient.any() for gradient in found.values())


def loads(rank: int):
    model, keeps, _ = compressed(rank, "int4", [FITS, FITS], APART)
    train(model, 2, rank)
    saved = keeps.state_dict()
    _, drops, _ = compressed(rank, "int4", [0, 0], APART, feedback=False)
    with pytest.warns(UserWarning, match="has residuals, and this model keeps none"):
        drops.load_state_dict(saved)
    empty = drops.state_dict()
    keeps.load_state_dict(empty)
    return empty["residuals"], empty["steps"], keeps.state_dict()["residuals"]


def test_a_state_dict_loads_with_and_without_residuals():
    for empty, steps, kept in run(loads):
        assert empty == {} and steps == 2
        assert all(not tensor.any() for memory in kept.values() for tensor in memory.values())


def with_replicas(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    replicas = mesh["replica"].get_group()
    residuals.memory_of_host = lambda: ("a", FITS if rank < 3 else 0)  # rank 3 decides for all
    model, _ = sharded(None, mesh["shard"])
    with pytest.warns(UserWarning, match="feedback=True"):
        made = compress(model, "int8", replicas=replicas, min_bytes=0)
    train(model, 2, rank)
    return made.state_dict()["residuals"], made.stats()["replicas"]["ratio"], gradients(model)


def test_replicas_decide_together():
    ranks = run(with_replicas, world=4)
    for kept, ratio, found in ranks:
        assert kept == {} and ratio > 3
        for name, gradient in found.items():
            assert torch.equal(gradient, ranks[0][2][name])


def refused(rank: int):
    model, _ = sharded(None)
    for wrong in ("yes", 1, [True]):
        with pytest.raises(thinwire.InvalidArgumentError, match=r"feedback is .*'auto', True or"):
            compress(model, "int4", feedback=wrong)
    with pytest.raises(thinwire.MismatchError, match=r"and (True|'auto') on another rank"):
        compress(model, "int4", feedback=True if rank == 0 else "auto")
    with pytest.raises(thinwire.InvalidArgumentError, match="expected a model under FSDP2"):
        compress(Net(), "int4", feedback=False)


def test_other_values_are_refused():
    run(refused)
