"""ModelHooks: the hooks of a compressed plain module, and the forward order behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from thinwire.torch import private
from thinwire.torch.agree import agreeing, from_rank_0
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.step_pipeline import GradientBucket

_Part = TypeVar("_Part")

# For torch's error where torch.compile traces a hook under fullgraph=True.
WAITS = (
    "thinwire: each module's forward waits for the values that it reads, which is no part of a "
    "graph; compile the model without fullgraph=True"
)


class ModelHooks:
    """Calls back when a gradient is made, before a module uses a bucket's parameters, and before
    the model's state_dict(). In a copy of the model (deepcopy, pickle, AveragedModel) the hooks do
    nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Mapping[torch.Tensor, str],
        *,
        on_gradient: Callable[[torch.Tensor], None],
        before_use: Callable[[GradientBucket], None] | None,
        finish: Callable[[], None],
        before_backward: Callable[[], None] | None = None,
    ) -> None:
        """names: the names of the trained parameters. before_use: None if forward passes do not
        wait, so that torch.compile may trace them as one graph. before_backward: called when a
        backward pass reaches the model's output."""
        self._names, self._before_use, self._finish = names, before_use, finish
        self._order = ForwardOrder(model, names, traced=before_use is not None)
        self._needs: dict[torch.nn.Module, list[GradientBucket]] = {}
        self._before_backward = before_backward
        self._handles = [
            *(p.register_post_accumulate_grad_hook(_weak(on_gradient)) for p in names),
            model.register_state_dict_pre_hook(self._before_state_dict),
            model.register_forward_pre_hook(self._check_reduced_once),
        ]
        if before_use is not None:
            # These run before the model's own hooks, some of which (weight_norm's) read parameters.
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True)
                for module in model.modules()
            ]
        if before_backward is not None:
            self._handles.append(model.register_forward_hook(self._after_forward))

    def agree_on_order(self, group: dist.ProcessGroup) -> list[tuple[str, torch.Tensor]]:
        """Return names and parameters in rank 0's forward order, or in the model's order if there
        was no forward pass. All ranks call it. PeerLostError if a rank is lost during the call."""
        self._order.stop()
        by_name = {name: parameter for parameter, name in self._names.items()}
        with agreeing("the order of the parameters", group):
            order = from_rank_0(self._order.order(self._names), group)
        return [(name, by_name[name]) for name in order]

    def take(self, bucket_of: Mapping[torch.Tensor, GradientBucket]) -> None:
        """Make forward passes wait for these buckets."""
        self._needs = self._order.needs(bucket_of)

    def _check_reduced_once(self, model: torch.nn.Module, _args: Any) -> None:
        """Raise InvalidArgumentError if DDP wraps the model and reduces its gradients, too."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (ddp := private.reducing_ddp()) is not None:
            checks.check_reduced_once(model, self._names, ddp)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        private.break_graph(WAITS)
        for bucket in self._needs.get(module, ()):
            self._before_use(bucket)

    def _after_forward(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._before_backward is None or torch.compiler.is_compiling():
            return
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output)

    def _on_output(self, _gradient: torch.Tensor) -> None:
        self._before_backward()

    def _before_state_dict(self, *_: Any) -> None:
        self._finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return _hooks_of_a_copy, ()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._order.stop()
        for handle in self._handles:
            handle.remove()


def _hooks_of_a_copy() -> ModelHooks:
    return ModelHooks(torch.nn.Module(), {}, on_gradient=_nothing, before_use=None, finish=_nothing)


def _weak(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a function that calls the method and holds its object weakly, so that a parameter's
    hooks make no reference cycle."""
    found = weakref.WeakMethod(method)

    def call(tensor: torch.Tensor) -> None:
        if (alive := found()) is not None:
            alive(tensor)

    return call


def _nothing(*_: Any) -> None:
    pass


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)


class _Watch(TorchFunctionMode):
    """Calls `see` with every tensor that a torch function is called with."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors_in((args, kwargs)):
            self._see(tensor)
        return function(*args, **kwargs)


class ForwardOrder:
    """The module whose forward pass uses each parameter first, and the order of first uses.

    It is learnt in one forward pass. A module may need more than its own parameters: attention
    reads its projection's weight without calling the projection, tied weights belong to two
    modules, and a parent may use a child's parameter. So the arguments of every torch function in
    that pass are inspected."""

    def __init__(
        self, model: torch.nn.Module, parameters: Iterable[torch.Tensor], *, traced: bool = True
    ) -> None:
        """traced: False: torch.compile may trace the model, and no hook may break its graph; then
        nothing is learnt from a traced pass."""
        self._model, self._traced = model, traced
        self._waiting = set(parameters)
        self.first_use: dict[torch.Tensor, torch.nn.Module] = {}  # in the order of first use
        self._inside: list[torch.nn.Module] = []
        self._watch: _Watch | None = None
        self._handles = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardOrder, (torch.nn.Module(), ())  # a copy learns no order

    def stop(self) -> None:
        """Stop watching, and keep the order seen so far."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_hidden(self) -> bool:
        return not self._traced and torch.compiler.is_compiling()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if self._is_hidden():
            return
        self._inside.append(module)
        if module is self._model:
            self._watch = _Watch(self._see)
            self._watch.__enter__()

    def _leave(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._is_hidden():
            return
        if self._inside:
            self._inside.pop()
        if module is self._model and self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            # None: the pass has raised, and torch still calls the hooks; learn from the next pass.
            if output is not None:
                self.stop()

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor in self._waiting and self._inside:
            self._waiting.discard(tensor)
            self.first_use[tensor] = self._inside[-1]

    def order(self, names: Mapping[torch.Tensor, str]) -> list[str]:
        """Return the names of all parameters in the order of their first use; unused ones come
        last, in the order of `names`."""
        seen = [names[parameter] for parameter in self.first_use]
        return seen + [name for p, name in names.items() if p not in self.first_use]

    def needs(self, parts: Mapping[torch.Tensor, _Part]) -> dict[torch.nn.Module, list[_Part]]:
        """Return the parts that each module waits for. A module waits for its own parameters and
        for those that it was the first to use; the model itself waits for those that no module was
        seen to use. parts: the part of each parameter."""
        needs: dict[torch.nn.Module, dict[_Part, None]] = {}
        for module in self._model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter in parts:
                    needs.setdefault(module, {})[parts[parameter]] = None
        for parameter, part in parts.items():
            needs.setdefault(self.first_use.get(parameter, self._model), {})[part] = None
        return {module: list(wanted) for module, wanted in needs.items()}
