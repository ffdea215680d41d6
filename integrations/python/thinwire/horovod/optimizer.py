"""DistributedOptimizer with Horovod's arguments and semantics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import as_int, check_kind, plain, wrong
from thinwire.horovod.compression import Compression, Compressor, check_compression
from thinwire.horovod.ops import Average, Op, Sum, check_factor, op_of
from thinwire.horovod.reducing_optimizer import ReducingOptimizer
from thinwire.horovod.world import current, global_process_set, group_for, members_of
from thinwire.torch import private
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.optimizer import checks


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> ReducingOptimizer:
    """Wrap an optimizer, so that it steps with the means of all ranks' gradients.

    Gradients are sent while backward() computes others; step() waits for all. Parameters are not
    broadcast: call broadcast_parameters() and broadcast_optimizer_state(). backward() and step()
    raise typed errors; after one, every later use raises it again.

    Args:
        optimizer: any torch optimizer but LBFGS.
        named_parameters: model.named_parameters(), with names that are equal on all ranks, which
            rules and residuals use. None: parameters are numbered.
        compression: Compression.none (default), .int4, .thinwire({...}, min_bytes=...), ...
        backward_passes_per_step: gradients are accumulated over this many passes, and sent in the
            last one.
        op: Average, or Sum.
        gradient_predivide_factor: only checked. It keeps Horovod's float16 sums from overflowing;
            sums here are in fp32, so the mean does not depend on it.
        num_groups, groups: only checked. They choose the gradients that Horovod fuses; thinwire
            merges neighbours by itself.
        sparse_as_dense: make gradients of sparse embeddings dense before they are sent; otherwise
            they are an InvalidArgumentError.
        process_set: the ranks whose gradients are reduced; on other ranks the optimizer steps with
            its own gradients.

    Returns:
        A ReducingOptimizer that is also an instance of the wrapped optimizer's class.

    Raises:
        InvalidArgumentError: an argument is not valid, or the optimizer is LBFGS.
        UnavailableError: op=Adasum.

    The first step raises MismatchError on every rank if op, named_parameters or
    backward_passes_per_step differ between ranks, or if a rank waits in a broadcast, gather or
    barrier that the others have not made.
    """
    check_kind("optimizer", optimizer, Optimizer, "one of torch.optim")
    if isinstance(optimizer, ReducingOptimizer):
        raise wrong("optimizer", optimizer, "one that DistributedOptimizer has not wrapped already")
    checks.check_optimizer(optimizer)
    check_compression(compression)
    backward_passes_per_step = as_int("backward_passes_per_step", backward_passes_per_step, 1)
    kind = op_of(op)
    if kind not in (Average, Sum):
        raise wrong("op", op, "Average or Sum, as of gradients")
    check_factor("gradient_predivide_factor", gradient_predivide_factor)
    if gradient_predivide_factor <= 0 or (kind is Sum and gradient_predivide_factor != 1):
        raise wrong(
            "gradient_predivide_factor", gradient_predivide_factor,
            "a factor above 0, and 1 with op=Sum",
        )  # fmt: skip
    as_int("num_groups", num_groups, 0)
    check_kind(
        "groups", plain(groups), (list, int, type(None)), "a number, lists of parameters or None"
    )
    check_kind("sparse_as_dense", sparse_as_dense, bool, "True or False")
    group = group_for(process_set)
    names = _names_of(optimizer, named_parameters)
    exchange = GradientExchange(
        compression.codec, group, purpose="horovod",
        parameters={name: p.numel() for p, name in names.items()},
        **{"policy": "wfbp", **compression.options},
    )  # fmt: skip
    # Name and bases, so that the wrapped class is seen by isinstance() and by its name.
    cls = type(type(optimizer).__name__, (ReducingOptimizer, type(optimizer)), {})
    members = None if group is current().alone else members_of(process_set)
    return cls(optimizer, names, exchange, kind, backward_passes_per_step, sparse_as_dense, members)


def _names_of(
    optimizer: Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the optimizer's trained parameters with their names, in the order of the names."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if named is None:
        return {p: f"parameter {number}" for number, p in enumerate(trained)}
    expected = "pairs of a name and a parameter, such as model.named_parameters()"
    if isinstance(named, (str, bytes, Mapping)) or not isinstance(named, Iterable):
        raise wrong("named_parameters", named, expected)
    names: dict[torch.Tensor, str] = {}
    for pair in named:
        pair_like = isinstance(pair, tuple) and len(pair) == 2
        if not (pair_like and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise wrong("named_parameters", pair, expected)
        names[pair[1]] = private.plain_name(pair[0])
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise wrong("named_parameters", twice, "names of one parameter each")
    without = [tuple(p.shape) for p in trained if p not in names]
    if without:
        raise errors.InvalidArgumentError(
            f"named_parameters has no name for {len(without)} of the optimizer's parameters, of "
            f"shape {without[0]} for one; pass model.named_parameters() of the whole model"
        )
    ours = set(trained)
    return {p: name for p, name in names.items() if p in ours}
