"""Compressed allreduce for PyTorch on the CPU (torch >= 2.1).

from thinwire.torch import State, hook, attach
ddp.register_comm_hook(State(codec="int4"), hook)       # or attach(ddp, codec="int4")
"""

from __future__ import annotations

from thinwire.torch.checkpoint import merge_state_dicts
from thinwire.torch.ddp import attach, hook
from thinwire.torch.functional import Work, all_reduce
from thinwire.torch.state import State

__all__ = ["State", "Work", "all_reduce", "attach", "hook", "merge_state_dicts"]
