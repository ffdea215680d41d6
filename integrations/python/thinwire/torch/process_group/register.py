"""register(): compressed process groups as a backend of torch.distributed."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.torch.process_group.group import ProcessGroup


def register(codec: str | None = None, *, name: str = "thinwire", **options: Any) -> None:
    """Makes torch.distributed.init_process_group(name) and new_group(backend=name) give compressed
    groups in this process, by torch.distributed.Backend.register_backend.

    codec, options: as ProcessGroup takes them. InvalidArgumentError if torch has a backend of that
    name."""
    ProcessGroup(codec, **options)  # a wrong argument is an error now
    if not isinstance(name, str) or not name.isidentifier():
        raise wrong("name", name, "a word")
    if hasattr(dist.Backend, name.upper()):
        raise wrong("name", name, "a name that no backend of torch has yet")

    def create(
        store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> ProcessGroup:
        group = ProcessGroup(codec, **options)
        group.connect(store, rank, size, timeout)
        return group

    dist.Backend.register_backend(name, create, devices=["cpu", "cuda"])
