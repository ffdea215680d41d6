"""ShardedCompression: compressed collectives of a model under FSDP2, and their residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire import config
from thinwire.arguments import check_kind, wrong
from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError, warn
from thinwire.torch import private
from thinwire.torch.agree import agreeing, check_alike
from thinwire.torch.exchange.auto import AUTO
from thinwire.torch.exchange.compression import Compression
from thinwire.torch.exchange.gathered import gather
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec, infos_of
from thinwire.torch.forecast import ACCURATE
from thinwire.torch.fsdp import gather as gathers
from thinwire.torch.fsdp.collectives import AllReduceHook, Pool, ReduceScatter, Steps
from thinwire.torch.fsdp.gather import ParameterGather
from thinwire.torch.fsdp.meshes import MultiMeshCompression, codecs_of
from thinwire.torch.fsdp.residuals import Decision, Layout, Place, Wanted, check_feedback, decide
from thinwire.torch.fsdp.units import Unit, units_of

# An attribute of a unit's module: the Compression of its gradients, until that is closed. FSDP2 has
# no public way to get the reduce-scatter of a module.
_COMPRESSED_BY = "_thinwire_compression"


def compress_shards(
    model: torch.nn.Module,
    codec: Codec | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
    inner: bool | None = None,
    gather: str | None = None,
    reference: gathers.Wanted = None,
    feedback: Wanted = None,
    warm_up_steps: int | None = None,
    warm_up_codec: str | None = None,
    **options: Any,
) -> Compression:
    """Compress the gradients of a model under FSDP2, from the next backward pass on. All ranks call
    it, because they agree on residuals.

    Memory on every rank: for each element of the whole, unsharded model, residuals take 4 bytes,
    and references of compressed gathers 4 bytes (2 in bf16). By default both are kept only within
    1/8 of the available memory. Residuals cover the whole model because each rank encodes the parts
    that it sends to all other ranks. Gradients are summed in fp32; the result has the dtype of the
    reduction. A failed exchange makes backward() raise a typed error on every rank.

    Args:
        model: fully_shard() was called on it or on its parts, and is not called again. Each such
            module is one reduce-scatter, and all of its parameters need one codec, so rules by name
            select modules: {"embed.*": "int8", "*": "int4"}. With tensor or expert parallelism
            (parallelize_module(), called before) each rank compresses the gradients of its part,
            and has residuals of that. Modules may be sharded over different ranks, as experts are,
            which have fewer than the other parameters.
        codec: as State takes it, except topk, onebit and momentum, which need the whole mean on
            every rank; topk works with inner=False. "auto": fp32, bf16, int8 and int4 take turns of
            a few steps, 67 to 131 in all, and the most accurate within 2 % of the fastest is used;
            without residuals only fp32 and bf16 are tried. Not with replicas, tensor or expert
            parallelism.
        replicas: for custom hybrid sharding: the group of ranks that have the same shard. The mean
            over it is compressed, too, after the reduce-scatter. On HSDP's mesh of two dimensions
            it is found, as the group of the first dimension.
        inner: False: with replicas, compress only the mean over these; FSDP2 reduces over the
            shards exactly. Use it for replicas on several nodes with shards inside a node.
            Residuals are then those of this rank's shard. True or None: compress both.
        gather: None: FSDP2 gathers parameters exactly. "int4", "adaptive", "int8" or "bf16": each
            forward pass gathers the changes of a unit's parameters with this codec, and its
            backward pass uses the same weights without a gather. Passes compute with weights that
            differ from the exact parameters, which the optimizer steps, by the error of the last
            gather (gather.py). Not with tensor or expert parallelism.
        reference: memory of the size of the whole, unsharded model on every rank, which `gather`
            uses. "auto" or None: in the dtype in which FSDP2 gathers, if that takes at most 1/8 of
            the memory that is available on each rank besides the residuals; otherwise a warning
            says how many bytes it takes, int8 and bf16 round the parameters themselves in every
            pass, and with codecs of fewer bits FSDP2 gathers exactly. "fp32", "bf16": always, in
            this dtype; bf16 also rounds all weights that passes compute with. False: never.
        feedback: "auto" or None: keep residuals if they take at most 1/8 of the memory that is
            available on each rank; otherwise a warning says how many bytes they take. True: always.
            False: never. Without residuals the default codec is bf16.
        warm_up_steps: the number of first steps that use warm_up_codec; not with "auto".
        warm_up_codec: "fp32" (also None), "bf16" or "int8".
        options: settings of docs/reference/settings.md.

    Raises:
        InvalidArgumentError: an argument is not valid, or the model's gradients are compressed
            already by a Compression that is not closed.
        MismatchError: `feedback` differs between ranks.
    """
    check_kind("model", model, torch.nn.Module, "a model under FSDP2")
    if gather is None and reference is not None:
        raise wrong("reference", reference, "None without gather=, which alone has a reference")
    kind = False if gather is None else gathers.check_gather(gather, reference)
    units = units_of(model, gathered=gather is not None)
    meshes = _by_ranks(units, replicas)
    _check_covered(meshes, replicas)
    codecs = [codec] if len(meshes) == 1 else codecs_of(meshes, codec, gather)
    if gather is not None and (parts := _place(units, None).parts) > 1:
        raise InvalidArgumentError(
            f"FSDP2 got gather={gather!r} with {parts} ranks of tensor or expert parallelism, "
            "expected None: parameters that these replicate would differ by rounding"
        )
    for unit in units:
        _check_free(unit)
    feedback = check_feedback(feedback)
    if inner not in (None, True, False):
        raise wrong("inner", inner, "True or False")
    sharings: list[_Sharing] = []
    for mesh in meshes:
        sharing = _Sharing(inner is not False, _replicas_of(mesh[0], replicas))
        if not sharing.inner and sharing.replicas is None:
            raise wrong("inner", inner, "True for shards without replicas: nothing else is reduced")
        _check_auto(codec, sharing.replicas, _place(mesh, None).parts)
        sharings.append(sharing)
    warm_up = {"warm_up_steps": warm_up_steps, "warm_up_codec": warm_up_codec}
    alike = {"inner": inner is not False, "gather": gather, "reference": reference, **warm_up}
    made: list[ShardedCompression] = []
    for mesh, its_codec, sharing in zip(meshes, codecs, sharings, strict=True):
        for members in _groups_of_all(mesh, sharing.replicas):
            with agreeing("the options", members, "compress()", together=True):
                check_alike("compress", {name: repr(each) for name, each in alike.items()}, members)
        taken = sum(each.residual_bytes for each in made)
        made.append(
            ShardedCompression(
                mesh, its_codec, sharing, gather, kind, feedback, warm_up, options, taken
            )
        )
    for each in made:
        each.install()
    return made[0] if len(made) == 1 else MultiMeshCompression(made)


class _Sharing(NamedTuple):
    """The reductions that are to be compressed."""

    inner: bool  # the reduce-scatter over the shards
    replicas: dist.ProcessGroup | None  # the all-reduce over this group


class Prepared(NamedTuple):
    """A saved state, checked and taken apart for the exchanges that load it."""

    shards: dict[str, Any]
    replicas: dict[str, Any]
    references: dict[str, torch.Tensor]


class ShardedCompression(Compression):
    """The object that compress() returns for FSDP2: statistics and checkpoints as of State."""

    def __init__(
        self,
        units: Sequence[Unit],
        codec: Codec | None,
        sharing: _Sharing,
        gather: str | None,
        reference: str | bool,
        feedback: bool | str,
        warm_up: Mapping[str, Any],
        options: Mapping[str, Any],
        taken: int = 0,
    ) -> None:
        """Created by compress(). taken: bytes that residuals of other meshes of the model take."""
        padded = {part.name: part.total for unit in units for part in unit.parts_of_rank(0)}
        group, replicas = units[0].group, sharing.replicas
        self._inner = sharing.inner
        _check_codec(codec, options.get("momentum"), sharing.inner)
        reducing = {**options, **warm_up}
        self._exchange = _exchange(codec, group, padded, "fsdp", reducing)
        self._feedback = _decide(feedback, self._exchange, units, sharing, taken)
        if not self._feedback.kept:
            unnamed = codec is None and not config.is_set("codec")
            if feedback == "auto":
                instead = "auto" if self._exchange.automatic else "bf16" if unnamed else None
                _warn_of_no_residuals(self._feedback, instead)
            if unnamed:
                codec, reducing = "bf16", options  # bf16 needs no warm-up
                self._exchange.close()
                self._exchange = _exchange(codec, group, padded, "fsdp", options)
        if self._exchange.automatic:
            self._exchange.try_codecs([
                codec for codec in ACCURATE
                if self._feedback.kept or not codec_info(codec).uses_feedback
            ])  # fmt: skip
        self._rank = dist.get_rank(group)
        self._replicas: GradientExchange | None = None
        self._replica_group = replicas
        if replicas is not None:
            self._replicas = _exchange(codec, replicas, padded, "fsdp replicas", reducing)
            self._replica_steps = Steps([unit.name for unit in units], self._replicas)
        self._pool = Pool()
        self._reference: Decision | None = None  # None unless `gather` is set
        self._gather = self._gather_of(units, gather, reference, replicas, options)
        self._group = group
        pieces = {piece.name: piece for unit in units for piece in unit.pieces + unit.gathered}
        self.layout = Layout(_place(units, replicas), pieces)
        self._steps = Steps([unit.name for unit in units], self._exchange)
        self._reducers: list[ReduceScatter] = []
        self._units = list(units)

    def _gather_of(
        self,
        units: Sequence[Unit],
        codec: str | None,
        reference: str | bool,
        replicas: dist.ProcessGroup | None,
        options: Mapping[str, Any],
    ) -> ParameterGather | None:
        """Return the compressed gathers of parameters; None if FSDP2 gathers them."""
        if codec is None:
            return None
        self._reference = decide(
            "reference", "references of gathered parameters", reference,
            gathers.reference_bytes(units, str(reference)), _groups_of_all(units, replicas),
            units[0].mesh.device_type == "cuda", self.residual_bytes,
        )  # fmt: skip
        if not self._reference.kept and reference == "auto":
            rounds = gathers.rounds_finely(codec)
            warn(
                f"compress: {self._reference.too_large}, so none are kept, and "
                + (
                    f"each gather rounds the parameters to {codec}: what it loses is lost"
                    if rounds
                    else f"FSDP2 gathers itself, exactly: {codec} is too coarse without them"
                )
                + "; reference='fp32' or 'bf16' keeps them all the same"
            )
            if not rounds:
                return None
        kind = reference if self._reference.kept else False
        return ParameterGather(units, codec, kind, units[0].group, self._pool, options)

    def install(self) -> None:
        """Make FSDP2 call the compressed collectives from now on."""
        for unit in self._units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        keep = self._feedback.kept
        reducer = ReduceScatter(
            unit, self._exchange, self._steps, keep, self._pool, self._replicas is not None
        )
        self._reducers.append(reducer)
        setattr(unit.module, _COMPRESSED_BY, self)
        if self._inner:
            unit.module.set_custom_reduce_scatter(reducer)
        if hasattr(unit.module, "set_reduce_scatter_unused_params"):  # torch 2.13
            unit.module.set_reduce_scatter_unused_params(True, recurse=False)
        if self._gather is not None:
            unit.module.set_custom_all_gather(self._gather.of_unit[unit.name])
        if self._replicas is not None:
            hook = AllReduceHook(
                unit, self._rank, self._replica_group, self._replicas, self._replica_steps, keep
            )
            unit.module.set_all_reduce_hook(hook)
            if unit.hybrid:
                private.leave_replicas_to_hook(unit.module)

    def _connected(self) -> list[GradientExchange | ParameterGather]:
        parts = (self._exchange, self._replicas, self._gather)
        return [part for part in parts if part is not None]

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of the ranks that share the shards."""
        return self._exchange

    def stats(self) -> dict[str, Any]:
        """Return the counters of State.stats() for the reduce-scatters, and exact_reductions: the
        number that were not compressed because parameters of their unit had no gradient. replicas
        and gather have the counters of the all-reduces and the all-gathers, if these are
        compressed."""
        exact = sum(reducer.exact for reducer in self._reducers)
        found = {**self._exchange.stats(), "steps": self._steps_made, "exact_reductions": exact}
        if self._replicas is not None:
            found["replicas"] = self._replicas.stats()
        if self._gather is not None:
            found["gather"] = self._gather.stats(self._steps_made)
        return found

    @property
    def _steps_made(self) -> int:
        return self._exchange.steps if self._inner else self._replicas.steps

    def describe(self) -> str:
        """Return the text of State.describe(), with a line about the residuals and their bytes."""
        decisions = [self._feedback] + ([] if self._reference is None else [self._reference])
        parts = [*decisions, *self._connected()]
        return "".join(part.describe() for part in parts)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, as State.state_dict(), in the parameters' unsharded order,
        and its part of the references of gathered parameters. "rank" and "world" count all ranks
        that train the model, including replicas."""
        replicas = None if self._replicas is None else self._replicas.state_dict()
        references = {} if self._gather is None else self._gather.state()
        shards = {**self._exchange.state_dict(), "steps": self._steps_made}
        return self.layout.join(shards, replicas, references)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all ranks that train the model, as State.gathered_state_dict().
        InvalidArgumentError with tensor parallelism, and with replicas if some ranks of the program
        do not train it."""
        place = self.layout.place
        if place.parts > 1:
            raise InvalidArgumentError(
                f"gathered_state_dict: each of {place.parts} ranks of tensor parallelism has the "
                "residuals of its part of the model; save() a file of each rank"
            )
        if place.replicas > 1 and dist.get_world_size() != place.world:
            raise InvalidArgumentError(
                f"gathered_state_dict: {place.replicas} replicas of {place.shards} shards, expected"
                f" all {dist.get_world_size()} ranks of the program; save() a file of each rank"
            )
        return gather(self.state_dict(), self._group if place.replicas == 1 else None)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved residuals, as State.load_state_dict(), also with another number of shards or
        replicas. If this object keeps no residuals, it drops those of the state dict with a
        warning. References are restored; if the state dict has none, the next gathers are exact."""
        self.take(self.prepare(saved))

    def prepare(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Prepared:
        """Return what load_state_dict() would load. Raises its errors."""
        shards, replicas, references = self.layout.split(saved, self._replicas is not None)
        if not self._feedback.kept:
            if shards["residuals"] or replicas["residuals"]:
                warn(
                    "load_state_dict: the state dict has residuals, and this model keeps none "
                    f"(feedback={self._feedback.wanted!r}), so they are dropped; "
                    "compress(..., feedback=True) keeps them"
                )
            shards, replicas = {**shards, "residuals": {}}, {**replicas, "residuals": {}}
        if not self._inner and shards["residuals"]:
            warn(
                "load_state_dict: the state dict has residuals of the reduce-scatter over the "
                "shards, which is exact here (inner=False), so they are dropped"
            )
            shards = {**shards, "residuals": {}}
        self._exchange.check_state_dict(shards)
        if self._replicas is not None:
            self._replicas.check_state_dict(replicas)
        return Prepared(shards, replicas, references)

    def take(self, prepared: Prepared) -> None:
        """Load what prepare() has returned."""
        self._exchange.load_state_dict(prepared.shards)
        if self._replicas is not None:
            self._replicas.load_state_dict(prepared.replicas)
        if self._gather is not None:
            self._gather.load(prepared.references)

    @property
    def residual_bytes(self) -> int:
        """The memory of the residuals on each rank."""
        return self._feedback.bytes * self._feedback.kept

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        """Not supported: with FSDP2 the shard of a lost rank is lost."""
        raise InvalidArgumentError(
            "recover: a model under FSDP2 has lost a shard with the lost rank; start again from a "
            "checkpoint, whose residuals load in any world size"
        )

    def close(self) -> None:
        """Close the connections. This also happens when the model is collected, and at exit. The
        model's gradients are not reduced any more until another compress()."""
        for each in self._connected():
            each.close()
        for unit in self._units:
            if getattr(unit.module, _COMPRESSED_BY, None) is self:
                delattr(unit.module, _COMPRESSED_BY)


