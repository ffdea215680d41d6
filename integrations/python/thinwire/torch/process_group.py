"""ProcessGroup: a torch process group over Gloo that compresses exchanges of gradients.

import thinwire.torch.backend
torch.distributed.init_process_group("thinwire")        # or:
group = ProcessGroup("int4")
group.configure("host:29500/epoch-1", rank, world_size)  # again after ranks were lost"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import logging
import secrets
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.arguments import wrong
from thinwire.codec import codec_info
from thinwire.config import Config
from thinwire.options import SCOPES
from thinwire.torch import collectives, private, tensors
from thinwire.torch.communicator import open_session, place_of
from thinwire.torch.exchange.session import Session
from thinwire.torch.fsdp.gather import GroupGather, check_gather, settings_of_gather
from thinwire.torch.fsdp.residuals import SHARE, memory_of_gpu, memory_of_host
from thinwire.torch.sequence import GradientSequence, Kind
from thinwire.torch.works import (
    CompressedWork,
    DoneWork,
    GatherWork,
    GlooWork,
    Kept,
    as_torchs,
    typed_error,
)

__all__ = ["ProcessGroup"]

_log = logging.getLogger("thinwire")
_MIN_BYTES = 65536  # the default of tw_options
_GLOO_TIMEOUT_S = 1800.0  # torch's default


class _Account:
    """Counts the exchanges of a group, and logs the counts in one line when the group ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.counts: Counter[str] = Counter()  # exchanges and bytes, compressed and exact

    def add(self, kind: str, bytes_: int) -> None:
        self.counts[kind] += 1
        self.counts[f"{kind}_bytes"] += bytes_

    def report(self) -> None:
        """Log the counts; later calls log nothing."""
        counts, self.counts = self.counts, Counter()
        if counts:
            _log.info(
                "%s: compressed %d exchanges of %.1f MB; exact %d of %.1f MB", self._name,
                counts["compressed"], counts["compressed_bytes"] / 1e6, counts["exact"],
                counts["exact_bytes"] / 1e6,
            )  # fmt: skip


