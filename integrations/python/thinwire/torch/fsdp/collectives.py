"""The collectives of gradients that FSDP2 calls in place of its own: the reduce-scatter of a unit,
and an all-reduce hook that runs after it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thinwire.errors import Error, InvalidArgumentError, warn
from thinwire.torch import private
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.fsdp.units import Unit
from thinwire.torch.works import typed_error


class Pool:
    """A pool of reused host memory, about twice as much as the largest unit takes. New memory in
    every step would cost a page fault per 4 KiB. On a GPU torch's allocator reuses memory.
    Thread-safe."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized flat tensor. Call give() when it is not used any more."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        bytes_ = numel * dtype.itemsize
        with self._lock:
            self._free.sort(key=torch.UntypedStorage.nbytes)
            fitting = [each for each in self._free if each.nbytes() >= bytes_]
            found = fitting[0] if fitting else None
            if found is not None:
                self._free = [each for each in self._free if each is not found]
            elif self._free:
                self._free.pop()  # too small; so the pool never grows beyond those once in use
        found = torch.UntypedStorage(bytes_) if found is None else found
        return torch.empty(0, dtype=dtype).set_(found, 0, (numel,))

    def give(self, tensor: torch.Tensor) -> None:
        """Take back a tensor of take() that is not read any more."""
        if tensor.device.type == "cpu":
            with self._lock:
                self._free.append(tensor.untyped_storage())


class Buffers:
    """The allocate() method that torch.distributed.fsdp requires of a collective."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a collective to read or write, from torch's own allocator."""
        return torch.empty(*size, dtype=dtype, device=device)


class Steps:
    """Finds the end of a step: all units have been reduced, or one is reduced again. codec="auto"
    may change the codec there."""

    def __init__(self, units: Sequence[str], exchange: GradientExchange) -> None:
        self._units, self._exchange = frozenset(units), exchange
        self._seen: set[str] = set()

    def begin(self, unit: str, device: torch.device) -> None:
        """Call before a unit is reduced."""
        if unit in self._seen:
            self._end(device)
        self._seen.add(unit)

    def end(self, device: torch.device) -> None:
        """Call after a unit was reduced."""
        if self._seen == self._units:
            self._end(device)

    def _end(self, device: torch.device) -> None:
        self._seen.clear()
        self._exchange.end_step(repeats=None)  # a step may lack some units
        self._exchange.between_steps(device, lambda: _synchronize(device))


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU: reductions have been waited for, but on a GPU only by streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Buckets:
    """A unit's buckets, one for each dtype and operation that FSDP2 uses."""

    def __init__(
        self, exchange: GradientExchange, name: str | None, parts: list[Part], collective: str
    ) -> None:
        """name: None: no residuals are kept, and calls match by their order, which FSDP2 keeps the
        same on all ranks."""
        self._exchange, self._name, self._parts = exchange, name, parts
        self._collective = collective
        self._made: dict[tuple[torch.dtype, str], Bucket] = {}

    def get(self, dtype: torch.dtype, op: str) -> Bucket:
        if (dtype, op) not in self._made:
            # Different names, because a predicted use must have the same dtype and operation.
            name = self._name
            if name is not None and self._made:
                name = f"{name} ({op}, {dtype})"
            self._made[dtype, op] = self._exchange.bucket(
                name, self._parts, dtype, op=op, collective=self._collective
            )
        return self._made[dtype, op]


class ReduceScatter(Buffers):
    """The reduce-scatter of one unit, with torch.distributed.fsdp's interface."""

    def __init__(
        self,
        unit: Unit,
        exchange: GradientExchange,
        steps: Steps,
        feedback: bool,
        pool: Pool,
        replicas_follow: bool,
    ) -> None:
        """feedback: whether residuals are kept. replicas_follow: whether AllReduceHook runs after
        it."""
        super().__init__(pool)
        self._replicas_follow = replicas_follow
        self._unit, self._exchange, self._steps = unit, exchange, steps
        name = unit.name if feedback else None
        self._buckets = _Buckets(exchange, name, unit.parts(), "reduce_scatter")
        self.exact = 0  # number of uncompressed reductions

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory as Buffers.allocate(). The input of a whole unit comes from the pool,
        because it is not read after the call."""
        if math.prod(size) == self._unit.numel:
            return self.pool.take(self._unit.numel, dtype, device)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter. The result is ready on return (on a GPU: for later work of the current
        stream). Raises the typed errors of a failed exchange.

        Args:
            output_tensor: this rank's part, n elements.
            input_tensor: n elements for each rank, with padding.
            group: of the ranks that share the shards, for uncompressed reductions.
            op: AVG, SUM or PREMUL_SUM.
            async_op: ignored.
        """
        self._steps.begin(self._unit.name, input_tensor.device)
        kind, factor = _operation(op)
        if input_tensor.numel() != self._unit.numel:
            self._reduce_exactly(output_tensor, input_tensor, group, kind, factor)
        else:
            bucket = self._buckets.get(input_tensor.dtype, kind)
            self._exchange.wait(self._exchange.submit(bucket, input_tensor, output_tensor))
            if factor != 1:
                output_tensor.mul_(factor)
            self.pool.give(input_tensor)
            if not self._replicas_follow:
                _equalize(self._unit, output_tensor)
        self._steps.end(output_tensor.device)

    def _reduce_exactly(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        group: dist.ProcessGroup,
        kind: str,
        factor: float,
    ) -> None:
        """Reduce without compression. FSDP2 has left out parameters without a gradient and does not
        say which, so residuals cannot be matched to the buffer. All ranks leave out the same
        parameters; otherwise FSDP2 itself would fail."""
        if not self.exact:
            warn(
                f"'{self._unit.name}': FSDP2 reduces {source.numel()} elements, expected "
                f"{self._unit.numel}, since parameters have no gradient; such steps go "
                "uncompressed. Freeze what is not used, or give it to a fully_shard() of its own"
            )
        self.exact += 1
        if kind == "mean":
            factor = 1 / dist.get_world_size(group)
        with _typed(f"reduce-scatter of '{self._unit.name}' among the ranks", group):
            dist.reduce_scatter_tensor(output, source, op=dist.ReduceOp.SUM, group=group)
        output.mul_(factor)


