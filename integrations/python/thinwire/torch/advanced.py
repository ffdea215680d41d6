"""The parts that thinwire.torch is built from, for frameworks and programs with special needs."""

from __future__ import annotations

from thinwire.torch.collectives import NamedResiduals, Work
from thinwire.torch.communicator import Communicator
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.checkpoint import merge_state_dicts
from thinwire.torch.exchange.gathered import DistributedState, GatheredState
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.process_group import ProcessGroup

__all__ = [
    "Bucket",
    "Communicator",
    "DistributedState",
    "GatheredState",
    "NamedResiduals",
    "Part",
    "ProcessGroup",
    "Recovery",
    "Work",
    "merge_state_dicts",
]
