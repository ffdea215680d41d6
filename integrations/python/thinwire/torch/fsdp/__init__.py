"""The adapter for FSDP2 (torch.distributed.fsdp.fully_shard): gradients go through a compressed
reduce-scatter."""

from __future__ import annotations

from thinwire.torch.fsdp.compression import ShardedCompression, compress_shards

__all__ = ["ShardedCompression", "compress_shards"]
