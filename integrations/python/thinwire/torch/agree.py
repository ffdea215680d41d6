"""Agreement of all ranks of a process group on a few numbers or an object, by torch's collectives;
and check_replicas(), which checks that a model is the same on all ranks. All ranks make each
call."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from thinwire import _library
from thinwire.arguments import as_int, check_kind
from thinwire.comm import poll
from thinwire.errors import Error, MismatchError, PeerLostError, UnavailableError
from thinwire.torch import private
from thinwire.torch.group import TorchStore, resolve

_T = TypeVar("_T")
_Group = dist.ProcessGroup | None  # None: the default group
_ROLL_CALL_S = 2.0


@contextlib.contextmanager
def agreeing(
    on: str, group: _Group, then: str = "recover()", *, together: bool = False
) -> Iterator[None]:
    """Turn torch's errors in the block, which are RuntimeErrors, into a PeerLostError. It names the
    ranks that did not reach the block, or reached it and are lost.

    Args:
        on: what the ranks agree on, for the message.
        group: the ranks.
        then: the call with which the ranks that are left continue, for the message.
        together: wait, up to the group's timeout, until all ranks have reached the block. Without
            it, Gloo ends a process whose collective meets another collective of a peer.
    """
    members = _members(group)
    roll_call = _RollCall(members)
    roll_call.answer("came")
    if together and not roll_call.all_came(private.timeout_of(members) or _COME_S):
        absent = roll_call.absent(wait_s=0)
        roll_call.withdraw()
        raise PeerLostError(
            f"rank {dist.get_rank(members)} waited for the other ranks to agree on {on}, and "
            f"{absent}; make the call on all {dist.get_world_size(members)} "
            "ranks of the group, or raise the timeout of init_process_group()"
        )
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        roll_call.answer("failed")
        raise PeerLostError(
            f"rank {dist.get_rank(members)} could not agree with the other ranks on {on}: expected "
            f"all {dist.get_world_size(members)} ranks of the group, and {roll_call.absent()} "
            f"({error}); make another process group of the ranks that are left, and call {then} "
            "there"
        ) from error


class _RollCall:
    """The marks that ranks set at one agreement in the store of their group, because torch's
    collectives do not tell which rank is lost."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._number = number = _agreements.get(group, 0)
        _agreements[group] = number + 1
        self._store: TorchStore | None = None
        if self._size > 1:
            with contextlib.suppress(UnavailableError):  # this torch's stores cannot be found
                store = private.store_of(group)
                self._store = TorchStore(dist.PrefixStore(f"thinwire/agreeing/{number}", store))

    def answer(self, mark: str) -> None:
        """Set this rank's mark, unless the store is gone."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{mark}/{self._rank}", b"1")

    def withdraw(self) -> None:
        """Leave before the agreement: the next one takes its place, so that ranks which have not
        come to this one meet the others there."""
        _agreements[self._group] = self._number
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.remove(f"came/{self._rank}")

    def all_came(self, timeout_s: float) -> bool:
        """Wait until all ranks have reached the block. Return False after timeout_s seconds."""
        store = self._store
        if store is None:
            return True
        all_here: list[bool] = []
        # A daemon thread, because torch waits without end for a store whose process is stopped.
        wait = threading.Thread(
            target=lambda: all_here.append(self._wait(store, timeout_s)), daemon=True
        )
        wait.start()
        wait.join(timeout_s + _ROLL_CALL_S)
        return bool(all_here) and all_here[0]

    def _wait(self, store: TorchStore, timeout_s: float) -> bool:
        """Rank 0 looks for the marks of all others, which look for one mark of rank 0, so that the
        number of requests grows with the ranks, and not with their square."""
        end = time.monotonic() + timeout_s
        try:
            with private.in_torch():
                for rank in range(1, self._size) if self._rank == 0 else ():
                    poll(store.has, f"came/{rank}", end - time.monotonic())
                if self._rank == 0:
                    store.set("all came", b"1")
                poll(store.has, "all came", end - time.monotonic())
        except (RuntimeError, TimeoutError):
            return False
        return True

    def absent(self, wait_s: float = _ROLL_CALL_S) -> str:
        """Return text that names the ranks without a mark, soon after wait_s seconds."""
        if self._store is None:
            return "no rank is known to be missing"
        said: list[str] = []
        # A daemon thread, because torch waits without end for a store whose process is stopped.
        call = threading.Thread(target=lambda: said.append(self._call(wait_s)), daemon=True)
        call.start()
        call.join(wait_s + _ROLL_CALL_S)
        return said[0] if said else "the process that holds the group's rendezvous store is silent"

    def _call(self, wait_s: float) -> str:
        try:
            with private.in_torch():
                silent = self._without("failed", time.monotonic() + wait_s)
                late = self._without("came", time.monotonic())
        except RuntimeError:
            return "the group's rendezvous store is gone, with the process that held it"
        if late:
            return f"{_ranks(late)} did not come"
        if silent:
            return f"{_ranks(silent)} came, and did not answer again within {wait_s:g} s"
        return "all came and answered again"

    def _without(self, mark: str, end: float) -> list[int]:
        left = list(range(self._size))
        while True:
            left = [rank for rank in left if not self._has(mark, rank)]
            if not left or time.monotonic() >= end:
                return left
            time.sleep(0.02)

    def _has(self, mark: str, rank: int) -> bool:
        return self._store is not None and self._store.has(f"{mark}/{rank}")


_COME_S = 30.0  # for a group whose timeout torch does not tell
_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def mean_of_ranks(values: Sequence[float], group: _Group) -> list[float]:
    world = dist.get_world_size(group)
    return [total / world for total in _reduce(values, dist.ReduceOp.SUM, group)]


def worst_of_ranks(values: Sequence[float], group: _Group) -> list[float]:
    """Return the largest of each value over all ranks."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def from_rank_0(value: _T | None, group: _Group) -> _T:
    """Return the value that the group's first rank passed; it must be picklable."""
    return from_rank(0, value, group)


