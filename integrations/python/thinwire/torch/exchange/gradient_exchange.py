"""GradientExchange: the compressed mean of gradients over all ranks, and all that it keeps between
steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire.torch import private, tensors
from thinwire.torch.exchange import checkpoint
from thinwire.torch.exchange.bucket_exchange import BucketExchange
from thinwire.torch.exchange.compression import Compression
from thinwire.torch.exchange.gathered import gather
from thinwire.torch.exchange.owned_momentum import OwnedMomentum
from thinwire.torch.exchange.rules import Codec, Structure
from thinwire.torch.exchange.setup import resolve
from thinwire.torch.exchange.stats import summary
from thinwire.torch.exchange.whole_step import WholeStep
from thinwire.torch.group import rank_or_0


class GradientExchange(BucketExchange, Compression):
    """Averages gradients over the ranks of a process group.

    Adapters to frameworks are thin layers over it: thinwire.torch.State is one for DDP. Ranks meet
    at the first use; all must use the same values. After an error of a peer or of the network the
    exchange stays failed, and every later use raises the first reason, until recover(). Not
    thread-safe, but for close().

    Args:
        codec: a spec such as "int4" (default) or "topk:density=0.01"; or {pattern of parameter
            names: spec}, of which the first match wins; or "auto".
        process_group: torch's group; None: the default group, which may come later than this
            object.
        parameters: elements of each parameter, by name. If it is given, a rule that matches none of
            them is an error, and loading checks the names. None: they become known with their
            buckets.
        structure: names of parameters by the words "1d" and "embedding", for rules by
            structure.
        purpose: names the kind of user. Ranks match exchanges of one purpose by their order.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default. With momentum the exchange returns momentum in place of gradients; see
            take_momentum().

    Raises:
        InvalidArgumentError: an option, codec, rule or policy cannot be.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        parameters: Mapping[str, int] | None = None,
        structure: Structure | None = None,
        purpose: str = "exchange",
        **options: Any,
    ) -> None:
        setup = resolve(
            codec,
            process_group,
            parameters,
            structure,
            momentum=momentum,
            nesterov=nesterov,
            **options,
        )
        self._structure = structure
        super().__init__(setup, process_group, parameters, purpose)
        self._whole_step = WholeStep()
        self.momentum = OwnedMomentum(setup.settings.momentum, setup.settings.nesterov)

    # Whole steps, for loops that have all gradients at once.

    def reduce(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, as one step; returns when all is done.

        named: tensors by the name that rules and residuals go by; any shape, float32, bfloat16 or
        float16. All ranks pass the same names and shapes, in the same order."""
        self._whole_step.reduce(self, named)

    def reduce_gradients(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces the .grad of parameters by the mean over all ranks (or by the momentum, if the
        exchange owns it), as one step; call it between backward() and step().

        named: parameters by name, as dict(model.named_parameters()), the same on all ranks in the
        same order. A missing .grad counts as zeros, and becomes the mean."""
        self._whole_step.reduce_gradients(self, named)

    # Momentum.

    def take_momentum(
        self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str | None]
    ) -> None:
        """Moves momentum and weight decay out of an optimizer's param groups that still have them,
        into the exchange. From then on the results of the exchange are momentum.

        optimizer: torch.optim.SGD. name_of: a parameter's name; None: its buffer is dropped.
        InvalidArgumentError if the exchange owns no momentum, or for another optimizer."""
        if found := self.momentum.take(optimizer, name_of):
            self.load_momentum(found)

    def load_momentum(self, momentum: Mapping[str, torch.Tensor]) -> None:
        """Replaces the momentum of parameters, in any shape and dtype. Nothing may be in flight."""
        tensors.check_named(momentum, rank_or_0(self._process_group))
        momentum = {private.plain_name(name): buffer for name, buffer in momentum.items()}
        for name, buffer in momentum.items():
            self._parameters.add_size(name, buffer.numel())
        memory = checkpoint.with_momentum(self._session.memory(), momentum)
        self._session.load(memory, self.steps)

    def _owns_momentum(self) -> bool:
        return self.config.momentum != 0

    # Statistics and checkpoints.

    @property
    def transport(self) -> str | None:
        """stats()["transport"]."""
        return self._session.transport

    @property
    def topology(self) -> str | None:
        """stats()["topology"]."""
        return self._session.topology

    def counts(self) -> Counter[str]:
        """Sums since the start; waits until nothing is in flight that start() was given."""
        return self._session.stats()

    def table(self) -> list[dict[str, Any]]:
        """stats()["parameters"]."""
        return self._parameters.table(self._session.communicator, self._rules)

    def stats(self) -> dict[str, Any]:
        """steps, all_reduces, raw_bytes (a ring of fp32 would have sent them), wire_bytes (sent by
        this rank), ratio = raw / wire, planned_chunks (their order was predicted); transport (what
        the data runs on) and topology (the way that dense allreduces go); seconds per stage, summed
        over the lanes: queue, encode, exchange, reduce, gather, decode; parameters: a
        list of {"name", "numel", "rule", "codec"}, where codec is "raw" in a bucket too small to be
        compressed, and int4 where topk would cost more bytes."""
        return {**summary(self.counts(), self.steps, self), "parameters": self.table()}

    def describe(self) -> str:
        """Who waits for whom on this rank, and the engine's last events, as text. At any time, from
        any thread; also while a step hangs."""
        return self._session.describe()

    def state_dict(self) -> dict[str, Any]:
        """The residuals and momentum of this rank; every rank saves its own.

        {"format", "codec", "world", "rank", "steps", "sparse", "residuals": {parameter: {"first":
        t, "second": t, "momentum": t}}} with flat float32 tensors on the host: first in units of a
        gradient, second in units of the mean, momentum only if the exchange owns it."""
        memory, sparse = self._session.memory(), self._sparse()
        return checkpoint.pack(memory, self.codec, self.world_size, self.rank, self.steps, sparse)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes this rank's state_dict(), or gathered_state_dict(), or the list of all ranks'
        dicts, which may be of another world size (merge_state_dicts). With the same buckets,
        training goes on bit by bit as if it had never stopped. InvalidArgumentError if the dict
        does not fit, which changes nothing."""
        residuals, steps = self.check_state_dict(saved)
        self._session.load(residuals, steps)
        self.steps = steps

    def check_state_dict(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[checkpoint.Residuals, int]:
        """What load_state_dict() would take of it: residuals and steps. Raises as that does."""
        residuals, steps = checkpoint.unpack(saved, self.world_size, self.rank)
        self._parameters.check(residuals)
        checkpoint.check_momentum(residuals, self._owns_momentum())
        return residuals, steps

    def gathered_state_dict(self) -> dict[str, Any]:
        """The state dicts of all ranks in one, on rank 0; all ranks call it, and the others get one
        without content. For checkpoints that rank 0 alone writes; load_state_dict() takes it on
        every rank, in any world size. Rank 0 needs memory for all ranks' residuals: 8 bytes a
        parameter and rank, 12 with momentum."""
        return gather(self.state_dict(), self._process_group)