class ProcessGroup(dist.ProcessGroup):
    """A process group that compresses exchanges of gradients during backward(), with error
    feedback. All other collectives are exact and run on Gloo.

    It compresses allreduces and reduce-scatters by SUM or AVG of more than `min_bytes` of float32,
    bfloat16 or float16. A residual belongs to an exchange's place since the last step of an
    optimizer (sequence.GradientSequence). Residuals take at most 1/8 of the available memory;
    exchanges beyond that are sent in bf16. With `gather` FSDP2's gathers of parameters are
    compressed, too (fsdp.gather.GroupGather).

    Call configure() before the first collective, and again after a failure, which drops the
    residuals.

    Args:
        codec: a spec such as "int8". None: THINWIRE_CODEC, else "int4". A codec that requires
            momentum is an error, because a group has no momentum.
        scope: "backward"; or "all", which also compresses every other sum and mean of floats,
            without feedback, with bf16 unless a codec is named. None: THINWIRE_SCOPE, else
            "backward". Equal on all ranks.
        gather: a codec such as "int4": FSDP2's forward passes gather the changes of parameters
            with it, and its backward passes gather nothing, as with compress(gather=). Each rank
            keeps a copy of the unsharded parameters in at most 1/8 of the available memory;
            parameters beyond that are gathered exactly. None: THINWIRE_GATHER, else all parameters
            are gathered exactly. Equal on all ranks.
        options: as Communicator takes them.

    Raises:
        InvalidArgumentError: an argument is not valid.
    """

    def __init__(
        self,
        codec: str | None = None,
        *,
        scope: str | None = None,
        gather: str | None = None,
        **options: Any,
    ) -> None:
        self._settings = _settings_of(codec, scope, gather, options)
        super().__init__(0, 1)  # torch never changes these; rank() and size() return the real ones
        self._name = self._description = ""
        self._place: tuple[int, int] | None = None  # while torch waits for reconfigure()
        self._gloo: dist.ProcessGroup | None = None
        self._session: Session | None = None
        self._sequence: GradientSequence | None = None
        self._gather: GroupGather | None = None
        self._shadow: object | None = None
        self._failure: errors.Error | None = None  # the first of Gloo's collectives
        self._kept = Kept()
        self._meeting: tuple[str, dist.TCPStore] | None = None  # this rank's handle and its store
        self._account = _Account("process group")
        weakref.finalize(self, self._account.report)

    def configure(
        self, store_addr: str, rank: int, world_size: int, timeout: datetime.timedelta | None = None
    ) -> None:
        """Connect to `world_size` ranks, in place of the former ones, whose pending works fail.
        Blocks until all ranks have called it.

        Args:
            store_addr: "host:port/prefix" of a torch TCPStore's server; a new prefix for each call.
            rank: this rank's number, from 0.
            world_size: the number of ranks.
            timeout: deadline of connecting, and of Gloo's collectives; None: timeout_s, else
                torch's.

        Raises:
            InvalidArgumentError: an argument is not valid.
            UnavailableError: there is no store at the address.
            TimeoutError: some ranks did not call it in time.
        """
        rank, world_size = place_of(rank, world_size)
        host, port, prefix = _parse(store_addr)
        self.abort()
        seconds = self._settings.timeout_s or _GLOO_TIMEOUT_S
        timeout = timeout or datetime.timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(
                host, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            self.connect(dist.PrefixStore(prefix, store), rank, world_size, timeout)
        except dist.DistStoreError as error:
            raise errors.TimeoutError(
                f"rank {rank} of {world_size}: not all ranks came to {store_addr} within "
                f"{timeout.total_seconds():.0f} s ({error}); call configure on all of them"
            ) from error
        except dist.DistNetworkError as error:
            raise errors.UnavailableError(
                f"rank {rank} of {world_size}: no store answers at {store_addr} ({error}); start a "
                "torch.distributed.TCPStore(is_master=True) there"
            ) from error

    def connect(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        """configure() with an existing store; the backend calls it. timeout: of Gloo's collectives,
        and of compressed exchanges unless timeout_s or THINWIRE_TIMEOUT_S is set."""
        seconds = self._settings.timeout_s or timeout.total_seconds()
        settings = dataclasses.replace(self._settings, timeout_s=seconds)
        self._session = open_session(store, rank, size, "process group", settings)
        self._session.close_with(self)
        self._place = None
        self._sequence = GradientSequence(self._session, self._residual_bytes)
        if settings.gather:
            gathering = settings_of_gather(dataclasses.replace(settings, codec=settings.gather))
            gathers = open_session(store, rank, size, "process group gather", gathering)
            gathers.close_with(self)
            self._gather = GroupGather(gathers, self._least_bytes(), self._residual_bytes)
        self._gloo, self._failure = private.gloo_group(store, rank, size, timeout), None
        private.share_backend(self._gloo, self)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of Gloo's later collectives, and, after the next configure(), that of
        compressed exchanges."""
        self._settings = dataclasses.replace(self._settings, timeout_s=timeout.total_seconds())
        if self._gloo is not None:
            self._gloo.set_timeout(timeout)

    @property
    def supports_reconfigure(self) -> bool:
        """True: reconfigure(), which torch 2.14 and newer use, is supported."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this process, which the other ranks pass to reconfigure(): a token
        and the address of a store in this process where ranks can meet."""
        if self._meeting is None:
            store = dist.TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
            self._meeting = f"{secrets.token_hex(8)}@{store.host}:{store.port}", store
        return self._meeting[0]

    def reconfigure(self, opts: Any) -> dist.Work:
        """Connect to the ranks of `opts.handles` in place of the former ones, as configure() does.
        They may be the same, more, fewer or other ranks. Blocks until all ranks have called it.

        Args:
            opts: torch's ReconfigureOptions. opts.handles: the handles of all ranks, as a list in
                rank order, or as a set, which is sorted as text. opts.uuid: a new number each time.

        Returns:
            A completed Work.

        Raises:
            InvalidArgumentError: this process's handle is missing.
            TimeoutError: some ranks did not call it in time.
            UnavailableError: the store of the first handle does not answer.
        """
        mine = self.get_reconfigure_handle()
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if mine not in handles or len(set(handles)) != len(handles):
            raise wrong("handles", opts.handles, f"different ones, and {mine!r} among them")
        _, _, address = handles[0].partition("@")
        prefix = f"{address}/reconfigure {opts.uuid}"
        self.configure(prefix, handles.index(mine), len(handles), opts.timeout)
        return DoneWork(self._kept)

    def _joined(self) -> tuple[Session, dist.ProcessGroup]:
        if self._session is None or self._gloo is None:
            raise errors.InvalidArgumentError(
                "this process group has no ranks yet, or was shut down; call configure() first"
            )
        return self._session, self._gloo

    def _residual_bytes(self, on_gpu: bool) -> int:
        """Return the bytes that residuals may take on every rank: a share of the available memory
        on the rank with the least. All ranks call it in their first compressed exchange."""
        session, gloo = self._joined()
        machine, free = memory_of_gpu() if on_gpu else memory_of_host()
        where = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:7], "big")
        ranks = [torch.zeros(2, dtype=torch.int64) for _ in range(session.size)]
        gloo.allgather([ranks], [torch.tensor([where, free])]).wait()
        sharers = Counter(int(rank[0]) for rank in ranks)
        return min(int(rank[1]) // sharers[int(rank[0])] for rank in ranks) // SHARE

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor] | torch.Tensor,
        opts: Any = dist.ReduceOp.SUM,
        timeout: datetime.timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """torch's allreduce. opts: AllreduceOptions or a ReduceOp, which may also be passed as
        `op`. A timeout applies to Gloo; compressed exchanges use the group's."""
        opts = opts if op is None else op
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if len(given) == 1 and self._compresses(given, getattr(opts, "reduceOp", opts)):
            return self._compress("allreduce", given, given, getattr(opts, "reduceOp", opts))
        timeouts = () if timeout is None else (timeout,)
        return self._by_gloo("allreduce", given, opts, *timeouts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """torch's allreduce_coalesced: an allreduce of each tensor; all have the same dtype."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        if self._compresses(tensors, opts.reduceOp):
            return self._compress("allreduce", tensors, tensors, opts.reduceOp)
        return self._by_gloo("allreduce_coalesced", tensors, opts)

    def _scatter(
        self, collective: str, output: torch.Tensor, source: torch.Tensor, *options: Any
    ) -> dist.Work:
        op = getattr(options[0], "reduceOp", options[0]) if options else dist.ReduceOp.SUM
        if self._compresses([source], op, output):
            return self._compress("reduce_scatter", [source], [output], op)
        return self._by_gloo(collective, output, source, *options)

    def _compresses(
        self, given: Sequence[object], op: Any, output: torch.Tensor | None = None
    ) -> bool:
        """Return whether an exchange of these tensors is compressed. In a correct program the
        result is the same on all ranks."""
        session, _ = self._joined()
        settings, least = session.config, self._least_bytes()
        if collectives.find_op(op) is None or not given or not all(map(_is_float, given)):
            return False
        if len({each.dtype for each in given}) > 1:
            return False
        if any(_bytes(each) * (session.size - 1) <= least for each in given):
            return False
        if output is not None:
            fits = output.numel() * session.size == given[0].numel()
            alike = output.dtype == given[0].dtype and output.is_contiguous()
            if not fits or not alike or codec_info(settings.codec.split(";")[0]).entries:
                return False
        return settings.scope == "all" or self._in_backward()

    def _least_bytes(self) -> int:
        """Return the limit up to which bytes * (ranks - 1) of a tensor is exchanged exactly."""
        least = self._settings.min_bytes
        return _MIN_BYTES if least is None else least

    def _all_gather(
        self, collective: str, output: torch.Tensor, source: torch.Tensor, *options: Any
    ) -> dist.Work:
        self._joined()
        if self._gather is not None:
            try:
                finish = self._gather.start(output, source)
            except errors.InvalidArgumentError:
                raise
            except errors.Error as error:
                raise as_torchs(self._gather.session.fail(error)) from None
            if finish is not None:
                return GatherWork(finish, self._kept)
        return self._by_gloo(collective, output, source, *options)

    def _in_backward(self) -> bool:
        if private.reduces_gradients():
            return True
        shadow = private.shadowed_backward()
        if shadow is not None and shadow is not self._shadow:
            self._shadow = shadow
            self._sequence.end_step()
        return shadow is not None

    def _compress(
        self, collective: str, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        op: Any,
    ) -> dist.Work:  # fmt: skip
        session, _ = self._joined()
        find = self._sequence.next if self._in_backward() else self._sequence.plain
        works = []
        try:
            for source, result in zip(given, results, strict=True):
                name = "all_reduce" if collective == "allreduce" else collective
                dtype = tensors.DTYPES[source.dtype]
                kind = Kind(name, collectives.find_op(op), dtype, source.numel(), source.is_cuda)
                bucket = find(kind)
                works.append(collectives.exchange_on(session, bucket, source, result))
                over = functools.partial(self._sequence.give_back, kind, bucket)
                works[-1].get_future().add_done_callback(lambda _, over=over: over())
                self._account.add("compressed", _bytes(source))
        except errors.InvalidArgumentError:
            raise
        except errors.Error as error:
            raise as_torchs(session.fail(error)) from None
        return CompressedWork(works, list(results), self._kept)

    def _by_gloo(self, collective: str, *arguments: Any, **options: Any) -> Any:
        session, gloo = self._joined()

        def typed(error: Exception) -> errors.Error:
            self._failure = self._failure or typed_error(session.rank, collective, error)
            return self._failure

        if collective == "barrier":
            session.wait_idle()  # as Gloo's barrier waits for earlier collectives
        try:
            try:
                made = getattr(gloo, collective)(*arguments, **options)
            except NotImplementedError:  # without a tensor torch finds no backend; Gloo says why
                made = getattr(private.gloo_of(gloo), collective)(*arguments, **options)
        except RuntimeError as error:
            if type(typed_error(session.rank, collective, error)) is errors.Error:
                raise  # Gloo refuses the arguments; the group goes on
            raise as_torchs(typed(error)) from None  # a peer was lost earlier
        if collective.startswith(("allreduce", "reduce_scatter")):
            self._account.add("exact", _bytes_of(arguments[-2] if arguments[1:] else arguments[0]))
        # Only Gloo's own work of a recv_anysource() knows the source rank.
        bare = collective == "recv_anysource" or not isinstance(made, dist.Work)
        return made if bare else GlooWork(made, typed, self._kept)

    def errored(self) -> errors.Error | None:
        """Return the first failure, which configure() clears; None if there was none."""
        found = [self._failure, *(session.error for session in self._sessions())]
        return next((error for error in found if error is not None), None)

    def _sessions(self) -> list[Session]:
        gathers = None if self._gather is None else self._gather.session
        return [each for each in (self._session, gathers) if each is not None]

    def stats(self) -> dict[str, Any]:
        """Return counters since the last configure().

        Returns:
            The dict of State.stats() for compressed exchanges, with these keys added: compressed
            and exact, the numbers of sums and means; compressed_bytes and exact_bytes, the bytes of
            their tensors; residual_bytes; dropped_residuals, because their exchanges changed;
            without_feedback, exchanges of gradients in bf16 because no memory was left for their
            residuals; and, if gathers are compressed, gather as in ShardedCompression.stats().
        """
        session, _ = self._joined()
        names = ("compressed", "compressed_bytes", "exact", "exact_bytes")
        more = ("residual_bytes", "dropped_residuals", "without_feedback")
        return {
            **session.summary(),
            **{name: self._account.counts[name] for name in names},
            **{name: self._sequence.counts[name] for name in more},
            **({} if self._gather is None else {"gather": self._gather.stats()}),
        }

    def abort(self) -> None:
        """Fail all pending works on every rank."""
        sessions, gloo = self._leave()
        if gloo is not None:
            gloo.abort()
        for session in sessions:
            session.abort(errors.Error(f"rank {session.rank} left the process group"))
            session.close()

    def shutdown(self) -> None:
        """Wait for pending compressed exchanges, and leave the group."""
        sessions, gloo = self._leave()
        for session in sessions:
            session.close()
        if gloo is not None:
            gloo.shutdown()

    def _leave(self) -> tuple[list[Session], dist.ProcessGroup | None]:
        left = self._sessions(), self._gloo
        self._session = self._gloo = self._gather = None
        if self._sequence is not None:
            self._sequence.close()
        self._account.report()
        return left

    def rank(self) -> int:
        return self._joined()[0].rank if self._place is None else self._place[0]

    def size(self) -> int:
        return self._joined()[0].size if self._place is None else self._place[1]

    def wait_for_reconfigure(self, rank: int, size: int) -> None:
        """Do not connect until reconfigure(); until then rank and size are these, from torch."""
        self._place = rank, size

    # C++ calls these.
    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "thinwire"

    # torch finds groups by name for functional collectives and DeviceMesh. In C++ the name is kept
    # in a backend, and this group may have none.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description


def _settings_of(
    codec: str | None, scope: str | None, gather: str | None, options: dict[str, Any]
) -> Config:
    """Return all settings. Their codec is two: for exchanges with and without residuals."""
    named = config.codec_variable() if codec in (None, "") else codec
    settings = config.resolve(codec="int4" if named is None else named, **options)
    if codec_info(settings.codec).momentum == "required":
        raise wrong(
            "codec", settings.codec,
            "one that needs no momentum, which a process group has none of; int4 and adaptive take "
            "few bits, and thinwire.torch.compress(model, optimizer=...) takes momentum over",
        )  # fmt: skip
    if scope is not None and scope not in SCOPES:
        raise wrong("scope", scope, f"one of {SCOPES}")
    scope, gather = scope or settings.scope, gather or settings.gather
    if gather is not None:
        check_gather(gather, None)
    without = settings.codec if scope == "all" and named else "bf16"
    codecs = f"{settings.codec};{without}"
    return dataclasses.replace(settings, codec=codecs, scope=scope, gather=gather)


def own_address() -> str:
    """Return this host's address on the route to MASTER_ADDR, else loopback."""
    host = config.resolve().rendezvous_host or "127.0.0.1"
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing
        return probe.getsockname()[0]


def _is_float(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in tensors.DTYPES
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(argument: object) -> int:
    if isinstance(argument, torch.Tensor):
        return _bytes(argument)
    return sum(map(_bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0


def _forwarding(name: str) -> Callable[..., Any]:
    def collective(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self._by_gloo(name, *arguments, **options)

    collective.__name__ = name
    return collective


def _of_one_tensor(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def collective(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        return method(self, name, *arguments, *options.values())

    collective.__name__ = name
    return collective


for _name in private.COLLECTIVES:
    if _name in private.REDUCE_SCATTERS:
        _made = _of_one_tensor(ProcessGroup._scatter, _name)
    elif _name in private.ALL_GATHERS:
        _made = _of_one_tensor(ProcessGroup._all_gather, _name)
    else:
        _made = _forwarding(_name)
    setattr(ProcessGroup, _name, _made)


def _parse(address: object) -> tuple[str, int, str]:
    """(host, port, prefix)"""
    host_port, _, prefix = address.partition("/") if isinstance(address, str) else ("", "", "")
    host, _, port = host_port.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or not prefix:
        raise wrong("store_addr", address, "'host:port/prefix'")
    return host.strip("[]"), int(port), prefix
