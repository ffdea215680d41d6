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
    if name is not None and codec_info(settings.codec).momentum == "required":
        warn(
            f"all_reduce('{name}'): {settings.codec} with error feedback converges on momentum and "
            "diverges on a bare gradient, which State(codec='onebit', momentum=0.9) takes care of"
        )
    members = resolve(group, "all_reduce")
    dtype = tensors.check(tensor, dist.get_rank(members), lambda: name or "all_reduce")
    tensors.check_writable(tensor, dist.get_rank(members), name or "all_reduce")
    settings = dataclasses.replace(settings, device=str(tensor.device))
    session = sessions_of(members).session(members, settings)
    with torch.no_grad():
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if not async_op and name is None and not settings.strict:
            _reduce(session, flat, dtype, kind)
            _copy_back(flat, tensor)
            return None
        finish = None if flat is tensor else functools.partial(_copy_back, flat, tensor)
        shape = tensors.shape_of([tensor]) if settings.strict else None
        bucket = Bucket(name, flat.numel(), dtype, op=kind, shape=shape)
        work = Work(session.start(bucket, flat, finish))
    if async_op:
        return work
    work.wait()
    return None


def _reduce(session: Session, tensor: torch.Tensor, dtype: str, op: str) -> None:
    """Reduces a contiguous tensor in place, unnamed, on the calling thread."""
    communicator, device, _ = session.connect(tensor)
    address = tensor.data_ptr()
    communicator.all_reduce(address, tensor.numel(), dtype, op, device.stream())


def _copy_back(source: torch.Tensor, target: torch.Tensor) -> None:
    if source is not target:
        with torch.no_grad():
            target.copy_(source)


def kind_of(op: Any) -> str:
    """ "mean" or "sum", of either or of torch's ReduceOp. InvalidArgumentError for any other."""
    known = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean"}
    if isinstance(op, str):
        kind = op if op in OPS else None
    else:
        kind = next((name for known_op, name in known.items() if known_op == op), None)
    if kind is None:
        raise errors.InvalidArgumentError(f"op is {op!r}, expected 'mean' or 'sum'")
    return kind
