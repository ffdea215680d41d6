"""Units: what DistributedOptimizer reduces at once. A large parameter, or several small neighbours
in forward order, with a flat buffer of their own, so that gradients stay the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch

from thinwire.comm import Segment, Segments, Work
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.policy import Policy
from thinwire.torch.session import Session

MERGE_BYTES = 1 << 20  # a unit of at least this takes no more large parameters
_SMALL = MERGE_BYTES // 8  # of a parameter that joins its neighbour in any case


class Phase(Enum):
    """Of a unit, once a step round."""

    IDLE = "its gradients are being made"
    FLYING = "it is being reduced"
    REDUCED = "its parameters' gradients are the mean"


class Unit:
    """Parameters that are reduced together."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        codecs: Policy,
        weight_decay_of: Callable[[torch.Tensor], float],
    ) -> None:
        """number: its place in forward order, which is its priority. weight_decay_of: what is added
        to a parameter's gradient before it is reduced, in parts of the parameter."""
        self._number = number
        self._weight_decay_of = weight_decay_of
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.phase = Phase.IDLE
        self._ready: set[torch.Tensor] = set()
        self._versions: dict[torch.Tensor, int] = {}
        self._work: Work | None = None
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self._buffer = torch.zeros(numel, dtype=first.dtype, device=first.device)
        flat = self._buffer.split([parameter.numel() for parameter in self.parameters])
        self._views = [
            part.view(parameter.shape)
            for part, parameter in zip(flat, self.parameters, strict=True)
        ]
        self._segments = Segments(
            [Segment(n, 0, p.numel(), p.numel(), codecs.index_of(n)) for n, p in parameters]
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def ready(self, parameter: torch.Tensor) -> bool:
        """Notes that this gradient is made; whether all are."""
        self._ready.add(parameter)
        return len(self._ready) == len(self.parameters)

    def submit(self, session: Session) -> None:
        """Starts the reduction of what the gradients are now. A missing one counts as zeros, and
        what compression kept of it waits until there is one."""
        dtype = tensors.check(self._buffer, session.group.rank, lambda: self.name)
        with torch.no_grad():
            for index, (parameter, view) in enumerate(self.means()):
                self._segments.mark_absent(index, parameter.grad is None)
                if parameter.grad is None:
                    view.zero_()
                else:
                    tensors.check(parameter.grad, session.group.rank, lambda: self.name)
                    view.copy_(parameter.grad)
                    if decay := self._weight_decay_of(parameter):
                        view.add_(parameter, alpha=decay)
                    self._versions[parameter] = parameter.grad._version
        self._work = session.submit(
            self._buffer, dtype, "mean", self.name, self._segments, self._number
        )
        self.phase = Phase.FLYING

    def check_untouched(self) -> None:
        """InvalidArgumentError if gradients were changed after they had been sent."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            version = self._versions.get(parameter)
            grad = parameter.grad
            if version is not None and grad is not None and grad._version != version:
                raise InvalidArgumentError(
                    f"the gradient of '{name}' was changed between backward() and step(), when it "
                    "had been sent already; call optimizer.synchronize() before clipping or "
                    "unscaling, or use optimizer.clip_grad_norm_()"
                )

    def wait(self, session: Session) -> None:
        """Returns when the buffer holds the mean; raises the typed error of a failure."""
        if self.phase is Phase.FLYING:
            session.complete(self._work)
            self._ready.clear()
            self._versions.clear()
            self.phase = Phase.REDUCED

    def means(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, mean gradient), after wait(); the mean is valid until the next submit()."""
        return zip(self.parameters, self._views, strict=True)


def make_units(
    parameters: Sequence[tuple[str, torch.Tensor]],
    codecs: Policy,
    weight_decay_of: Callable[[torch.Tensor], float],
) -> list[Unit]:
    """Neighbours of one dtype and device, merged up to MERGE_BYTES."""
    units: list[list[tuple[str, torch.Tensor]]] = []
    size = 0
    for name, parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        last = units[-1][-1][1] if units else None
        alike = last is not None and (last.dtype, last.device) == (
            parameter.dtype,
            parameter.device,
        )
        if not alike or (size >= MERGE_BYTES and bytes_ >= _SMALL):
            units.append([])
            size = 0
        units[-1].append((name, parameter))
        size += bytes_
    return [Unit(number, unit, codecs, weight_decay_of) for number, unit in enumerate(units)]
