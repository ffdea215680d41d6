"""The accuracy benchmark's exchange in one thread gives the engine's bits, and its search of rates
climbs to the best one."""

import math

import pytest
import torch

from bench.accuracy.run import best_factor, missing_factors
from bench.accuracy.two_hop import TwoHop, Workers

NUMEL = 20 * 256 + 37  # shards of different lengths, the last one ends in a partial block
STEPS = 4


def gradients(generator: torch.Generator) -> list[torch.Tensor]:
    """Return the gradients of four ranks, with blocks of very different sizes."""
    sizes = torch.logspace(-6, 0, NUMEL)
    return [torch.randn(NUMEL, generator=generator) * sizes for _ in range(4)]


@pytest.mark.parametrize(
    ("codec", "momentum", "feedback"),
    [
        ("fp32", 0.0, True),
        ("bf16", 0.0, True),
        ("int8", 0.0, True),
        ("int4", 0.0, True),
        ("int4", 0.0, False),
        ("int4:hadamard=1", 0.0, True),
        ("adaptive", 0.0, True),
        ("adaptive:bits=6", 0.0, True),
        ("adaptive:bits=1,floor=1", 0.0, True),
        ("onebit", 0.9, True),
        ("onebit:down=onebit", 0.9, True),
    ],
)
def test_the_bits_are_the_engines(codec, momentum, feedback):
    generator = torch.Generator().manual_seed(1)
    engine = Workers(4, {"w": torch.empty(NUMEL)}, codec, momentum, feedback)
    alone = TwoHop(4, NUMEL, codec, momentum, feedback)
    for step in range(STEPS):
        flat = gradients(generator)
        if step == 2 and codec != "fp32":
            flat[1][300] = math.inf  # the residuals and the momentum of this block stay
        mean = alone.all_reduce([g.clone() for g in flat])
        theirs = engine.all_reduce(flat)
        assert torch.equal(mean.view(torch.int32), theirs.view(torch.int32)), f"step {step}"
    assert alone.stats()["wire_bytes"] == pytest.approx(engine.stats()["wire_bytes"], rel=1e-3)
    assert alone.stats()["raw_bytes"] == pytest.approx(engine.stats()["raw_bytes"], rel=1e-3)
    engine.close()


def test_a_rate_is_climbed_to_and_no_further():
    def climb(height) -> tuple[float, int]:
        scores: dict[float, float] = {}
        while factors := missing_factors(scores):
            scores |= {factor: height(factor) for factor in factors}
        return best_factor(scores), len(scores)

    assert climb(lambda factor: -abs(math.log2(factor))) == (1.0, 3)
    assert climb(lambda factor: -abs(math.log2(factor) - 2)) == (4.0, 5)
    assert climb(lambda factor: math.nan if factor > 0.5 else -factor) == (0.125, 5)
    assert climb(lambda factor: factor) == (8.0, 5), "the grid's end"
