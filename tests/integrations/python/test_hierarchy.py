"""topology="hierarchical": ranks of a node exchange uncompressed, nodes exchange compressed. Here
all ranks are on one host, and local_size defines the nodes."""

import os
import signal

import pytest
import torch
from ranks import outcomes_of, run
from thinwire.torch import GradientExchange

# Several chunks each, so that nothing goes through the direct path, which is flat.
NODES = {"topology": "hierarchical", "local_size": 2, "chunk_bytes": 65536, "min_bytes": 0}
NUMEL = 50_000


def reduced(rank: int, steps: int, options: dict) -> tuple[str, list[float], str]:
    exchange = GradientExchange("int4", **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        tensor = torch.randn(NUMEL, generator=generator)
        exchange.reduce({"x": tensor})
    return exchange.stats()["topology"], tensor.tolist(), exchange.describe()


def test_all_ranks_get_the_same_bits_and_are_told_the_way():
    outcomes = run(reduced, 5, NODES, world=4)
    for topology, values, described in outcomes:
        assert topology == "hierarchical: 2 nodes of 2 ranks"
        assert values == outcomes[0][1]
        assert f"topology: {topology}" in described
        assert f"dense allreduces go {topology}" in described  # as the flight recorder has it


def test_nodes_that_are_not_there_are_said():
    (topology, *_), *_ = run(reduced, 1, {"topology": "hierarchical"}, world=4)
    assert topology == "flat, all ranks are on one node"
    (topology, *_), *_ = run(reduced, 1, {**NODES, "local_size": 3}, world=4)
    assert topology == "flat, 4 ranks are not whole nodes of 3"


def differently(rank: int, options: dict) -> None:
    reduced(rank, 1, options if rank == 3 else NODES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**NODES, "local_size": 4}, "local_size=4"),
        ({**NODES, "topology": "flat"}, "topology=flat"),
    ],
)
def test_another_hierarchy_on_one_rank_is_a_mismatch_on_all(options, words):
    for outcome in outcomes_of(differently, options, world=4):
        assert outcome.error == "MismatchError", outcome.trace
        assert words in outcome.message


def killed(rank: int, victim: int) -> None:
    exchange = GradientExchange("int4", timeout_s=100, **NODES)
    for step in range(1000):
        if rank == victim and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.reduce({"x": torch.randn(NUMEL)})


def test_a_killed_rank_is_told_inside_its_node_and_outside():
    """The error comes at once, as between flat ranks; at the deadline it is a TimeoutError."""
    victim = 1
    for rank, outcome in enumerate(outcomes_of(killed, victim, world=4)):
        if rank == victim:
            continue
        assert outcome.error == "PeerLostError", outcome.trace
        assert f"rank {victim}" in outcome.message
