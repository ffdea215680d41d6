"""torch.distributed's all_reduce, reduce_scatter_tensor and all_gather_into_tensor, compressed.

The arguments have torch's order and defaults; `codec` and `name` are keyword-only. All calls with
the same group and codec share a Session, that is, one set of connections."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.arguments import check_kind
from thinwire.codec import codec_info
from thinwire.config import Config
from thinwire.errors import InvalidArgumentError, warn
from thinwire.torch import tensors
from thinwire.torch.exchange import checkpoint, state_file
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.gathered import gather
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.state_file import PathLike
from thinwire.torch.exchange.waiter import Pending
from thinwire.torch.group import Membership, check, resolve


class Work:
    """A collective in flight, with the methods of torch.distributed.Work."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> bool:
        """Block until the tensor holds the result; raise the typed error of a failure. Works may be
        waited for in any order, which may differ between ranks."""
        self._pending.wait()
        return True

    def is_completed(self) -> bool:
        return self._pending.future.done()

    def result(self) -> list[torch.Tensor]:
        """Wait; return a list that holds the tensor with the result, as torch does."""
        self.wait()
        return [self._pending.future.value()]

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that completes after those of the group's earlier calls, or in wait()."""
        return self._pending.future


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str | None = None,
    name: str | None = None,
    strict: bool | None = None,
) -> Work | None:
    """Reduce `tensor` over all ranks of `group`, in place, with the same bits on every rank.

    Args:
        tensor: any shape and strides; float32, bfloat16 or float16, on the CPU or a GPU. On a GPU
            the call is ordered by the current stream, as torch's own is.
        op: torch.distributed.ReduceOp.SUM (default) or AVG.
        group: None for the default group.
        async_op: return a Work at once; do not touch the tensor before its wait().
        codec: a spec such as "int8". None: THINWIRE_CODEC, else "bf16", which is safe without
            error feedback.
        name: equal on all ranks. Calls with the same name share a residual (error feedback, which
            "int4" and lower precisions need), so use one name for one quantity; NamedResiduals
            saves the residuals. None: calls match by order, and no residual is kept.
        strict: raise MismatchError if shapes differ between ranks, even with the same number of
            elements; equal on all ranks. None: THINWIRE_STRICT, else False.

    Returns:
        A Work if `async_op`, else None. A rank outside the group gets a warning and None, as in
        torch.

    Raises:
        InvalidArgumentError: an argument is not valid.
        MismatchError: the ranks' calls differ.
        TimeoutError: a rank did not make the call in time.
        PeerLostError: a rank is lost.
    """
    kind = check_op(op)
    if not _is_member(group, async_op, "all_reduce"):
        return None
    tensors.check_name(name)
    settings = config.resolve(codec=codec_of(codec), strict=strict)
    warn_of_feedback(name, settings.codec)
    members = resolve(group, "all_reduce")
    rank = dist.get_rank(members)
    dtype = tensors.check_reducible(tensor, rank, name)
    settings = dataclasses.replace(settings, device=str(tensor.device))
    session = sessions_of(members).session(members, settings)
    return reduce_on(session, tensor, dtype, kind, name, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str | None = None,
    name: str | None = None,
    strict: bool | None = None,
) -> Work | None:
    """Reduce `input` over all ranks; rank r gets part r of the sum or mean.

    Tensors of every size are compressed. topk is an InvalidArgumentError. The other arguments, the
    return value and the errors are those of all_reduce().

    Args:
        output: contiguous, n elements of the dtype of `input`; the two must not overlap.
        input: any shape, world size * n elements, those for rank 0 first; float32, bfloat16 or
            float16, on the CPU or a GPU.
        name: the residual of the parts for other ranks is kept under this name. This rank's part
            and the result are not compressed.
    """
    kind = check_op(op)
    return _scatter_or_gather(
        "reduce_scatter", output, input, kind, group, async_op, codec, name, strict
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str | None = None,
    name: str | None = None,
    strict: bool | None = None,
) -> Work | None:
    """Gather the inputs of all ranks on every rank, bit-identical on all of them: each rank also
    decodes its own part.

    Tensors of every size are compressed. topk is an InvalidArgumentError. codec="fp32" is exact for
    float32. The other arguments, the return value and the errors are those of all_reduce().

    Args:
        output_tensor: contiguous, world size * n elements of the dtype of `input_tensor`, rank 0's
            first; the two must not overlap.
        input_tensor: any shape, n elements; float32, bfloat16 or float16, on the CPU or a GPU.
    """
    return _scatter_or_gather(
        "all_gather", output_tensor, input_tensor, "sum", group, async_op, codec, name, strict
    )