class AllReduceHook:
    """The mean over replicas of a unit's shard, after its reduce-scatter."""

    def __init__(
        self,
        unit: Unit,
        rank: int,
        group: dist.ProcessGroup,
        exchange: GradientExchange,
        steps: Steps,
        feedback: bool,
    ) -> None:
        """rank: this rank's number among the ranks that share the shards. group, exchange: of the
        replicas. feedback: whether residuals are kept."""
        self._group = group
        self._unit, self._exchange, self._steps = unit, exchange, steps
        parts = unit.parts_of_rank(rank)
        self._numel = sum(part.numel for part in parts)
        name = unit.name if feedback else None
        self._buckets = _Buckets(exchange, name, parts, "all_reduce")
        self._waiting: torch.Tensor | None = None  # sums of passes without an all-reduce

    def __call__(self, shard: torch.Tensor) -> None:
        """Reduce the shard in place. After set_requires_all_reduce(False), add the shard to a sum
        and set the shard to zeros, until a pass all-reduces the sum."""
        if not private.all_reduces_now(self._unit.module):
            kept = self._waiting
            self._waiting = shard.clone() if kept is None else kept.add_(shard)
            shard.zero_()
            return
        if self._waiting is not None:
            shard.add_(self._waiting)
            self._waiting = None
        divided = self._unit.hybrid and private.divide_factor(self._unit.module) is not None
        op = "sum" if divided else "mean"
        self._steps.begin(self._unit.name, shard.device)
        if shard.numel() != self._numel:  # parameters are missing; ReduceScatter has warned
            with _typed(
                f"all-reduce of '{self._unit.name}' among the replicas on ranks", self._group
            ):
                dist.all_reduce(shard, group=self._group)
            if op == "mean":
                shard.div_(self._exchange.world_size)
        else:
            bucket = self._buckets.get(shard.dtype, op)
            self._exchange.wait(self._exchange.submit(bucket, shard))
            _equalize(self._unit, shard)
        self._steps.end(shard.device)


def _equalize(unit: Unit, shard: torch.Tensor) -> None:
    """Set the gradients of parameters that ranks of tensor parallelism replicate to those of the
    first of these ranks. Otherwise they would differ by rounding, since a codec's block may also
    have elements of a parameter of which each of these ranks has another part."""
    if not any(any(piece.replicated) for piece in unit.pieces):
        return
    chunks = shard.split([piece.chunk for piece in unit.pieces])
    for dimension, group in enumerate(unit.part_groups):
        named = zip(unit.pieces, chunks, strict=True)
        alike = {piece.name: chunk for piece, chunk in named if piece.replicated[dimension]}
        if not alike:
            continue
        packed = torch.cat(list(alike.values()))
        tensors = f"'{next(iter(alike))}', one of {len(alike)} in '{unit.name}'"
        with _typed(f"broadcast of {tensors}, among the ranks of tensor parallelism", group):
            dist.broadcast(packed, dist.get_global_rank(group, 0), group=group)
        sizes = [len(each) for each in alike.values()]
        for chunk, values in zip(alike.values(), packed.split(sizes), strict=True):
            chunk.copy_(values)


@contextlib.contextmanager
def _typed(collective: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn torch's error of a collective in the block, a RuntimeError, into a typed one. It names
    the ranks of the group, because Gloo tells no rank. collective: for the message, which continues
    with these ranks."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise typed_error(dist.get_rank(), f"{collective} {ranks}", error) from error


def _operation(op: dist.ReduceOp) -> tuple[str, float]:
    """Return "mean" or "sum", and the factor for the result."""
    if op == dist.ReduceOp.AVG:
        return "mean", 1.0
    if op == dist.ReduceOp.SUM:
        return "sum", 1.0
    kind, factor = op.__getstate__()  # the public way to a PREMUL_SUM's factor
    if kind == dist.ReduceOp.RedOpType.PREMUL_SUM and isinstance(factor, float):
        return "sum", factor
    raise InvalidArgumentError(f"FSDP2 asked for {kind}, expected AVG, SUM or PREMUL_SUM")
