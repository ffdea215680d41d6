"""Data-parallel workers of the accuracy benchmark in one thread: the two-hop allreduce of
schedule/collective/two_hop.cc, written down with the library's codecs and nothing around them.

It gives the engine's bits (tests/bench/test_two_hop.py) at a fraction of its threads' wake-ups,
which are most of a step where models are small and processors are shared."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import thinwire
import torch

BLOCK = 256  # shards are whole blocks


class Exchange(Protocol):
    """A group's allreduce."""

    def all_reduce(self, gradients: list[torch.Tensor]) -> torch.Tensor: ...
    def stats(self) -> dict[str, Any]: ...
    def codec(self) -> str: ...
    def close(self) -> None: ...


class TwoHop:
    """`count` ranks that exchange `numel` gradients each, in one chunk. codec: a dense one, which
    rounds to nearest."""

    def __init__(
        self, count: int, numel: int, codec: str, momentum: float = 0.0, feedback: bool = True
    ) -> None:
        """momentum: owned by the group, or 0. feedback: what a step loses is kept for the next."""
        info = thinwire.codec_info(codec)
        self._spec, self._up, self._down = info.spec, info.up, info.down
        blocks = -(-numel // BLOCK)
        bounds = [min(numel, blocks * rank // count * BLOCK) for rank in range(count + 1)]
        self._shards = [slice(*pair) for pair in pairwise(bounds)]
        # By rank: of the first hop, and in its own shard of the second.
        kept = feedback and info.uses_feedback
        self._residuals = [torch.zeros(numel) for _ in range(count)] if kept else None
        self._momentum, self._velocity = momentum, torch.zeros(numel)
        self._steps = 0

    def all_reduce(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The mean of one flat float32 gradient per rank, or its momentum."""
        if self._momentum:
            gradients = [(self._velocity * self._momentum).add_(g) for g in gradients]
        result = torch.empty_like(gradients[0])
        for owner, shard in enumerate(self._shards):
            total = None
            for rank, gradient in enumerate(gradients):
                x = gradient[shard]
                part = x if rank == owner else self._through(self._up, x, rank, shard)
                total = part.clone() if total is None else total.add_(part)
            total.mul_(1 / len(gradients))
            result[shard] = self._through(self._down, total, owner, shard)
        if self._momentum:
            self._velocity = torch.where(result.isfinite(), result, self._velocity)
        self._steps += 1
        return result

    def _through(self, spec: str, x: torch.Tensor, rank: int, shard: slice) -> torch.Tensor:
        """What the other side decodes."""
        if spec == "fp32":
            return x
        residual = self._residuals[rank][shard] if self._residuals else None
        wire = thinwire.encode(spec, x, residual)
        return torch.from_numpy(thinwire.decode(spec, wire, x.numel()))

    def stats(self) -> dict[str, Any]:
        """The bytes that rank 0 has sent, and those of a ring of fp32."""
        sizes = [shard.stop - shard.start for shard in self._shards]
        foreign = len(sizes) - 1
        wire = sum(thinwire.encoded_bytes(self._up, n) for n in sizes[1:])
        wire += foreign * thinwire.encoded_bytes(self._down, sizes[0])
        raw = 2 * 4 * sum(sizes) * foreign // len(sizes)
        return {"raw_bytes": self._steps * raw, "wire_bytes": self._steps * wire}

    def codec(self) -> str:
        return self._spec

    def close(self) -> None:
        pass


class ExactRest:
    """An exchange that takes the elements of some places only; the others' mean is exact."""

    def __init__(self, inner: TwoHop, taken: torch.Tensor) -> None:
        """taken: a flag for each element."""
        self._inner, self._taken = inner, taken

    def all_reduce(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack(gradients).mean(0)
        mean[self._taken] = self._inner.all_reduce([g[self._taken] for g in gradients])
        return mean

    def stats(self) -> dict[str, Any]:
        return self._inner.stats()

    def codec(self) -> str:
        return self._inner.codec()

    def close(self) -> None:
        self._inner.close()
