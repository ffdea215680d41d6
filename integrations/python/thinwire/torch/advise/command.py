"""`thinwire advise` runs this on every rank."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.advise.advice import advise
from thinwire.torch.forecast.choice import ACCURATE, CODECS

_HOW = "torchrun --nproc-per-node 2 -m thinwire advise MODULE:FUNCTION"


def _import(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{name!r} is not there ({error}); expected MODULE:FUNCTION, as in `{_HOW}`"
        ) from error


def main(make: str, codecs: str | None) -> int:
    """Rank 0 prints the table."""
    if "RANK" not in os.environ:
        raise InvalidArgumentError(f"there are no ranks to measure between; start it with `{_HOW}`")
    model, optimizer, run = _import(make)()
    cuda = next(model.parameters()).is_cuda
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    chosen = tuple(codecs.split(",")) if codecs else CODECS
    allowed = chosen if codecs else ACCURATE
    try:
        advice = advise(model, optimizer, run, codecs=chosen, allowed=allowed)
        if dist.get_rank() == 0:
            print(advice.table())
        return 0
    finally:
        dist.destroy_process_group()
