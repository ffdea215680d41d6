"""What State and DistributedOptimizer are set up with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from thinwire import config
from thinwire.torch.auto import AUTO, AutoCodec
from thinwire.torch.group import Group
from thinwire.torch.policy import Codec, Policy
from thinwire.torch.session import Session
from thinwire.torch.watched import Watched


@dataclass(frozen=True)
class Settled:
    settings: config.Config
    codecs: Policy
    auto: AutoCodec | None  # of codec="auto"; settings and codecs are then what it starts with

    def open_session(self, group: Group, owner: object) -> Session | Watched:
        """Closed when `owner` goes."""
        session = Session(group, self.settings)
        session.close_with(owner)
        return session if self.auto is None else self.auto.watch(session)


def settle(
    codec: Codec | None,
    process_group: dist.ProcessGroup | None,
    watch: Callable[[Session], Watched],
    **options: Any,
) -> Settled:
    """watch: how codec="auto" looks at steps. options: of config.resolve.

    InvalidArgumentError for a value that can't be, and for a codec that needs momentum."""
    by_name = isinstance(codec, Mapping)
    settings = config.resolve(codec=Policy(codec).joined if by_name else codec, **options)
    auto = None
    if settings.codec == AUTO:
        auto = AutoCodec(settings, process_group, watch)
        settings = auto.settings
    codecs = Policy(codec if by_name else settings.codec)
    codecs.check_momentum(settings.momentum)
    return Settled(settings, codecs, auto)
