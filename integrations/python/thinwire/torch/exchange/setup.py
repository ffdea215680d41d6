"""Setup: the settings, rules and codec choice that an exchange starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from thinwire import config
from thinwire.torch.exchange.auto import AUTO, AutoCodec
from thinwire.torch.exchange.parameters import check_sizes
from thinwire.torch.exchange.rules import Codec, Rules, Structure


@dataclass(frozen=True)
class Setup:
    settings: config.Config
    rules: Rules
    auto: AutoCodec | None  # only for codec="auto"; settings and rules are its first codec's then


def resolve(
    codec: Codec | None,
    process_group: dist.ProcessGroup | None,
    parameters: Mapping[str, int] | None,
    structure: Structure | None = None,
    **options: Any,
) -> Setup:
    """options: of config.resolve. parameters: elements by name, if they are known.

    InvalidArgumentError for an unknown codec, rule, policy or value, and for a codec that diverges
    without momentum."""
    by_name = isinstance(codec, Mapping)
    settings = config.resolve(codec=Rules(codec).joined if by_name else codec, **options)
    auto = None
    if settings.codec == AUTO:
        auto = AutoCodec(settings, process_group)
        settings = auto.config
    rules = Rules(codec if by_name else settings.codec, structure)
    rules.check_specs()
    rules.check_momentum(settings.momentum)
    if parameters is not None:
        check_sizes(parameters)
        rules.check_names(parameters)
    return Setup(settings, rules, auto)
