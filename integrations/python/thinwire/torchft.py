"""For torchft 0.2: a process group for its Manager that compresses gradients.

manager = torchft.Manager(pg=ThinwireProcessGroup(codec="int8"), ...)"""

from __future__ import annotations

import contextlib
from typing import Any

from thinwire.torch.process_group import ProcessGroup

_BASES: tuple[type, ...] = (ProcessGroup,)
with contextlib.suppress(ImportError):  # parts of torchft, such as LocalSGD, check for its class
    from torchft.process_group import ProcessGroup as _Torchfts

    _BASES = (ProcessGroup, _Torchfts)


class ThinwireProcessGroup(*_BASES):
    """thinwire.torch.process_group.ProcessGroup with the configure() that torchft's Manager calls
    when replicas come and go. Use it in place of torchft's ProcessGroupGloo. A manager also
    exchanges pseudo-gradients outside of backward(), so the scope is "all"."""

    def __init__(self, codec: str | None = None, *, scope: str = "all", **options: Any) -> None:
        super().__init__(codec, scope=scope, **options)

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *quorum: object
    ) -> None:
        """Connect as ProcessGroup.configure(). The other arguments are only for torchft's logs."""
        super().configure(store_addr, rank, world_size)
