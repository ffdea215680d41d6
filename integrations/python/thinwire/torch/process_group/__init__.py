"""ProcessGroup: torch's own over Gloo, whose allreduce of floats is compressed.

import thinwire.torch.process_group as compressed
compressed.register(codec="int8")
torch.distributed.init_process_group("thinwire")        # or:
group = compressed.ProcessGroup(codec="int8")
group.configure("host:29500/epoch-1", rank, world_size)  # again after ranks were lost"""

from __future__ import annotations

from thinwire.torch.process_group.group import ProcessGroup
from thinwire.torch.process_group.register import register

__all__ = ["ProcessGroup", "register"]
