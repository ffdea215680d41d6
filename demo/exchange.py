"""The ways of exchanging gradients that the demo and the benchmarks compare."""

from __future__ import annotations

import thinwire.torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Bytes of an element on the wire, for the ways without thinwire.
_ELEMENT_BYTES = {"plain": 4, "bf16": 2}
WAYS = (
    "plain", "bf16", "int8", "int4", "adaptive", "onebit", "topk:density=0.01,masking=0",
)  # fmt: skip


def bf16_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    wire = buffer.to(torch.bfloat16)
    sent = dist.all_reduce(wire, group=group, async_op=True).get_future()
    return sent.then(lambda done: buffer.copy_(done.value()[0]).div_(group.size()))


bf16_hook.__annotations__ = {}  # DDP requires types there, but in this file they are strings


class Exchange:
    """Makes a DDP model exchange its gradients in one way: "plain" (DDP's own), "bf16" (the hook
    above, on Gloo), or a codec of thinwire. `optimizer`: SGD, whose momentum moves into the
    exchange if the way requires it."""

    def __init__(self, ddp: DistributedDataParallel, way: str, optimizer: torch.optim.SGD) -> None:
        self._state = None
        self._way = way
        self._numel = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        self._world = dist.get_world_size()
        if way == "bf16":
            ddp.register_comm_hook(ddp.process_group, bf16_hook)
        elif way != "plain":
            self._state = thinwire.torch.compress(ddp, codec=way, optimizer=optimizer)

    def bytes_sent(self, steps: int) -> tuple[int, int]:
        """(raw, wire) bytes that this rank has sent in `steps` steps. raw: with a ring in fp32;
        wire: measured for thinwire's codecs, else computed for a ring with the way's elements."""
        if self._state is not None:
            stats = self._state.stats()
            return stats["raw_bytes"], stats["wire_bytes"]
        elements = 2 * (self._world - 1) * self._numel * steps // self._world
        return 4 * elements, _ELEMENT_BYTES[self._way] * elements

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
