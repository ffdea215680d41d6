"""Compression: the compressed gradients of one model, as compress() returns them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.torch.exchange import state_file
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.state_file import PathLike


class Compressed(NamedTuple):
    """A model that compress() was called on."""

    call: str  # the call that compressed it, for the message of a second one
    model: weakref.ref[torch.nn.Module]
    hooked: bool  # by the communication hook of DDP or replicate()


class Compression(ABC):
    """The compressed gradients of one model: statistics, checkpoints, recovery and close().

    `thinwire.torch.compress()` returns one for every kind of model."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters since the start. Waits for pending work.

        Returns:
            A dict with steps; all_reduces; raw_bytes, which a ring allreduce of fp32 would have
            sent; wire_bytes, which this rank has sent; ratio = raw_bytes / wire_bytes;
            planned_chunks, the number of chunks whose order was predicted; transport and topology,
            None before the first use; seconds by stage, summed over the lanes; and parameters, a
            list of {"name", "numel", "rule", "codec"}, where codec "raw" means that the bucket is
            too small to be compressed.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return, as text, what each rank waits for here, and the engine's last events.

        It may be called at any time from any thread, also while a step hangs.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and momentum of this rank. Each rank saves its own dict."""

    @abstractmethod
    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all ranks in one dict, on rank 0, which can save them all.

        All ranks call it; the other ranks get a dict without content. Rank 0 needs memory for all
        ranks' residuals: 8 bytes per parameter and rank, 12 with momentum.
        """

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved residuals and momentum, in any world size. With the same buckets the results
        are bit-identical to those of a run that was never interrupted.

        Args:
            saved: this rank's state_dict(), or a gathered_state_dict(), or the list of all ranks'
                dicts. The last two may be of another world size; then the sum of residuals is kept.

        Raises:
            InvalidArgumentError: the dict does not fit this model; nothing was changed.
        """

    @abstractmethod
    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        """After an error: continue in a new process group of any size. All its ranks call this.

        No residual is lost or sent twice, except that those of a lost rank are gone.

        Args:
            process_group: torch's new group; None: the default group.

        Returns:
            The step that the ranks have agreed on, and the lowest rank that has made it.

        Raises:
            InvalidArgumentError: torch has no process group.
            MismatchError: the ranks are not of one run.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections. This also happens when the object is collected, and at exit."""

    def save(self, path: PathLike) -> None:
        """Write state_dict() to a safetensors file. A crash during save() leaves the old file
        intact.

        Args:
            path: a file for this rank only, such as f"thinwire-{rank}.safetensors".
        """
        state_file.save(self.state_dict(), path)

    def load(self, path: PathLike | Sequence[PathLike]) -> None:
        """Load this rank's file, or the files of all ranks, which may be of another world size.

        Args:
            path: this rank's file, or the list of all ranks' files.

        Raises:
            InvalidArgumentError: a file is damaged or does not fit this model.
        """
        self.load_state_dict(state_file.load_all(path))


# The models whose gradients are compressed now: until close(), or until the model is collected.
COMPRESSED: MutableMapping[Compression, Compressed] = weakref.WeakKeyDictionary()


def compressed_with(model: torch.nn.Module) -> Iterator[Compressed]:
    """Yield the compressed models that share a trained parameter with this one."""
    ours = {id(p) for p in model.parameters() if p.requires_grad}
    for each in list(COMPRESSED.values()):
        earlier = each.model()
        if earlier is not None and any(id(p) in ours for p in earlier.parameters()):
            yield each
