"""ModelHooks: the hooks of a compressed plain module, and the forward order behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire.torch.agree import from_rank_0
from thinwire.torch.optimizer.forward_order import ForwardOrder
from thinwire.torch.optimizer.gradient_bucket import GradientBucket


class ModelHooks:
    """Calls back when a gradient is made, before a module uses a bucket's parameters, and before
    the model's state_dict()."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Mapping[torch.Tensor, str],
        *,
        on_gradient: Callable[[torch.Tensor], None],
        before_use: Callable[[GradientBucket], None],
        finish: Callable[[], None],
    ) -> None:
        """names: of the parameters that are trained."""
        self._names, self._before_use = names, before_use
        self._order = ForwardOrder(model, names)
        self._needs: dict[torch.nn.Module, list[GradientBucket]] = {}
        self._handles = [
            *(p.register_post_accumulate_grad_hook(on_gradient) for p in names),
            *(m.register_forward_pre_hook(self._before_forward) for m in model.modules()),
            model.register_state_dict_pre_hook(lambda *_: finish()),
        ]

    def agree_on_order(self, group: dist.ProcessGroup) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters in rank 0's forward order. All ranks call it, after a forward pass
        (or without one: then in the model's order)."""
        self._order.stop()
        by_name = {name: parameter for parameter, name in self._names.items()}
        order = from_rank_0(self._order.order(self._names), group)
        return [(name, by_name[name]) for name in order]

    def take(self, bucket_of: Mapping[torch.Tensor, GradientBucket]) -> None:
        """From now on forward passes wait for these buckets."""
        self._needs = self._order.needs(bucket_of)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        for bucket in self._needs.get(module, ()):
            self._before_use(bucket)

    def remove(self) -> None:
        """Lets the model go."""
        self._order.stop()
        for handle in self._handles:
            handle.remove()
