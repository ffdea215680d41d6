"""The backend "thinwire" of torch.distributed. torch 2.14 finds it by name through the entry point
group torch.distributed.backends; with an older torch, import this module first::

    import thinwire.torch.backend

    dist.init_process_group("thinwire")
    # or one dimension of a mesh:
    init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"),
                     backend_override={"replicate": "thinwire"})

Configure it with THINWIRE_CODEC, THINWIRE_SCOPE and THINWIRE_GATHER, or pass Options as the
backend's options."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from thinwire.arguments import wrong
from thinwire.torch import private
from thinwire.torch.process_group import ProcessGroup

__all__ = ["Options", "register"]

_DEVICES = ["cpu", "cuda"]


class Options(private.BackendOptions):
    """The `pg_options` of init_process_group and new_group, and a mesh's backend_override as
    ("thinwire", options).

    Args:
        codec, scope, gather, settings: as ProcessGroup takes them.
        timeout: of the group, unless it is set elsewhere.
    """

    def __init__(
        self,
        codec: str | None = None,
        *,
        scope: str | None = None,
        gather: str | None = None,
        timeout: datetime.timedelta = dist.constants.default_pg_timeout,
        **settings: Any,
    ) -> None:
        super().__init__("thinwire", timeout)
        settings |= {"scope": scope, "gather": gather}
        ProcessGroup(codec, **settings)  # a wrong argument is an error now
        self.codec, self.settings = codec, settings


def register(codec: str | None = None, *, name: str = "thinwire", **options: Any) -> None:
    """Register `name` as a backend in this process, so that
    torch.distributed.init_process_group(name) and new_group(backend=name) return compressed groups.
    Importing this module registers "thinwire".

    Args:
        codec: as ProcessGroup takes it; a group's own Options override it.
        name: of the backend.
        options: as ProcessGroup takes them; a group's own Options override them.

    Raises:
        InvalidArgumentError: an argument is not valid, or torch has a backend of that name.
    """
    ProcessGroup(codec, **options)  # a wrong argument is an error now
    if not isinstance(name, str) or not name.isidentifier():
        raise wrong("name", name, "a word")
    if hasattr(dist.Backend, name.upper()):
        raise wrong("name", name, "a name that no backend of torch has yet")

    def create(place: Any, own: object) -> ProcessGroup:
        if own is not None and not isinstance(own, Options):
            raise wrong("pg_options", own, "thinwire.torch.backend.Options, or None")
        chosen, settings = (codec, options) if own is None else (own.codec, own.settings)
        group = ProcessGroup(chosen, **settings)
        if getattr(place, "enable_reconfigure", False):  # torch 2.14
            group.wait_for_reconfigure(place.group_rank, place.group_size)
            return group
        group.connect(place.store, place.group_rank, place.group_size, place.timeout)
        return group

    dist.Backend.register_backend(name, create, extended_api=True, devices=_DEVICES)


def found_by_torch() -> None:
    """The entry point: torch imports this module and calls it. Importing has registered already."""


if not hasattr(dist.Backend, "THINWIRE"):
    register()
