"""Compressed allreduce for PyTorch (torch >= 2.1), on the CPU and on NVIDIA GPUs.

from thinwire.torch import State, hook, attach
ddp.register_comm_hook(State(codec="int4"), hook)       # or attach(ddp, codec="int4")
state = attach(ddp, codec="onebit", momentum=0.9)
move_momentum(optimizer, state)
opt = DistributedOptimizer(optimizer, model, codec="int4", policy="p3")
"""

from __future__ import annotations

from thinwire.torch.checkpoint import merge_state_dicts
from thinwire.torch.ddp import attach, hook
from thinwire.torch.distributed_optimizer import DistributedOptimizer
from thinwire.torch.functional import Work, all_reduce
from thinwire.torch.onebit_adam import OneBitAdam
from thinwire.torch.state import State, move_momentum

__all__ = [
    "DistributedOptimizer",
    "OneBitAdam",
    "State",
    "Work",
    "all_reduce",
    "attach",
    "hook",
    "merge_state_dicts",
    "move_momentum",
]
