"""WrappedOptimizer: a torch optimizer that delegates to another one; and loss_of(), for a step()
that replaces another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import check_call


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose param groups and state are those of another one, so that a
    learning-rate scheduler may use either of the two."""

    def __init__(self, inner: Optimizer) -> None:
        # Not super(): a subclass may also derive from the wrapped optimizer's class.
        Optimizer.__init__(self, inner.param_groups, inner.defaults)
        self._inner = inner
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's zero_grad()."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the wrapped optimizer's add_param_group()."""
        if hasattr(self, "_inner"):
            self._inner.add_param_group(param_group)
        else:  # torch's constructor calls it
            Optimizer.add_param_group(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict()."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Call the wrapped optimizer's load_state_dict()."""
        self._inner.load_state_dict(dict(state_dict))
        self._share()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step() once, with gradients enabled, and return its result; None
    without a closure."""
    check_call("closure", closure)
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