def from_rank(source: int, value: _T | None, group: _Group) -> _T:
    """Return the value that rank `source` of the group passed; it must be picklable."""
    box = [value]
    dist.broadcast_object_list(box, dist.get_process_group_ranks(group)[source], group=group)
    return box[0]


def tensor_from_rank(source: int, tensor: torch.Tensor, group: _Group) -> torch.Tensor:
    """Return the tensor of rank `source` of the group, on the host. Shape and dtype are the same on
    all ranks."""
    shared = tensor.detach().to(_device(group), copy=True)
    dist.broadcast(shared, dist.get_process_group_ranks(group)[source], group=group)
    return shared.cpu()


def gather_to_rank_0(tensor: torch.Tensor, group: _Group) -> list[torch.Tensor]:
    """Return the tensors of all ranks, on the host, on the group's first rank; [] on the others."""
    shared = tensor.detach().to(_device(group))
    first, world = dist.get_process_group_ranks(_members(group))[0], dist.get_world_size(group)
    mine = dist.get_rank(group) == 0
    values = [torch.empty_like(shared) for _ in range(world)] if mine else None
    dist.gather(shared, values, first, group=group)
    return [value.cpu() for value in values or ()]


def replica_from_rank(
    source: int,
    module: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    group: _Group,
) -> None:
    """Replace parameters, buffers and the optimizer's state by those of rank `source` of the
    group."""
    origin = dist.get_process_group_ranks(group)[source]
    if module is not None:
        with torch.no_grad():
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                own = _without_repeats(tensor.detach())
                shared = own.contiguous()
                dist.broadcast(shared, origin, group=group)
                if not own.is_contiguous():
                    own.copy_(shared)
    if optimizer is not None:
        mine = dist.get_rank(group) == source
        state = from_rank(source, optimizer.state_dict() if mine else None, group)
        if not mine:
            optimizer.load_state_dict(state)


