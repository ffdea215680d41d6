"""reduce_scatter_tensor and all_gather_into_tensor: those of torch.distributed, compressed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.torch import tensors
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.waiter import Pending
from thinwire.torch.functional import Work, kind_of
from thinwire.torch.group import resolve
from thinwire.torch.sessions import sessions_of


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: str | Any = "mean",
    codec: str | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank its own part of the mean or sum of all ranks' inputs.

    output: contiguous, n elements of the dtype of `input`. input: any shape, world size * n
      elements, those for rank 0 first; float32, bfloat16 or float16, on the CPU or a GPU. The two
      must not overlap.
    op, codec, name, group, async_op: as in all_reduce; not with topk. What compression loses of
      the parts for other ranks is carried on under `name`; the own part and the result lose
      nothing.

    Every size is compressed. Raises InvalidArgumentError, MismatchError, TimeoutError or
    PeerLostError."""
    return _run("reduce_scatter", output, input, kind_of(op), codec, name, group, async_op)


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    codec: str | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank the inputs of all ranks, with the same bits everywhere: the own part is what
    the others decode as well.

    output: contiguous, world size * n elements of the dtype of `input`, rank 0's first. input: any
      shape, n elements; float32, bfloat16 or float16, on the CPU or a GPU. The two must not
      overlap.
    codec, name, group, async_op: as in all_reduce; not with topk. codec="fp32" is exact for
      float32, and int8 keeps 8 bits of an element.

    Every size is compressed. Raises as reduce_scatter_tensor."""
    return _run("all_gather", output, input, "sum", codec, name, group, async_op)


def _run(
    collective: str,
    output: torch.Tensor,
    source: torch.Tensor,
    op: str,
    codec: str | None,
    name: str | None,
    group: dist.ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    tensors.check_name(name)
    members = resolve(group, collective)
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    dtype = tensors.check(source, rank, lambda: name or collective)
    _check_output(collective, output, source, rank, size)
    settings = dataclasses.replace(config.resolve(codec=codec), device=str(source.device))
    session = sessions_of(members).session(members, settings)
    with torch.no_grad():
        flat = source.contiguous()
        pending = start_on(session, collective, flat, output, dtype, op, name)
    work = Work(pending)
    if async_op:
        return work
    work.wait()
    return None


def start_on(
    session: Session,
    collective: str,
    source: torch.Tensor,
    target: torch.Tensor,
    dtype: str,
    op: str = "sum",
    name: str | None = None,
) -> Pending:
    """One of the two on a session's ranks, of arguments that were checked: a future of `target`.
    Both tensors are contiguous, and live until then."""
    communicator, device, waiter = session.connect(source)
    shape = tensors.shape_of([source]) if session.config.strict else None
    bucket = communicator.bucket(
        source.numel(), dtype, op, name, collective=collective, shape=shape
    )
    work = bucket.start(source.data_ptr(), target.data_ptr(), device.stream())
    return waiter.add(work, target, functools.partial(_outlive, source))


def _outlive(_source: torch.Tensor) -> None:
    """A partial of this keeps its tensor alive until it is called."""


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
