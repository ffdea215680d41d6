"""The adapter for FSDP2 (torch.distributed.fsdp.fully_shard, torch >= 2.8): gradients go through a
compressed reduce-scatter::

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = thinwire.torch.fsdp.compress(model, codec="int4")"""

from __future__ import annotations

from thinwire.torch.fsdp.compression import Compression, compress

__all__ = ["Compression", "compress"]