def _check_free(unit: Unit) -> None:
    earlier = getattr(unit.module, _COMPRESSED_BY, None)
    if earlier is not None:
        raise InvalidArgumentError(
            f"compress: the gradients of '{unit.name}' are compressed already, by a compress() "
            "whose residuals this one would leave behind; remove one of the two calls, or call "
            "close() on what the first returned"
        )


def _place(units: Sequence[Unit], replicas: dist.ProcessGroup | None) -> Place:
    """Return this rank's place, among replicas and ranks of expert and tensor parallelism if there
    are any."""
    place = Place(units[0].world, dist.get_rank(units[0].group))
    if replicas is not None:
        place = place._replace(
            replicas=dist.get_world_size(replicas), replica=dist.get_rank(replicas)
        )
    for group in _part_groups(units):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        place = place._replace(parts=place.parts * size, part=place.part * size + rank)
    return place


def _part_groups(units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """Return the groups of expert and tensor parallelism, which some units may be without."""
    return max((unit.part_groups for unit in units), key=len)


def _by_ranks(units: Sequence[Unit], named: dist.ProcessGroup | None) -> list[list[Unit]]:
    """Return the units by the ranks that share their shards, and by their replicas."""
    found: dict[tuple[tuple[int, ...], ...], list[Unit]] = {}
    for unit in units:
        groups = [each for each in (unit.group, _replicas_of(unit, named)) if each is not None]
        ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
        found.setdefault(ranks, []).append(unit)
    return list(found.values())


def _check_covered(meshes: Sequence[Sequence[Unit]], named: dist.ProcessGroup | None) -> None:
    """InvalidArgumentError unless every mesh has the same number of ranks, with replicas and those
    of tensor or expert parallelism. Otherwise nothing would keep a unit of the smaller one equal
    on the ranks that are not in it."""
    places = [_place(units, _replicas_of(units[0], named)) for units in meshes]
    sizes = [place.world * place.parts for place in places]
    for units, size in zip(meshes, sizes, strict=True):
        if size != max(sizes):
            most = meshes[sizes.index(max(sizes))][0]
            raise InvalidArgumentError(
                f"'{units[0].name}' is trained by {size} ranks together, the ranks "
                f"{dist.get_process_group_ranks(units[0].group)}, and '{most.name}' by "
                f"{max(sizes)}; shard both over as many, or if its parameters differ between the "
                "other ranks, as experts do, distribute them over these (distribute_tensor)"
            )


def _replicas_of(unit: Unit, named: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of the replicas: that of HSDP's mesh, else the one that was passed."""
    if not unit.hybrid:
        return named
    if named is not None:
        raise InvalidArgumentError(
            f"got replicas=, and '{unit.name}' on HSDP's mesh, which has its replicas in its "
            "first dimension; leave replicas= out, or shard over one dimension of ranks"
        )
    return unit.mesh.get_group(0)


def _decide(
    wanted: bool | str,
    exchange: GradientExchange,
    units: Sequence[Unit],
    sharing: _Sharing,
    taken: int,
) -> Decision:
    first, rules, elements, replicas = units[0], exchange.rules, 0, sharing.replicas
    for unit in units:
        for piece in unit.pieces:
            spec = rules.by_pattern[rules.rule_of(piece.name)]
            if exchange.automatic or codec_info(spec).uses_feedback:
                elements += unit.world * piece.chunk * sharing.inner
                if replicas is not None:  # both hops of the all-reduce
                    elements += piece.chunk + piece.chunk // dist.get_world_size(replicas)
    needed = 4 * elements * (2 if exchange.config.recoverable else 1)
    groups, on_gpu = _groups_of_all(units, replicas), first.mesh.device_type == "cuda"
    return decide("feedback", "residuals of error feedback", wanted, needed, groups, on_gpu, taken)


def _groups_of_all(
    units: Sequence[Unit], replicas: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Return groups that together have all ranks that train the model."""
    groups = (units[0].group, replicas, *_part_groups(units))
    return [each for each in groups if each is not None]


def _warn_of_no_residuals(found: Decision, taken: str | None) -> None:
    """Warn that no residuals are kept. taken: the codec used instead; "auto": one of several; None:
    the codec that the user has set."""
    instead = {
        "auto": "codec='auto' takes fp32 or bf16",
        "bf16": "the codec is bf16",
        None: "what a step loses is lost: a codec below 8 bits loses accuracy",
    }[taken]
    warn(
        f"compress: {found.too_large}, so none are kept, and {instead}; feedback=True keeps "
        "them all the same, and feedback=False keeps none without this warning"
    )


def _check_auto(codec: Codec | None, replicas: dist.ProcessGroup | None, parts: int) -> None:
    """InvalidArgumentError for codec="auto", from the argument or the environment, where not all
    ranks that train the model reduce over one group. parts: the ranks of tensor or expert
    parallelism."""
    if AUTO not in (codec, config.codec_variable() if codec is None else None):
        return
    if replicas is not None:
        raise InvalidArgumentError(
            f"FSDP2 got codec='auto' with {dist.get_world_size(replicas)} replicas, expected a "
            "codec that is chosen: the reduce-scatters and the all-reduces over replicas have "
            "links of their own; take int4"
        )
    if parts > 1:
        raise InvalidArgumentError(
            "FSDP2 got codec='auto' with tensor parallelism, expected a codec that is chosen: "
            "each of its ranks would measure and choose for itself; take int4"
        )


def _check_codec(codec: Codec | None, momentum: object, scatters: bool) -> None:
    """InvalidArgumentError for options that need the whole mean on every rank: momentum, a codec
    that requires it, and, if the reduce-scatter is compressed, topk."""
    needs = any(i.momentum == "required" or (i.entries and scatters) for i in infos_of(codec))
    if momentum or needs:
        raise InvalidArgumentError(
            f"FSDP2 got codec={codec!r} with momentum={momentum!r}, expected neither onebit nor "
            "topk (which replicas may have, with inner=False), and no momentum: a reduce-scatter "
            "leaves no rank the whole mean; take int8 or int4, or leave optimizer= out"
        )


def _exchange(
    codec: Codec | None,
    group: dist.ProcessGroup,
    sizes: Mapping[str, int],
    purpose: str,
    options: Mapping[str, Any],
) -> GradientExchange:
    return GradientExchange(codec, group, parameters=sizes, purpose=purpose, **options)
