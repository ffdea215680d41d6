"""Batched codecs of the benchmarks give the library's values and residuals, bit for bit."""

import math

import pytest
import thinwire
import torch

from bench.accuracy.batched_codecs import through

SPECS = [
    "fp32",
    "int8",
    "int4",
    "adaptive",
    *(f"adaptive:bits={bits}" for bits in ("0.5", "1", "1.5", "3", "6")),
    *(f"adaptive:bits={bits},floor={floor}" for bits, floor in ((1, 1), (2, 1), (2, 2), (3, 2))),
]
STEPS = 4


def bits(x) -> torch.Tensor:
    return torch.as_tensor(x).contiguous().view(torch.int32)


def hold(spec: str, steps: list[torch.Tensor], feedback: bool = True) -> None:
    """Check steps of shape [..., n] against the library's codecs, each with its own residuals."""
    ours = torch.zeros_like(steps[0]) if feedback else None
    theirs = torch.zeros_like(steps[0]).flatten(0, -2)
    n = steps[0].shape[-1]
    for number, x in enumerate(steps):
        out = through(spec, x, ours)
        assert out.shape == x.shape
        rows = zip(x.flatten(0, -2), out.flatten(0, -2), theirs, strict=True)
        for shard, (row, got, residual) in enumerate(rows):
            wire = thinwire.encode(spec, row, residual if feedback else None)
            expected = thinwire.decode(spec, wire, n)
            where = f"{spec}, step {number}, shard {shard}"
            assert torch.equal(bits(got), bits(expected)), where
        if ours is not None:
            assert torch.equal(bits(ours.flatten(0, -2)), bits(theirs)), f"{spec}, step {number}"


def shards(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return shards of shape [2, 6, n]: Gaussian, heavy-tailed, blocks of very different sizes,
    elements of very different sizes, sparse, ties of few values, and zeros."""
    normal = torch.randn(2, n, generator=generator)
    sizes = torch.logspace(-12, 3, n)
    rows = [
        normal * 1e-3,
        normal / torch.randn(2, n, generator=generator).abs().clamp_min(1e-6),
        normal * sizes[torch.randperm(n, generator=generator)],
        torch.where(torch.rand(2, n, generator=generator) < 0.002, normal * sizes, 0.0),
        torch.randint(-9, 10, (2, n), generator=generator) * 0.25,
        torch.zeros(2, n),
    ]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [1, 37, 256, 5 * 256 + 1, 27_000])
def test_values_and_residuals_are_the_librarys(spec, n):
    generator = torch.Generator().manual_seed(n)
    hold(spec, [shards(n, generator) for _ in range(STEPS)])


@pytest.mark.parametrize("spec", SPECS)
def test_values_without_feedback_are_the_librarys(spec):
    hold(spec, [shards(3000, torch.Generator().manual_seed(1))], feedback=False)


@pytest.mark.parametrize("spec", SPECS)
def test_every_magnitude_is_the_librarys(spec):
    """Blocks range from zeros and subnormal numbers to the largest numbers, and cross all
    thresholds of FORMAT.md, in shards whose blocks are alike and in shards whose blocks differ."""
    generator = torch.Generator().manual_seed(2)
    exponents = torch.arange(-150.0, 128.0, 0.5)
    blocks = torch.randn(exponents.numel(), 256, generator=generator)
    blocks = (blocks.double() * 2.0 ** exponents[:, None].double()).float()
    mixed = blocks[torch.randperm(blocks.shape[0], generator=generator)]
    hold(spec, [blocks.view(4, -1), mixed.view(4, -1)])
    hold(spec, [blocks.flatten()[None], mixed.flatten()[None]], feedback=False)


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_that_are_not_finite_leave_their_residuals(spec):
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(3, 1000, generator=generator) for _ in range(3)]
    steps[1][0, 300], steps[1][1, 10], steps[1][1, 999] = math.inf, math.nan, -math.inf
    steps[1][2, 512] = 3e38
    hold(spec, steps)


@pytest.mark.parametrize("spec", ["int4", "adaptive"])
def test_residuals_may_be_a_part_of_a_tensor(spec):
    x = torch.randn(4, 700, generator=torch.Generator().manual_seed(4))
    apart, all_residuals = torch.zeros(4, 700), torch.zeros(4, 1000)
    through(spec, x, apart)
    through(spec, x, all_residuals[:, 100:800])
    assert torch.equal(all_residuals[:, 100:800], apart)
    assert all_residuals.count_nonzero() == apart.count_nonzero() > 0


@pytest.mark.parametrize("spec", SPECS)
def test_no_operation_reads_a_value_on_the_host(spec):
    """Tensors on the device `meta` have no values. An operation that reads a value on the host
    fails there, and a CUDA graph could not record it."""
    x, residual = torch.empty(2, 3, 700, device="meta"), torch.empty(2, 3, 700, device="meta")
    assert through(spec, x, residual).shape == (2, 3, 700)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", SPECS)
def test_a_cuda_graph_gives_the_cpus_bits(spec):
    generator = torch.Generator().manual_seed(5)
    steps = [shards(27_000, generator) for _ in range(STEPS)]
    x, residual = steps[0].cuda(), torch.zeros_like(steps[0]).cuda()
    through(spec, x, residual.clone())  # makes the tables
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = through(spec, x, residual)
    kept = torch.zeros_like(steps[0])
    for step in steps:
        x.copy_(step)
        graph.replay()
        assert torch.equal(bits(out.cpu()), bits(through(spec, step, kept)))
        assert torch.equal(bits(residual.cpu()), bits(kept))


@pytest.mark.parametrize("spec", SPECS)
def test_an_empty_shard_stays_empty(spec):
    assert through(spec, torch.zeros(3, 0), torch.zeros(3, 0)).shape == (3, 0)


@pytest.mark.parametrize(
    "spec", ["bf16", "int4:hadamard=1", "int8:block=128", "adaptive:seed=1", "adaptive:bits=7"]
)
def test_a_codec_that_is_not_written_here_is_refused(spec):
    with pytest.raises(ValueError, match="expected fp32, int8, int4 or adaptive"):
        through(spec, torch.zeros(256))
