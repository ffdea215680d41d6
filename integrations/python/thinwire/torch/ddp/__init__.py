"""The adapter for torch.nn.parallel.DistributedDataParallel: its communication hook and State."""

from __future__ import annotations

from thinwire.torch.ddp.hook import hook
from thinwire.torch.ddp.state import State

__all__ = ["State", "hook"]
