"""Data-parallel workers in one process: one copy of the model, every worker's own gradient, and the
real allreduce between them with the real codecs. Replicas are identical by the allreduce's
contract, which is checked, so one copy stands for all."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from thinwire.comm import Communicator, Segment, Segments
from thinwire.config import Config

_CHECK_EVERY = 25  # steps between comparisons of all ranks' results
_serial = itertools.count()


class Workers:
    """`count` ranks of one group. Used from one thread; close() ends them."""

    def __init__(
        self,
        count: int,
        parameters: dict[str, torch.Tensor],
        codec: str,
        momentum: float = 0.0,
        feedback: bool = True,
    ) -> None:
        """momentum: owned by the group, or 0. feedback: what a step loses is kept for the next."""
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
        """The mean of one flat float32 gradient per rank, or its momentum; they are overwritten."""
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
        """The spec that the codec became: topk may be int4 in a small world."""
        return self._ranks[0].codec(0)

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            list(pool.map(Communicator.close, self._ranks))


def _all_same_bits(tensors: list[torch.Tensor]) -> bool:
    bits = [tensor.view(torch.int32) for tensor in tensors]
    return all(torch.equal(bits[0], other) for other in bits[1:])
