"""The adapter for FSDP2 (torch.distributed.fsdp.fully_shard): a compressed reduce-scatter of
gradients."""

from __future__ import annotations

from thinwire.torch.fsdp.compression import ShardedCompression, compress_shards

__all__ = ["ShardedCompression", "compress_shards"]
