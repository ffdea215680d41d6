"""The all-gather of parameters, which FSDP2 calls in place of its own. It sends differences.

Every rank keeps a copy of what it has gathered last, the *reference*, bit-identical on all ranks.
The owner of a shard keeps the shard x exact and sends C(x - r), where r is its part of the
reference. Every rank, including the owner, adds the decoded difference to r and computes with r.
The error of a gather is still in the next x - r, so it is corrected later: EF21-P of Gruntkowska,
Tyurin and Richtarik, arXiv 2209.15218, Algorithm 1. A backward pass computes with the weights of
its forward pass, so its gathers copy the reference and send nothing.

Without a reference each gather quantises the weights themselves, as ZeRO++ does: Wang et al.,
arXiv 2306.10209, section 3.1. That error is not corrected."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config
from thinwire.arguments import check_kind, wrong
from thinwire.codec import codec_info
from thinwire.config import Config
from thinwire.torch import private, tensors
from thinwire.torch.exchange.bucket import Bucket, InFlight, Part
from thinwire.torch.exchange.session import Session
from thinwire.torch.fsdp.collectives import Buffers, Pool
from thinwire.torch.fsdp.units import Piece, Unit
from thinwire.torch.group import Membership

# A unit is gathered exactly if a parameter has changed by more than this fraction of the unit's
# largest one, as after a load_state_dict() of the model. int4 loses at most 1/14 of such a change.
LARGEST_CHANGE = 1 / 8
_SAMPLE = 4096  # elements of a reference that are checked first

_DIFFERENCES, _FP32, _BF16 = 0, 1, 2  # the session's codecs
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_LEAST_BITS = 8  # least bits of a codec that may round weights without a reference

Wanted = str | bool | None  # the argument `reference`


def check_gather(codec: object, reference: Wanted) -> str | bool:
    """Return the meaning of `reference`: "auto", "fp32", "bf16" or False.

    Raises:
        InvalidArgumentError: the reference is none of these; or the codec has no all-gather, needs
            momentum, rounds at random, or has fewer than 8 bits without a reference.
    """
    if reference not in (None, False, "auto", *_DTYPES):
        raise wrong("reference", reference, "'auto', 'fp32', 'bf16' or False")
    check_kind("gather", codec, str, "a codec such as 'int4', 'adaptive' or 'int8'")
    info = codec_info(codec)
    if info.entries or info.momentum == "required" or "stochastic" in info.spec:
        expected = "int4, adaptive, int8, bf16 or another codec that rounds to the nearest value"
        raise wrong("gather", codec, expected)
    if reference is False and not rounds_finely(codec):
        raise wrong(
            "gather", codec, "int8 or bf16 with reference=False: fewer than 8 bits of a weight "
            "diverge, and only a reference keeps what they lose",
        )  # fmt: skip
    return "auto" if reference is None else reference


def rounds_finely(codec: str) -> bool:
    """Return whether weights may be rounded by this codec without a reference."""
    return codec_info(codec).down_bits >= _LEAST_BITS


def reference_dtype(unit: Unit, reference: str) -> torch.dtype:
    """Return the dtype of a unit's reference; for "auto" the dtype in which FSDP2 gathers."""
    return _DTYPES.get(reference) or private.gathered_dtype(unit.module) or unit.dtype


def reference_bytes(units: Sequence[Unit], reference: str) -> int:
    """Return the memory that the references of these units take on every rank."""
    return sum(  # all chunks, and this rank's chunk a second time
        (unit.world + 1) * sum(piece.chunk for piece in unit.gathered)
        * reference_dtype(unit, reference).itemsize
        for unit in units
    )  # fmt: skip