def codec_of(codec: str | None) -> str:
    """Return the codec of a collective: the argument, else the environment's, else bf16, which is
    safe without error feedback."""
    return config.codec_variable() or "bf16" if codec in (None, "") else codec


def find_op(op: Any) -> str | None:
    """Return "sum" for torch's ReduceOp.SUM, "mean" for AVG, and None for any other."""
    known = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean"}
    # The order matters: `ReduceOp == constant` works for an op from torch's options objects, and
    # `constant == ReduceOp` does not.
    return next((name for known_op, name in known.items() if op == known_op), None)


def check_op(op: Any) -> str:
    """find_op(), or InvalidArgumentError."""
    kind = find_op(op)
    if kind is None:
        raise errors.InvalidArgumentError(
            f"op is {op!r}, expected torch.distributed.ReduceOp.SUM or AVG; the others are "
            "torch.distributed's, which is exact"
        )
    return kind


def warn_of_feedback(name: str | None, codec: str) -> None:
    """Warn if error feedback with this codec diverges without momentum."""
    if name is not None and codec_info(codec).momentum == "required":
        warn(
            f"all_reduce('{name}'): {codec} with error feedback converges on momentum and "
            "diverges on a bare gradient, which State(codec='onebit', momentum=0.9) takes care of"
        )


def reduce_on(
    session: Session, tensor: torch.Tensor, dtype: str, op: str, name: str | None, async_op: bool
) -> Work | None:
    """all_reduce() among a session's ranks, with checked arguments."""
    strict = session.config.strict
    with torch.no_grad():
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if not async_op and name is None and not strict:
            communicator, device, _ = session.connect(flat)
            communicator.all_reduce(flat.data_ptr(), flat.numel(), dtype, op, device.stream())
            _copy_back(flat, tensor)
            return None
        finish = None if flat is tensor else functools.partial(_copy_back, flat, tensor)
        shape = tensors.shape_of([tensor]) if strict else None
        bucket = Bucket(name, flat.numel(), dtype, op=op, shape=shape)
        work = Work(session.start(bucket, flat, finish))
    if async_op:
        return work
    work.wait()
    return None


def exchange_on(
    session: Session, bucket: Bucket, source: torch.Tensor, result: torch.Tensor
) -> Work:
    """Use the bucket once among a session's ranks, with checked tensors. `source` may have any
    strides; `result` is `source` itself in an allreduce, else contiguous."""
    with torch.no_grad():
        flat = source if source.is_contiguous() else source.contiguous()
        if bucket.collective != "all_reduce":
            return Work(session.start(bucket, flat, result=result))
        finish = None if flat is source else functools.partial(_copy_back, flat, source)
        return Work(session.start(bucket, flat, finish))


def _copy_back(source: torch.Tensor, target: torch.Tensor) -> None:
    if source is not target:
        with torch.no_grad():
            target.copy_(source)


def start_on(
    session: Session,
    collective: str,
    source: torch.Tensor,
    target: torch.Tensor,
    dtype: str,
    op: str = "sum",
    name: str | None = None,
) -> Pending:
    """Start a "reduce_scatter" or "all_gather" among a session's ranks, with checked arguments.
    Both tensors are contiguous; the Pending keeps them alive, and its future holds `target`."""
    shape = tensors.shape_of([source]) if session.config.strict else None
    bucket = Bucket(name, source.numel(), dtype, op=op, shape=shape, collective=collective)
    return session.start(bucket, source, result=target)


def _is_member(group: dist.ProcessGroup | None, async_op: object, collective: str) -> bool:
    """Return whether this rank is in the group; warn if it is not."""
    check(group)
    check_kind("async_op", async_op, bool, "True or False")
    if group is not None and dist.is_initialized() and dist.get_rank(group) < 0:
        warn(f"{collective}: this rank is not in the group, so nothing is done")
        return False
    return True