def broadcast_replica(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Replace parameters, buffers and the optimizer's state by those of the group's first rank.

    Args:
        module: the model, which has the same parameters and buffers on all ranks.
        group: the ranks.
        optimizer: its kind, groups and options are the same on all ranks.
        options: further values, by name, that are the same on all ranks.

    Raises:
        MismatchError: on every rank, if something differs that must be the same.
        PeerLostError: a rank was lost, or did not make the call.
    """
    facts = _facts_of_model(module) | _facts_of_optimizer(module, optimizer)
    facts |= {name: repr(value) for name, value in (options or {}).items()}
    with agreeing("the same replica", group, "compress()", together=True):
        check_alike("compress", facts, group)
        replica_from_rank(0, module, None, group)
        if optimizer is not None and not _is_sharded(optimizer):
            state = {"state": _digest_of_state(optimizer)}
            if len(set(_gather_bytes(_hash(state), group))) > 1:
                replica_from_rank(0, None, optimizer, group)


def _facts_of_model(module: torch.nn.Module) -> dict[str, str]:
    """Return the facts about a model that are equal on all ranks, by name, in the order of the
    broadcasts."""
    facts = {}
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        facts[f"parameter '{private.plain_name(name)}'"] = f"{kind} {_form(parameter)}"
    for name, buffer in module.named_buffers():
        facts[f"buffer '{private.plain_name(name)}'"] = _form(buffer)
    return facts


def _facts_of_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, str]:
    """Return the optimizer's kind, and the options of its groups that change results."""
    if optimizer is None:
        return {"optimizer": "None"}
    facts = {"optimizer": type(optimizer).__name__}
    names = {p: private.plain_name(name) for name, p in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        members = ", ".join(names.get(parameter, "?") for parameter in group["params"])
        facts[f"optimizer group {number}"] = members
        for option, value in group.items():
            if option != "params" and option not in _HOW and _has_value(value):
                facts[f"optimizer group {number} {option}"] = _text(value)
    return facts


# Options of torch's optimizers that choose an implementation of a step, and not its result.
_HOW = {"foreach", "fused", "capturable", "differentiable"}


def check_alike(call: str, facts: Mapping[str, str], group: _Group) -> None:
    """Raise a MismatchError on every rank, for the first fact that differs between ranks.

    Args:
        call: the user's call, for the message.
        facts: values by name. Equal ones cost 16 bytes per rank.
        group: the ranks; all of them make the call.
    """
    if len(set(_gather_bytes(_hash(facts), group))) == 1:
        return
    of_ranks: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, dict(facts), group=group)
    expected, mine = of_ranks[0], dist.get_rank(group)
    for rank, found in enumerate(of_ranks):
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                raise MismatchError(
                    f"rank {mine}: {call} got {name} {found.get(name, 'missing')} on rank {rank}, "
                    f"expected {expected.get(name, 'missing')} as on rank 0; make the same model "
                    "and optimizer, and pass the same options, on every rank"
                )
        if list(expected) != list(found):
            raise MismatchError(
                f"rank {mine}: {call} got {_first_apart(found, expected)} on rank {rank}, expected "
                f"{_first_apart(expected, found)} there as on rank 0; make modules in the same "
                "order on every rank"
            )


def _first_apart(names: Mapping[str, str], others: Mapping[str, str]) -> str:
    return next(a for a, b in zip(names, others, strict=True) if a != b)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _text(value: object) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _has_value(value: object) -> bool:
    """Return whether equal values have equal texts. The text of a function has its address."""
    if isinstance(value, (list, tuple)):
        return all(map(_has_value, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor))


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank has another part of the state."""
    return "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}


def _digest_of_state(optimizer: torch.optim.Optimizer) -> str:
    """Return text that is equal if the state of all parameters is, bit for bit."""
    parts = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                known = digest(value) if isinstance(value, torch.Tensor) else _text(value)
                parts.append(f"{name}: {known}")
            parts.append("")
    return "\n".join(parts)


def _hash(facts: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=16).digest()


def _gather_bytes(mine: bytes, group: _Group) -> list[bytes]:
    """Return the bytes of all ranks, by rank; every rank has the same number of them."""
    shared = torch.tensor(list(mine), dtype=torch.uint8, device=_device(group))
    values = [torch.empty_like(shared) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, shared, group=group)
    return [bytes(value.tolist()) for value in values]


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repeated elements of an expanded tensor."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _members(group: _Group) -> dist.ProcessGroup:
    return group or dist.group.WORLD


def _device(group: _Group) -> str:
    """Return the device that the group's collectives require tensors on."""
    return "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"


def _reduce(values: Sequence[float], op: dist.ReduceOp, group: _Group) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64, device=_device(group))
    dist.all_reduce(shared, op=op, group=group)
    return shared.tolist()


def check_replicas(
    module: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    step: int | None = None,
) -> None:
    """Check that each parameter has the same bits on all ranks, by comparing digests. All ranks
    call it. Means are bit-identical on all ranks, but an optimizer may still update parameters
    differently; this call finds that.

    Args:
        module: its parameters may have any dtype and device; those on a GPU are copied to the host.
        group: torch's group; None: the default group.
        step: the step number, for the message.

    Raises:
        MismatchError: on every rank. It names the first parameter that differs, and the ranks whose
            bits are not those of most ranks.
    """
    check_kind("module", module, torch.nn.Module, "a torch.nn.Module")
    if step is not None:
        step = as_int("step", step, 0)
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
    """Return a 64-bit hash of the tensor's values: schedule/hash.h."""
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
