"""The closure of an optimizer's step()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.arguments import check_call


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What it returns, called once with gradients on; None without one."""
    check_call("closure", closure)
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