class ParameterGather:
    """The compressed all-gathers of a model: their connections, and one UnitGather for each unit.

    References take as many bytes on every rank as the whole, unsharded model and this rank's shard
    in their dtype: 4 bytes per element in fp32, 2 in bf16. The caller decides whether that fits
    (residuals.decide)."""

    def __init__(
        self,
        units: Sequence[Unit],
        codec: str,
        reference: str | bool,
        group: dist.ProcessGroup,
        pool: Pool,
        options: Mapping[str, Any],
    ) -> None:
        """codec, reference: from check_gather(); False: no references. Ranks connect at the first
        gather."""
        settings = settings_of_gather(config.resolve(**{**options, "codec": codec}))
        self._session = Session(Membership(group, "fsdp gather"), settings)
        self._session.close_with(self)
        self.of_unit = {
            unit.name: UnitGather(
                unit.gathered, unit.world, dist.get_rank(group), self._session,
                reference_dtype(unit, reference) if reference else None, pool,
                shared=not private.gathers_in_parts(unit.module),
            )
            for unit in units
        }  # fmt: skip

    def stats(self, steps: int) -> dict[str, Any]:
        """Return the counters of GradientExchange.stats() without parameters, and reference_bytes:
        the memory of the references; exact: the number of uncompressed gathers; repeated: the
        number of gathers of backward passes, which sent nothing."""
        return _stats_of(self._session, self.of_unit.values(), steps)

    def describe(self) -> str:
        return self._session.describe()

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the references by parameter, with padding: flat float32 on the
        host. Empty before the first gather, and without references."""
        return {name: part for unit in self.of_unit.values() for name, part in unit.state().items()}

    def load(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Load references of state(), on all ranks; the next gather of each unit sends them to the
        other ranks. The next gather of a unit is exact if `parts` lacks one of its parameters."""
        for unit in self.of_unit.values():
            unit.load(parts)

    def close(self) -> None:
        self._session.close()


class GroupGather:
    """The compressed gathers of FSDP2 over a process group. The group gets only collectives;
    private.gathered_unit() finds the unit of each.

    References are as in ParameterGather, in the dtype in which FSDP2 gathers."""

    def __init__(self, session: Session, least: int, budget: Callable[[bool], int]) -> None:
        """session: with settings_of_gather(). least: units whose bytes times (ranks - 1) are at
        most this are gathered exactly. budget: returns the bytes that references may take on the
        GPU (True) or the host, equal on all ranks; called once. Units beyond it are gathered
        exactly."""
        self.session, self._least, self._budget = session, least, budget
        self._left: int | None = None
        self._pool = Pool()
        self._of_unit: weakref.WeakKeyDictionary[object, UnitGather] = weakref.WeakKeyDictionary()
        self._exact = 0

    def start(self, output: torch.Tensor, source: torch.Tensor) -> Callable[[], None] | None:
        """Start a gather as UnitGather does, and return the function that completes it. None if the
        gather is not FSDP2's or must be exact; then the caller makes it. A unit that this group
        gathers only in backward passes is gathered exactly, too: its forward passes use another
        group (reshard_after_forward=N)."""
        unit = private.gathered_unit()
        if unit is None:
            return None
        gather = self._of_unit.get(unit)
        if gather is None and not private.in_backward():
            gather = self._new(output, source)
            if gather is not None:
                self._of_unit[unit] = gather
        if gather is None or not gather.is_of(output, source):
            self._exact += 1
            return None
        return gather.start(output, source)

    def _new(self, output: torch.Tensor, source: torch.Tensor) -> UnitGather | None:
        """Return the UnitGather for all gathers of such a unit; None: gather it exactly."""
        sizes = output.numel(), source.numel() * self.session.size
        small = output.nbytes * (self.session.size - 1) <= self._least
        if sizes[0] != sizes[1] or small or source.dtype not in tensors.DTYPES:
            return None
        if self._left is None:
            self._left = self._budget(source.is_cuda)
        if output.nbytes + source.nbytes > self._left:
            return None
        self._left -= output.nbytes + source.nbytes
        whole = Piece("parameters", (output.numel(),), source.numel())
        session = self.session
        return UnitGather(
            (whole,), session.size, session.rank, session, source.dtype, self._pool, shared=False
        )

    def stats(self) -> dict[str, Any]:
        """Return the counters of ParameterGather.stats(); each gather counts as a step."""
        found = _stats_of(self.session, self._of_unit.values(), None)
        return {**found, "exact": found["exact"] + self._exact}


