"""check_replicas: whether the parameters of a model have the same bits on every rank."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from thinwire import _library
from thinwire.arguments import check_kind
from thinwire.errors import MismatchError
from thinwire.torch.group import resolve


def check_replicas(
    module: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    step: int | None = None,
) -> None:
    """Compares a digest of each parameter between all ranks of `group` (None: the default group),
    each of which makes this call. Means that are the same on every rank say nothing of what an
    optimizer makes of them, and this does.

    module: its parameters may have any dtype and device; those on a GPU are copied to the host.
    step: for the message. MismatchError, on every rank, names the first parameter that differs, and
    the ranks whose bits are not those of most ranks."""
    check_kind("module", module, torch.nn.Module, "a torch.nn.Module")
    members = resolve(group, "check_replicas")
    names = [name for name, _ in module.named_parameters()]
    mine = [digest(parameter) for parameter in module.parameters()]
    digests: list[tuple[list[str], list[int]] | None] = [None] * dist.get_world_size(members)
    dist.all_gather_object(digests, (names, mine), group=members)
    when = "" if step is None else f", step {step}"
    for rank, (theirs, _) in enumerate(digests):
        if theirs != digests[0][0]:
            raise MismatchError(
                f"check_replicas{when}: rank {rank} has parameters {theirs}, expected "
                f"{digests[0][0]} as on rank 0; make the same model on every rank"
            )
    for index, name in enumerate(names):
        _judge(name, when, [of_rank[index] for _, of_rank in digests])


def digest(tensor: torch.Tensor) -> int:
    """64 bits of the tensor's values: schedule/digest.h."""
    host = tensor.detach().cpu().contiguous()
    return _library.load().tw_digest(host.data_ptr(), host.numel() * host.element_size())


def _judge(name: str, when: str, digests: list[int]) -> None:
    expected, _ = Counter(digests).most_common(1)[0]
    others = [
        f"rank {rank} has digest {got:016x}" for rank, got in enumerate(digests) if got != expected
    ]
    if others:
        raise MismatchError(
            f"parameter '{name}'{when}: replicas have diverged, {', '.join(others)}, expected "
            f"{expected:016x} as on rank {digests.index(expected)}; step every rank's optimizer "
            "alike (same options, same random seeds), or go back to a checkpoint"
        )
