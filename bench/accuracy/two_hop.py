"""Data-parallel workers of the accuracy benchmark in one process: one copy of the model, a gradient
for each worker, and an allreduce between them.

TwoHop is the algorithm of schedule/collective/two_hop.cc, with the library's codecs and nothing
else. Its results have the engine's bits (tests/bench/test_two_hop.py), without the wake-ups of the
engine's threads, which take most of a step if models are small and processors are shared. Workers
is the engine itself, for other algorithms."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import thinwire
import torch
from thinwire.comm import Communicator, Segment, Segments
from thinwire.config import Config

BLOCK = 256  # shards are whole blocks
_CHECK_EVERY = 25  # steps between comparisons of all ranks' results
_serial = itertools.count()


class TwoHop:
    """`count` ranks that exchange `numel` gradients each, in one chunk. codec: a dense codec that
    rounds to nearest."""

    def __init__(
        self,
        count: int,
        numel: int,
        codec: str,
        momentum: float = 0.0,
        feedback: bool = True,
        warm_up: int = 0,
    ) -> None:
        """momentum: that of the group, or 0. feedback: whether residuals are kept. warm_up: the
        number of first steps, which use int8."""
        info = thinwire.codec_info(codec)
        self._spec, self._own, self._warm_up = info.spec, (info.up, info.down), warm_up
        blocks = -(-numel // BLOCK)
        bounds = [min(numel, blocks * rank // count * BLOCK) for rank in range(count + 1)]
        self._shards = [slice(*pair) for pair in itertools.pairwise(bounds)]
        # Residuals by rank: of the first hop, and of the second hop in the rank's own shard.
        kept = feedback and info.uses_feedback
        self._residuals = [torch.zeros(numel) for _ in range(count)] if kept else None
        self._momentum, self._velocity = momentum, torch.zeros(numel)
        self.steps = 0  # exchanges so far

    def _hops(self) -> tuple[str, str]:
        """Return the codecs of this step's two hops."""
        return ("int8", "int8") if self.steps < self._warm_up else self._own

    def all_reduce(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean of one flat float32 gradient per rank, or its momentum."""
        first, second = self._hops()
        if self._momentum:
            gradients = [(self._velocity * self._momentum).add_(g) for g in gradients]
        result = torch.empty_like(gradients[0])
        for owner, shard in enumerate(self._shards):
            total = None
            for rank, gradient in enumerate(gradients):
                x = gradient[shard]
                part = x if rank == owner else self._through(first, x, rank, shard)
                total = part.clone() if total is None else total.add_(part)
            total.mul_(1 / len(gradients))
            result[shard] = self._through(second, total, owner, shard)
        if self._momentum:
            self._velocity = torch.where(result.isfinite(), result, self._velocity)
        self.steps += 1
        return result

    def _through(self, spec: str, x: torch.Tensor, rank: int, shard: slice) -> torch.Tensor:
        """Return what a receiver decodes."""
        if spec == "fp32":
            return x
        residual = self._residuals[rank][shard] if self._residuals else None
        wire = thinwire.encode(spec, x, residual)
        return torch.from_numpy(thinwire.decode(spec, wire, x.numel()))

    def stats(self) -> dict[str, Any]:
        """Return the bytes that rank 0 has sent, and those of a ring of fp32."""
        sizes = [shard.stop - shard.start for shard in self._shards]
        foreign = len(sizes) - 1
        warm = min(self.steps, self._warm_up)
        wire = 0
        for steps, (up, down) in ((warm, ("int8", "int8")), (self.steps - warm, self._own)):
            wire += steps * sum(thinwire.encoded_bytes(up, n) for n in sizes[1:])
            wire += steps * foreign * thinwire.encoded_bytes(down, sizes[0])
        raw = 2 * 4 * sum(sizes) * foreign // len(sizes)
        return {"raw_bytes": self.steps * raw, "wire_bytes": wire}

    def codec(self) -> str:
        return self._spec

    def close(self) -> None:
        pass


class Workers:
    """`count` ranks of one group, over the engine. It checks that results are bit-identical on all
    ranks, as the allreduce promises. Not thread-safe; close() ends the ranks."""

    def __init__(
        self,
        count: int,
        parameters: dict[str, torch.Tensor],
        codec: str,
        momentum: float = 0.0,
        feedback: bool = True,
    ) -> None:
        """momentum: that of the group, or 0. feedback: whether residuals are kept."""
        group = f"workers{next(_serial)}"
        config = Config(
            codec=codec, momentum=momentum, lanes=1, min_bytes=0, timeout_s=120, local_group=group
        )
        with ThreadPoolExecutor(count) as pool:
            ranks = range(count)
            self._ranks = list(
                pool.map(lambda rank: Communicator(rank, count, None, group, config), ranks)
            )
        self._segments = Segments(
            [Segment(name, 0, p.numel(), p.numel()) for name, p in parameters.items()]
        )
        self._name = "model" if feedback else None
        self._steps = 0

    def all_reduce(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean of one flat float32 gradient per rank, or its momentum. The gradients are
        overwritten."""
        works = [
            rank.start(g.data_ptr(), g.numel(), "float32", "mean", self._name, self._segments)
            for rank, g in zip(self._ranks, gradients, strict=True)
        ]
        for work in works:
            work.wait()
        if self._steps % _CHECK_EVERY == 0 and not _all_same_bits(gradients):
            raise RuntimeError(f"step {self._steps}: the ranks' results differ")
        self._steps += 1
        return gradients[0]

    def stats(self) -> dict[str, Any]:
        return self._ranks[0].stats()

    def codec(self) -> str:
        """Return the spec that the codec became: topk may become int4 in a small world."""
        return self._ranks[0].codec(0)

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            list(pool.map(Communicator.close, self._ranks))


def _all_same_bits(tensors: list[torch.Tensor]) -> bool:
    bits = [tensor.view(torch.int32) for tensor in tensors]
    return all(torch.equal(bits[0], other) for other in bits[1:])