def settings_of_gather(settings: Config) -> Config:
    """Return the settings of a session for gathers with their codec and exact ones."""
    return dataclasses.replace(settings, codec=f"{settings.codec};fp32;bf16")


def _stats_of(session: Session, units: Iterable[UnitGather], steps: int | None) -> dict[str, Any]:
    units = list(units)
    counts = sum((unit.counts for unit in units), Counter())
    return {
        **session.summary(steps),
        "reference_bytes": sum(unit.reference_bytes for unit in units),
        "exact": counts["exact"],
        "repeated": counts["repeated"],
    }


class UnitGather(Buffers):
    """The all-gather of one unit, with torch.distributed.fsdp's interface."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        world: int,
        rank: int,
        session: Session,
        dtype: torch.dtype | None,
        pool: Pool,
        *,
        shared: bool,
    ) -> None:
        """pieces: the gathered parameters. rank: this rank's number among the `world` ranks that
        share the shards. dtype: of the reference; None: there is none. shared: allocate() may
        return the reference."""
        super().__init__(pool)
        self._pieces, self._world, self._rank = pieces, world, rank
        self._chunk = sum(piece.chunk for piece in self._pieces)
        self._numel = self._world * self._chunk
        self._session, self._dtype = session, dtype
        self._reference: torch.Tensor | None = None  # flat: all chunks, as they are gathered
        self._own: torch.Tensor | None = None  # a copy of this rank's chunk of the reference
        self._shared = shared
        self._loaded: torch.Tensor | None = None  # this rank's chunk of a loaded reference
        self._changed: torch.Event | None = None  # on a GPU: the last write of the reference
        self._buckets: dict[tuple[str, int], Bucket] = {}
        self.counts: Counter[str] = Counter()

    @property
    def reference_bytes(self) -> int:
        return 0 if self._reference is None else self._reference.nbytes + self._own.nbytes

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory for a gather; on the host the reference itself, which saves a copy:
        FSDP2 writes this rank's shard into its part, calls this object, and then only reads."""
        shared = self._shared and self._reference is not None and device.type == "cpu"
        if shared and dtype == self._dtype and math.prod(size) == self._numel:
            return self._reference
        with torch.inference_mode(False):
            return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather a unit's parameters. A gather is exact unless it is of a whole unit in float32,
        bfloat16 or float16. So parameters of several dtypes, which FSDP2 gathers as bytes, and
        those in the smaller groups of reshard_after_forward=N are gathered exactly. The pass that
        needs the parameters raises the typed error of a failed exchange.

        Args:
            output_tensor: for the shards of all ranks.
            input_tensor: this rank's shard, which is a part of the output.
            group: the group of an exact gather.
            async_op: return a Work that waits.
        """
        if not self.is_of(output_tensor, input_tensor):
            self.counts["exact"] += 1
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        work = _GatherWork(self.start(output_tensor, input_tensor))
        if async_op:
            return work
        work.wait()
        return None

    def is_of(self, output: torch.Tensor, source: torch.Tensor) -> bool:
        """Return whether these tensors are the whole unit, in a dtype that codecs support."""
        sizes = source.numel(), output.numel()
        return sizes == (self._chunk, self._numel) and source.dtype in tensors.DTYPES

    def start(self, output: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Start a gather, as __call__ does. Return a function that waits until the parameters are
        ready (on a GPU: for later work of the current stream). Both raise typed errors."""
        with torch.inference_mode(False), torch.no_grad():  # tensors are reused in both modes
            finish = self._start(output, source)

        def end() -> None:
            with torch.inference_mode(False), torch.no_grad():
                finish()

        return end

    def _start(self, output: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        if self._dtype is None:
            sent = self._submit(source.clone(), output, _DIFFERENCES)  # they must not overlap
            return lambda: self._session.complete(sent)
        if self._changed is not None:
            torch.cuda.current_stream().wait_event(self._changed)
        in_place = self._reference is not None and output.data_ptr() == self._reference.data_ptr()
        if self._reference is not None and private.in_backward():
            self.counts["repeated"] += 1
            if in_place:
                source.copy_(self._own)
            return lambda: self._give(output)
        mine = self.pool.take(self._chunk, source.dtype, source.device).copy_(source)
        if in_place:
            source.copy_(self._own)
        if self._reference is None:
            loaded, self._loaded = self._loaded, None
            self._gather_exactly(mine if loaded is None else loaded.to(mine.device))
            if loaded is None:
                self.pool.give(mine)
                return lambda: self._give(output)
        difference = self.pool.take(self._chunk, source.dtype, source.device)
        torch.sub(mine, self._own, out=difference)
        decoded = self.pool.take(self._numel, source.dtype, source.device)
        sent = self._submit(difference, decoded, _DIFFERENCES)

        def finish() -> None:
            self._session.complete(sent)
            if self._fits(decoded):
                self._reference.add_(decoded)
                self._own.copy_(self._part())
            else:
                self._gather_exactly(mine)
            for each in (mine, difference, decoded):
                self.pool.give(each)
            self._give(output)

        return finish

    def _part(self) -> torch.Tensor:
        return self._reference[self._rank * self._chunk :][: self._chunk]

    def _fits(self, differences: torch.Tensor) -> bool:
        """Return whether the decoded differences are small enough; False for a NaN. All ranks get
        the same result: differences and reference have the same bits on all ranks, and a maximum
        does not depend on the order of its operands."""
        largest = _largest(differences)
        return any(  # a sample of the reference usually suffices
            largest <= LARGEST_CHANGE * _largest(part)
            for part in (self._reference[:_SAMPLE], self._reference)
        )

    def _gather_exactly(self, mine: torch.Tensor) -> None:
        """Fill the reference with all ranks' chunks, rounded only to its dtype."""
        self.counts["exact"] += 1
        if self._reference is None:
            self._reference = torch.empty(self._numel, dtype=self._dtype, device=mine.device)
        codec = _BF16 if self._dtype == torch.bfloat16 else _FP32
        sent = self._submit(mine.to(self._dtype), self._reference, codec)
        self._session.complete(sent)
        self._own = self._part().clone()

    def _give(self, output: torch.Tensor) -> None:
        """Copy the reference to the output."""
        if output.data_ptr() != self._reference.data_ptr():
            output.copy_(self._reference)
        if output.is_cuda:
            self._changed = torch.cuda.current_stream().record_event()

    def _submit(self, source: torch.Tensor, target: torch.Tensor, codec: int) -> InFlight:
        dtype = tensors.DTYPES[source.dtype]
        if (dtype, codec) not in self._buckets:
            parts = [Part("parameters", self._chunk)]
            self._buckets[dtype, codec] = Bucket(
                None, self._chunk, dtype, op="sum", parts=parts, codecs=[codec],
                collective="all_gather",
            )  # fmt: skip
        return self._session.submit(self._buckets[dtype, codec], source, target)

    def state(self) -> dict[str, torch.Tensor]:
        """Return ParameterGather.state() for this unit."""
        mine = self._loaded if self._own is None else self._own
        if mine is None:
            return {}
        chunks = mine.to("cpu", torch.float32).split([piece.chunk for piece in self._pieces])
        return {
            piece.name: chunk.clone() for piece, chunk in zip(self._pieces, chunks, strict=True)
        }

    def load(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Load this unit's part of ParameterGather.load()."""
        self._reference = self._own = self._loaded = None
        if self._dtype is not None and all(piece.name in parts for piece in self._pieces):
            self._loaded = torch.cat([parts[piece.name] for piece in self._pieces])


def _largest(values: torch.Tensor) -> float:
    """Return the largest absolute value; NaN if there is a NaN."""
    least, most = torch.aminmax(values)
    return float(torch.maximum(most, -least))


class _GatherWork(dist.Work):
    """A gather in flight. It is a torch Work because FSDP2 waits for no other type."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, *_: Any) -> bool:
        """Return when the parameters are ready (on a GPU: for later work of the current stream).
        Raise the typed error of a failure."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True