def _scatter_or_gather(
    collective: str,
    output: torch.Tensor,
    source: torch.Tensor,
    op: str,
    group: dist.ProcessGroup | None,
    async_op: bool,
    codec: str | None,
    name: str | None,
    strict: bool | None,
) -> Work | None:
    if not _is_member(group, async_op, collective):
        return None
    tensors.check_name(name)
    members = resolve(group, collective)
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    dtype = tensors.check(source, rank, lambda: name or collective)
    _check_output(collective, output, source, rank, size)
    settings = config.resolve(codec=codec_of(codec), strict=strict)
    settings = dataclasses.replace(settings, device=str(source.device))
    session = sessions_of(members).session(members, settings)
    with torch.no_grad():
        work = Work(start_on(session, collective, source.contiguous(), output, dtype, op, name))
    if async_op:
        return work
    work.wait()
    return None


def _check_output(
    collective: str, output: torch.Tensor, source: torch.Tensor, rank: int, size: int
) -> None:
    tensors.check(output, rank, lambda: f"{collective}'s output")
    scatters = collective == "reduce_scatter"
    whole, part = (source, output) if scatters else (output, source)
    if whole.numel() != size * part.numel() or output.dtype != source.dtype:
        raise errors.InvalidArgumentError(
            f"rank {rank}, {collective}: the input has {source.numel()} elements of "
            f"{source.dtype} and the output {output.numel()} of {output.dtype}; expected one "
            f"dtype, and {size} times as many in the {'in' if scatters else 'out'}put"
        )
    if output.device != source.device or not output.is_contiguous():
        raise errors.InvalidArgumentError(
            f"rank {rank}, {collective}: the output is on {output.device}, "
            f"{'' if output.is_contiguous() else 'not '}contiguous; expected a contiguous tensor "
            f"on {source.device}"
        )


class GroupSessions:
    """The sessions of one process group, and restored residuals of codecs without a session yet."""

    def __init__(self) -> None:
        self._sessions: dict[Config, Session] = {}
        self._restored: dict[str, Residuals] = {}  # by codec

    def session(self, group: dist.ProcessGroup, settings: Config) -> Session:
        """Return the session that all calls with these settings share."""
        if settings not in self._sessions:
            session = Session(Membership(group, "all_reduce"), settings)
            session.close_with(group)
            session.load(self._restored.get(settings.codec, {}), 0)
            self._sessions[settings] = session
        return self._sessions[settings]

    def residuals(self) -> dict[str, Residuals]:
        """Return the residuals of named calls, by codec, including restored ones that were not used
        yet."""
        found = {codec: dict(kept) for codec, kept in self._restored.items()}
        for settings, session in self._sessions.items():
            found.setdefault(settings.codec, {}).update(session.memory())
        return found

    def restore(self, residuals: dict[str, Residuals]) -> None:
        """Replace all residuals. A session that does not exist yet loads those of its codec when it
        is created."""
        self._restored = residuals
        for settings, session in self._sessions.items():
            session.load(residuals.get(settings.codec, {}), 0)


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupSessions] = weakref.WeakKeyDictionary()


def sessions_of(group: dist.ProcessGroup) -> GroupSessions:
    """Return the sessions of the group's collectives in this process."""
    return _sessions.setdefault(group, GroupSessions())


class NamedResiduals:
    """Checkpoints of the residuals of all_reduce(..., name=...) and
    reduce_scatter_tensor(..., name=...) on this rank, of all codecs.

    Load them on all ranks, before the first call or between calls.

    Args:
        group: None for the default group, which must be initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve(group, "NamedResiduals")

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals in the form of State.state_dict(). The key of a residual is the
        codec, a space, and the call's name."""
        flat: Residuals = {
            f"{codec} {name}": memory
            for codec, residuals in sessions_of(self._group).residuals().items()
            for name, memory in residuals.items()
        }
        return checkpoint.pack(flat, "by name", *self._place(), steps=0)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load the state_dict() of this rank, the list of all ranks' dicts, or a
        gathered_state_dict(). InvalidArgumentError if it does not fit."""
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
        """Return the state dicts of all ranks in one, as GradientExchange.gathered_state_dict()."""
        return gather(self.state_dict(), self._group)

    def save(self, path: PathLike) -> None:
        """Write state_dict() to a file, as GradientExchange.save()."""
        state_file.save(self.state_dict(), path)

    def load(self, path: PathLike | Sequence[PathLike]) -> None:
        """Load a file of save(), or the list of all ranks' files, as GradientExchange.load()."""
        self.load_state_dict(state_file.load_all(path))

    def _place(self) -> tuple[int, int]:
        return dist.get_world_size(self._group), dist.get_rank(self._group)
