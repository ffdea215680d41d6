"""Fragments: parts of a model that have rounds of their own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch.optim.optimizer import Optimizer

from thinwire.arguments import wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.private import plain_name
from thinwire.torch.sites.secure import SumCodec
from thinwire.torch.sites.updates import UpdateCodec, Values


class Fragment:
    """A part of the model that has rounds of its own: its parameters, the anchor, which is what all
    members had after the last round, and what compression has lost so far."""

    def __init__(
        self, number: int, module: torch.nn.Module, codec: Codec | None, outer: Optimizer
    ) -> None:
        """codec: None for secure sums."""
        self.number, self.outer = number, outer
        self.parameters = {
            plain_name(name): p for name, p in module.named_parameters() if p.requires_grad
        }
        for name, p in self.parameters.items():
            tensors.check(p, 0, lambda name=name: name)
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        if codec is None:
            self.codec: UpdateCodec | SumCodec = SumCodec(sizes)
        else:
            self.codec = UpdateCodec(codec, sizes, tensors.structure_of(module))
        self.residuals: Values = {name: torch.zeros(n) for name, n in sizes.items()}
        self.anchor = self.copy()
        self.mark = 0.0  # the work of this member when its last round began

    def copy(self) -> dict[str, torch.Tensor]:
        """The parameters, on the host."""
        return {n: p.detach().to("cpu", copy=True) for n, p in self.parameters.items()}

    def update(self) -> Values:
        """Anchor minus parameters: the pseudo-gradient."""
        return {
            name: (self.anchor[name].float() - p.detach().cpu().float()).reshape(-1).contiguous()
            for name, p in self.parameters.items()
        }

    def step(self, update: Values) -> None:
        """An outer step from the anchor, which ends at the new anchor."""
        with torch.no_grad(), _only_these(self.outer, self.parameters.values()):
            for name, p in self.parameters.items():
                p.copy_(self.anchor[name])
                p.grad = update[name].reshape(p.shape).to(p.device, p.dtype)
            self.outer.step()
            for name, p in self.parameters.items():
                self.anchor[name].copy_(p)


@contextlib.contextmanager
def _only_these(optimizer: Optimizer, parameters: Iterable[torch.Tensor]):
    """Hides the gradients of all other parameters, and gives all back: the last inner step has left
    gradients that the outer optimizer must not see."""
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
    """An outer optimizer for each fragment. InvalidArgumentError if they do not fit."""
    if fragments == 0:
        raise InvalidArgumentError("model_fragments is empty, expected one module at least")
    outers = [outer] * fragments if isinstance(outer, Optimizer) else list(outer)
    if len(outers) != fragments or not all(isinstance(each, Optimizer) for each in outers):
        raise wrong(
            "outer_optimizer", outer, f"a torch.optim.Optimizer, or {fragments}, one a fragment"
        )
    return outers
