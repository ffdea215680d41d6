"""Compressed allreduce for PyTorch (torch >= 2.1), on the CPU and on NVIDIA GPUs.

from thinwire.torch import State, hook, attach
ddp.register_comm_hook(State(codec="int4"), hook)       # or attach(ddp, codec="int4")
state = attach(ddp, codec="onebit", momentum=0.9)
move_momentum(optimizer, state)
opt = DistributedOptimizer(optimizer, model, codec="int4", policy="p3")
exchange = GradientExchange(codec="int4")               # for loops and frameworks of one's own
"""

from __future__ import annotations

from thinwire.torch.collectives import (
    Work,
    all_gather_into_tensor,
    all_reduce,
    reduce_scatter_tensor,
)
from thinwire.torch.communicator import Communicator
from thinwire.torch.ddp import OneBitAdam, State, attach, hook, move_momentum
from thinwire.torch.exchange import Bucket, GradientExchange, Part
from thinwire.torch.exchange.checkpoint import merge_state_dicts
from thinwire.torch.exchange.gathered import GatheredState
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.named_residuals import NamedResiduals
from thinwire.torch.optimizer import DistributedOptimizer
from thinwire.torch.replicas import check_replicas

__all__ = [
    "Bucket",
    "Communicator",
    "DistributedOptimizer",
    "GatheredState",
    "GradientExchange",
    "NamedResiduals",
    "OneBitAdam",
    "Part",
    "Recovery",
    "State",
    "Work",
    "all_gather_into_tensor",
    "all_reduce",
    "attach",
    "check_replicas",
    "hook",
    "merge_state_dicts",
    "move_momentum",
    "reduce_scatter_tensor",
]
