"""all_reduce: torch.distributed.all_reduce, compressed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.codec import codec_info
from thinwire.comm import OPS
from thinwire.torch import tensors
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.waiter import Pending
from thinwire.torch.group import check, resolve
from thinwire.torch.sessions import sessions_of
from thinwire.warn import warn


class Work:
    """An all_reduce in flight."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> bool:
        """Blocks until the tensor holds the result; raises the typed error of a failure. Works may
        be waited for in any order, which ranks may differ in."""
        self._pending.wait()
        return True

    def is_completed(self) -> bool:
        return self._pending.future.done()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Completes after those of the group's earlier calls, or when wait() is called."""
        return self._pending.future


def all_reduce(
    tensor: torch.Tensor,
    op: str | Any = "mean",
    codec: str | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    strict: bool | None = None,
) -> Work | None:
    """Reduces `tensor` over all ranks of `group`, in place, with the same bits on every rank.

    tensor: any shape and strides; float32, bfloat16 or float16, on the CPU or a GPU. On a GPU the
      call is ordered by the current stream, as torch's own is.
    op: "mean" (default) or "sum"; torch's ReduceOp.AVG and ReduceOp.SUM are taken as well.
    codec: a single one as State takes it. All calls of one group and codec share connections.
    name: equal on all ranks; calls of one name carry what compression lost to the next (error
      feedback), so use one name for one quantity; NamedResiduals saves it. None: calls match by
      order, and lose it.
    group: None for the default group.
    async_op: returns a Work at once; do not touch the tensor before its wait().
    strict: ranks with another shape of as many elements are a MismatchError, too; equal on all
      ranks. None: THINWIRE_STRICT, else False.

    The calling rank must be in the group; else, as in torch, a warning and None. Raises
    InvalidArgumentError, MismatchError, TimeoutError or PeerLostError."""
    kind = kind_of(op)
    check(group)
    if group is not None and dist.is_initialized() and dist.get_rank(group) < 0:
        warn("all_reduce: this rank is not in the group, so nothing is done")
        return None
    tensors.check_name(name)
    settings = config.resolve(codec=codec, strict=strict)
    warn_of_feedback(name, settings.codec)
    members = resolve(group, "all_reduce")
    rank = dist.get_rank(members)
    dtype = tensors.check_reducible(tensor, rank, name)
    settings = dataclasses.replace(settings, device=str(tensor.device))
    session = sessions_of(members).session(members, settings)
    return reduce_on(session, tensor, dtype, kind, name, async_op)


def reduce_on(
    session: Session, tensor: torch.Tensor, dtype: str, op: str, name: str | None, async_op: bool
) -> Work | None:
    """all_reduce() on a session's ranks, of arguments that were checked."""
    strict = session.config.strict
    with torch.no_grad():
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if not async_op and name is None and not strict:
            _reduce(session, flat, dtype, op)
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


def warn_of_feedback(name: str | None, codec: str) -> None:
    """Warns of a codec that is not to be fed back without momentum."""
    if name is not None and codec_info(codec).momentum == "required":
        warn(
            f"all_reduce('{name}'): {codec} with error feedback converges on momentum and "
            "diverges on a bare gradient, which State(codec='onebit', momentum=0.9) takes care of"
        )


def _reduce(session: Session, tensor: torch.Tensor, dtype: str, op: str) -> None:
    """Reduces a contiguous tensor in place, unnamed, on the calling thread."""
    communicator, device, _ = session.connect(tensor)
    address = tensor.data_ptr()
    communicator.all_reduce(address, tensor.numel(), dtype, op, device.stream())


def _copy_back(source: torch.Tensor, target: torch.Tensor) -> None:
    if source is not target:
        with torch.no_grad():
            target.copy_(source)


def find_kind(op: Any) -> str | None:
    """ "mean" or "sum", of either or of torch's ReduceOp; None of any other."""
    if isinstance(op, str):
        return op if op in OPS else None
    known = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean"}
    # A ReduceOp of torch's options equals a constant, but no constant equals it.
    return next((name for known_op, name in known.items() if op == known_op), None)


def kind_of(op: Any) -> str:
    """As find_kind(); InvalidArgumentError of any other."""
    kind = find_kind(op)
    if kind is None:
        raise errors.InvalidArgumentError(f"op is {op!r}, expected 'mean' or 'sum'")
    return kind
