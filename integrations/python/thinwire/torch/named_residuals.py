"""NamedResiduals: checkpoints of what named collectives have lost so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.collectives import sessions_of
from thinwire.torch.exchange import checkpoint, state_file
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.gathered import gather
from thinwire.torch.exchange.state_file import PathLike
from thinwire.torch.group import resolve


class NamedResiduals:
    """The residuals of all_reduce(..., name=...) and reduce_scatter_tensor(..., name=...) on this
    rank, of all codecs, with the checkpoints that State has.

    group: None for the default group, which must be there. Load before the first call or between
    calls, on all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve(group, "NamedResiduals")

    def state_dict(self) -> dict[str, Any]:
        """As State.state_dict(); a residual's key is the codec, a space, and the call's name."""
        flat: Residuals = {
            f"{codec} {name}": memory
            for codec, residuals in sessions_of(self._group).residuals().items()
            for name, memory in residuals.items()
        }
        return checkpoint.pack(flat, "by name", *self._place(), steps=0)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes state_dict() of this rank, the list of all ranks' dicts, or gathered_state_dict().
        InvalidArgumentError if it does not fit."""
        world, rank = self._place()
        flat, _ = checkpoint.unpack(saved, world, rank)
        by_codec: dict[str, Residuals] = {}
        for key, memory in flat.items():
            codec, separator, name = key.partition(" ")
            if not separator:
                raise InvalidArgumentError(
                    f"the state dict has a residual for '{key}', expected a codec and a name; pass "
                    "what NamedResiduals.state_dict() gave"
                )
            by_codec.setdefault(codec, {})[name] = memory
        sessions_of(self._group).restore(by_codec)

    def gathered_state_dict(self) -> dict[str, Any]:
        """As GradientExchange.gathered_state_dict()."""
        return gather(self.state_dict(), self._group)

    def save(self, path: PathLike) -> None:
        """As GradientExchange.save()."""
        state_file.save(self.state_dict(), path)

    def load(self, path: PathLike | Sequence[PathLike]) -> None:
        """As GradientExchange.load()."""
        self.load_state_dict(state_file.load_all(path))

    def _place(self) -> tuple[int, int]:
        return dist.get_world_size(self._group), dist.get_rank(self._group)
