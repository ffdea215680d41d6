"""Fragments: parts of a model, each with its own rounds."""

from __future__ import annotations

import contextlib
import copy
import itertools
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.private import has_step_hooks, plain_name
from thinwire.torch.sites.secure import SumCodec
from thinwire.torch.sites.updates import UpdateCodec, Values


class _Kept(NamedTuple):
    """State of a fragment before a step that may be undone."""

    parameters: dict[str, torch.Tensor]
    anchor: dict[str, torch.Tensor]
    state: dict[torch.Tensor, Any]  # of the outer optimizer, by parameter
    groups: list[dict[str, Any]]  # its other values


class Fragment:
    """A part of the model with its own rounds: its parameters, the anchor (the parameters of all
    members after the last round), and the residuals of compression."""

    def __init__(
        self, number: int, module: torch.nn.Module, codec: Codec | None, outer: Optimizer
    ) -> None:
        """codec: None for secure sums."""
        self.number, self.outer, self._module = number, outer, module
        self.parameters = _trained(module)
        moved = {id(p) for group in outer.param_groups for p in group["params"]}
        for name, p in self.parameters.items():
            tensors.check(p, 0, lambda name=name: name)
            if id(p) not in moved:
                raise InvalidArgumentError(
                    f"outer_optimizer of fragment {number} has no '{name}', which would stay at "
                    "its anchor; make it of all parameters that are trained"
                )
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        if codec is None:
            self.codec: UpdateCodec | SumCodec = SumCodec(sizes)
        else:
            self.codec = UpdateCodec(codec, sizes, tensors.structure_of(module))
        self.residuals: Values = {name: tensors.zeros(n) for name, n in sizes.items()}
        self.anchor = self.copy()
        self._on_host = all(p.device.type == "cpu" for p in self.parameters.values())
        self._kept: _Kept | None = None
        self.mark = 0.0  # this member's work when its last round began

    def shapes(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Return the parameters' dtypes and shapes."""
        return {name: (p.dtype, list(p.shape)) for name, p in self.parameters.items()}

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters on the host."""
        return {n: p.detach().to("cpu", copy=True) for n, p in self.parameters.items()}

    def check(self) -> None:
        """InvalidArgumentError if the module trains other parameters than at the start, or one is
        not finite, because the mean would make it so on all members."""
        now = _trained(self._module)
        if others := [n for n, p in now.items() if self.parameters.get(n) is not p]:
            raise InvalidArgumentError(
                f"fragment {self.number}: {reprlib.repr(others)} were replaced, added or unfrozen "
                "since DiLoCo was made, and would train apart from those of other members; make it "
                "of the model as it is trained"
            )
        spoiled = [
            name
            for name, p in self.parameters.items()
            # The sum is fast, but may be infinite even if all elements are finite.
            if not p.detach().sum(dtype=torch.float32).isfinite() and not p.isfinite().all()
        ]
        if spoiled:
            raise InvalidArgumentError(
                f"fragment {self.number}: {reprlib.repr(spoiled)} of this member have elements "
                "that are not finite, which its update would carry to all members; the others go "
                "on without it; join again from a checkpoint, with a lower learning rate"
            )

    def update(self) -> Values:
        """Return anchor minus parameters: the pseudo-gradient."""
        of = self.update_in_parts()
        return {name: of(name, 0, p.numel()) for name, p in self.parameters.items()}

    def update_in_parts(self) -> Callable[[str, int, int], torch.Tensor]:
        """Return a function that computes the update part by part: (name, begin, end) -> these
        elements."""
        held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # the parameter of the last part

        def part(name: str, begin: int, end: int) -> torch.Tensor:
            if name not in held:
                held.clear()
                both = self.anchor[name], self.parameters[name].detach().cpu()
                held[name] = tuple(each.float().reshape(-1) for each in both)
            anchor, mine = held[name]
            return anchor[begin:end] - mine[begin:end]

        return part

    def keep(self) -> bool:
        """Keep all state that step() and a mix after it change, until restore() or forget(). Return
        whether it was kept: only if the parameters are on the host, because copies would take a
        device's memory, and with a torch optimizer, whose state is known, without step hooks."""
        torchs = type(self.outer).__module__.startswith("torch.optim.")
        if not self._on_host or not torchs or has_step_hooks(self.outer):
            return False
        own, state = list(self.parameters.values()), self.outer.state
        self._kept = _Kept(
            {name: p.detach().clone() for name, p in self.parameters.items()},
            self.anchor,  # step() replaces it, and does not change it
            {p: copy.deepcopy(state[p]) for p in own if p in state},
            [{k: v for k, v in g.items() if k != "params"} for g in self.outer.param_groups],
        )
        return True

    def restore(self) -> None:
        """Undo all changes since keep(), bit for bit."""
        kept, self._kept = self._kept, None
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(kept.parameters[name])
                self.outer.state.pop(p, None)
        self.outer.state.update(kept.state)
        for group, values in zip(self.outer.param_groups, kept.groups, strict=True):
            group.update(values)
        self.anchor = kept.anchor

    def forget(self) -> None:
        """Drop the state of keep()."""
        self._kept = None

    def step(self, update: Values) -> None:
        """Make an outer step from the anchor to the new anchor, of the parameters in the update.
        torch's optimizers step each parameter independently, so several partial steps give the same
        bits as one step."""
        own = {name: self.parameters[name] for name in update}
        with torch.no_grad(), _only_these(self.outer, own.values()):
            for name, p in own.items():
                p.copy_(self.anchor[name])
                p.grad = update[name].reshape(p.shape).to(p.device, p.dtype)
            self.outer.step()
        if self._kept is not None:
            ends = {name: p.detach().to("cpu", copy=True) for name, p in own.items()}
            self.anchor = self.anchor | ends
            return
        with torch.no_grad():
            for name, p in own.items():
                self.anchor[name].copy_(p)


def _trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def _only_these(optimizer: Optimizer, parameters: Iterable[torch.Tensor]):
    """Hide the gradients of all other parameters, and restore all gradients at the end: the last
    inner step has left gradients that the outer optimizer must not use."""
    everything = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    everything.update((id(p), p) for p in parameters)
    kept = [(p, p.grad) for p in everything.values()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in kept:
            p.grad = gradient


def check_apart(fragments: Sequence[Fragment]) -> None:
    for one, other in itertools.combinations(fragments, 2):
        held = set(map(id, one.parameters.values()))
        common = [name for name, p in other.parameters.items() if id(p) in held]
        if common:
            raise InvalidArgumentError(
                f"fragments {one.number} and {other.number} have '{common[0]}' in common, expected "
                "modules without a common parameter"
            )


def outers_of(outer: Optimizer | Sequence[Optimizer], fragments: int) -> list[Optimizer]:
    """Return an outer optimizer for each fragment. InvalidArgumentError if they do not fit."""
    listed = list(outer) if isinstance(outer, Iterable) else []
    outers = [outer] * fragments if isinstance(outer, Optimizer) else listed
    if len(outers) != fragments or not all(isinstance(each, Optimizer) for each in outers):
        raise wrong(
            "outer_optimizer", outer, f"a torch.optim.Optimizer, or {fragments}, one a fragment"
        )
    for each in outers:
        if isinstance(each, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            raise InvalidArgumentError(
                f"outer_optimizer is {type(each).__name__}, expected one that steps by a dense "
                "gradient and without a closure, since its gradient is the mean of all members' "
                "updates; take torch.optim.SGD, with Nesterov's momentum as in DiLoCo"
            )
    return outers
