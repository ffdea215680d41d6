"""The adapter for torch.nn.parallel.DistributedDataParallel: its communication hook and State."""

from __future__ import annotations

from thinwire.torch.ddp.hook import attach, hook
from thinwire.torch.ddp.onebit_adam import OneBitAdam
from thinwire.torch.ddp.state import State, move_momentum

__all__ = ["OneBitAdam", "State", "attach", "hook", "move_momentum"]
