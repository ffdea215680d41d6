"""ProcessGroup: torch's own over Gloo, whose allreduce of floats is compressed.

import thinwire.torch.process_group as compressed
compressed.register(codec="int8")
torch.distributed.init_process_group("thinwire")        # or:
group = compressed.ProcessGroup(codec="int8")
group.configure("host:29500/epoch-1", rank, world_size)  # again after ranks were lost"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.arguments import wrong
from thinwire.torch import collectives, private, tensors
from thinwire.torch.communicator import Communicator, check_place, settings_of

__all__ = ["ProcessGroup", "register"]

_GLOO_TIMEOUT_S = 1800.0  # torch's own
_KEPT_WORKS = 256  # that are done and were neither waited for nor asked for a future


class _Kept:
    """Works that C++ may still hold. It holds only the C++ half of a Python Work, and calls its
    wait() and then its get_future() after the caller has dropped the Python half, as DDP.join does;
    so a group keeps every work until it was waited for, or its future is done, and then until the
    next one is."""

    def __init__(self) -> None:
        self._works: dict[_Work, None] = {}
        self._last: _Work | None = None

    def add(self, work: _Work) -> None:
        if len(self._works) > _KEPT_WORKS:
            for each in [each for each in list(self._works) if each.is_completed()]:
                self._works.pop(each, None)
        self._works[work] = None

    def release(self, work: _Work) -> None:
        if self._works.pop(work, self) is None:
            self._last = work


class _Work(dist.Work):
    """A collective in flight."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        kept.add(self)

    def _release(self) -> None:
        self._kept.release(self)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors with the results."""
        self.wait()
        return self.get_future().value()

    def is_success(self) -> bool:
        """True if the collective is done and has not failed."""
        future = self.get_future()
        if not future.done():
            return False
        try:
            future.value()
        except RuntimeError:
            return False
        return True


class CompressedWork(_Work):
    """Allreduces of a Communicator in flight, one for each tensor."""

    def __init__(
        self,
        works: Sequence[collectives.Work],
        tensors: list[torch.Tensor],
        kept: _Kept,
    ) -> None:
        futures = torch.futures.collect_all([work.get_future() for work in works])
        self._works = works
        self._future = futures.then(lambda done: _results(done, tensors))
        super().__init__(kept)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the results are there and the future is done; raise the typed error of a
        failure. `timeout` is ignored: the group's own counts."""
        try:
            for work in self._works:
                work.wait()
            self._future.wait()
        finally:
            self._release()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Its error is torch's RuntimeError with the typed one's text."""
        self._future.add_done_callback(lambda _: self._release())
        return self._future


def _results(
    done: torch.futures.Future[list[torch.futures.Future]], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    for future in done.value():
        future.value()  # raises its error
    return tensors


class GlooWork(_Work):
    """A collective of Gloo's in flight, which raises typed errors."""

    def __init__(
        self,
        work: dist.Work,
        typed: Callable[[Exception], errors.Error],
        kept: _Kept,
    ) -> None:
        """typed: makes the typed error of Gloo's."""
        self._work, self._typed = work, typed
        super().__init__(kept)

    def wait(self, *timeout: Any) -> bool:
        try:
            return self._work.wait(*timeout)
        except errors.Error:
            raise
        except RuntimeError as error:
            raise self._typed(error) from None
        finally:
            self._release()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._work.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future = self._work.get_future()
        future.add_done_callback(lambda _: self._release())
        return future


class ProcessGroup(dist.ProcessGroup):
    """A process group whose allreduces by SUM or AVG of float32, bfloat16 and float16 are
    compressed. All other allreduces and all other collectives are Gloo's, as are allreduces of a
    list of tensors, which Gloo sums over the list, too. Tensors of at most `min_bytes` are exact.

    Nothing that a codec loses comes back, since collectives have no names here: the default codec
    is bf16. `communicator.all_reduce(name=...)` has error feedback, as thinwire.torch.compress has.

    Call configure() before the first collective, and again after a failure.

    Args:
        codec: a spec such as "int8". None: THINWIRE_CODEC, else "bf16".
        options: as Communicator takes them.
    """

    def __init__(self, codec: str | None = None, **options: Any) -> None:
        settings = settings_of(codec, options)
        super().__init__(0, 1)  # torch keeps these for good; the methods below tell the real ones
        self._codec, self._options = codec, options
        self._timeout_s = settings.timeout_s
        self._name = self._description = ""
        self._gloo: dist.ProcessGroup | None = None
        self._communicator: Communicator | None = None
        self._failure: errors.Error | None = None  # of Gloo's collectives
        self._kept = _Kept()

    def configure(self, store_addr: str, rank: int, world_size: int) -> None:
        """Join `world_size` ranks that meet in the store of a torch TCPStore's server, in place of
        those before, whose works fail. It blocks until all have come.

        store_addr: "host:port/prefix"; the prefix is a new one for each call. Raises
        InvalidArgumentError, UnavailableError if there is no store, TimeoutError if ranks stay
        away."""
        check_place(rank, world_size)
        host, port, prefix = _parse(store_addr)
        self.abort()
        timeout = datetime.timedelta(seconds=self._timeout_s or _GLOO_TIMEOUT_S)
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
        """configure(), of a store that is there; register() calls it. timeout: of Gloo, and of
        compressed allreduces unless timeout_s or THINWIRE_TIMEOUT_S says otherwise."""
        options = {"timeout_s": timeout.total_seconds()} if self._timeout_s is None else {}
        self._communicator = Communicator(
            store, rank, size, "process group", self._codec, **self._options | options
        )
        self._gloo, self._failure = private.gloo_group(store, rank, size, timeout), None
        private.share_backend(self._gloo, self)

    @property
    def communicator(self) -> Communicator:
        """What compresses. InvalidArgumentError before configure()."""
        return self._joined()[0]

    def _joined(self) -> tuple[Communicator, dist.ProcessGroup]:
        if self._communicator is None or self._gloo is None:
            raise errors.InvalidArgumentError(
                "this process group has no ranks yet, or was shut down; call configure() first"
            )
        return self._communicator, self._gloo

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor] | torch.Tensor,
        opts: Any = dist.ReduceOp.SUM,
        timeout: datetime.timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """As torch's; opts: AllreduceOptions or a ReduceOp, which may be given as `op`, too. A
        timeout is Gloo's; for compressed allreduces the group's counts."""
        opts = opts if op is None else op
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        kind = collectives.find_op(getattr(opts, "reduceOp", opts))
        if kind is not None and len(given) == 1 and _is_float(given[0]):
            return self._compress(list(given), kind)
        timeouts = () if timeout is None else (timeout,)
        return self._by_gloo("allreduce", given, opts, *timeouts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """As torch's: an allreduce of each tensor. They have one dtype."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        kind = collectives.find_op(opts.reduceOp)
        dtypes = {each.dtype if isinstance(each, torch.Tensor) else None for each in tensors}
        if kind is not None and len(dtypes) == 1 and all(map(_is_float, tensors)):
            return self._compress(list(tensors), kind)
        return self._by_gloo("allreduce_coalesced", tensors, opts)

    def _compress(self, given: list[torch.Tensor], kind: str) -> dist.Work:
        communicator = self.communicator
        op = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.AVG
        works = [communicator.all_reduce(each, op, async_op=True) for each in given]
        return CompressedWork(works, given, self._kept)

    def _by_gloo(self, collective: str, *arguments: Any, **options: Any) -> Any:
        communicator, gloo = self._joined()

        def typed(error: Exception) -> errors.Error:
            self._failure = self._failure or typed_error(communicator.rank, collective, error)
            return errors.again(self._failure)

        try:
            made = getattr(gloo, collective)(*arguments, **options)
        except RuntimeError as error:
            if type(typed_error(communicator.rank, collective, error)) is errors.Error:
                raise  # Gloo refuses the arguments; the group goes on
            raise typed(error) from None  # a peer was lost before
        # Only Gloo's own work of a receive from anybody tells from whom it was.
        bare = collective == "recv_anysource" or not isinstance(made, dist.Work)
        return made if bare else GlooWork(made, typed, self._kept)

    def errored(self) -> errors.Error | None:
        """The first failure, which configure() repairs; None if there was none."""
        communicator = self._communicator
        return self._failure or (None if communicator is None else communicator.error)

    def stats(self) -> dict[str, Any]:
        """The communicator's stats()."""
        return self.communicator.stats()

    def abort(self) -> None:
        """Fail everything in flight, on every rank."""
        communicator, gloo = self._leave()
        if gloo is not None:
            gloo.abort()
        if communicator is not None:
            communicator.fail(errors.Error(f"rank {communicator.rank} left the process group"))
            communicator.close()

    def shutdown(self) -> None:
        """Wait for compressed allreduces in flight, and leave the group."""
        communicator, gloo = self._leave()
        if communicator is not None:
            communicator.close()
        if gloo is not None:
            gloo.shutdown()

    def _leave(self) -> tuple[Communicator | None, dist.ProcessGroup | None]:
        left = self._communicator, self._gloo
        self._communicator = self._gloo = None
        return left

    def rank(self) -> int:
        return self._joined()[0].rank

    def size(self) -> int:
        return self._joined()[0].size

    # C++ calls these.
    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "thinwire"

    # torch names its groups, and finds them by name for functional collectives and DeviceMesh. In
    # C++ the name is a backend's, which this group may have none of.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description


def _is_float(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in tensors.DTYPES
    )


def _forwarding(name: str) -> Callable[..., Any]:
    def collective(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self._by_gloo(name, *arguments, **options)

    collective.__name__ = name
    return collective


for _name in private.COLLECTIVES:
    setattr(ProcessGroup, _name, _forwarding(_name))


def typed_error(rank: int, collective: str, error: Exception) -> errors.Error:
    """The typed error of a collective of Gloo's, whose own error has a text only."""
    text = f"rank {rank}, {collective}: {error}"
    if "imed out" in str(error):
        return errors.TimeoutError(f"{text}; look what the other ranks do instead")
    if "onnection" in str(error) or "onnect timeout" in str(error):
        return errors.PeerLostError(f"{text}; look why the peer's process ended")
    return errors.Error(text)


def _parse(address: object) -> tuple[str, int, str]:
    """(host, port, prefix)"""
    host_port, _, prefix = address.partition("/") if isinstance(address, str) else ("", "", "")
    host, _, port = host_port.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or not prefix:
        raise wrong("store_addr", address, "'host:port/prefix'")
    return host.strip("[]"), int(port), prefix


def register(codec: str | None = None, *, name: str = "thinwire", **options: Any) -> None:
    """Make torch.distributed.init_process_group(name) and new_group(backend=name) give compressed
    groups in this process, by torch.distributed.Backend.register_backend.

    codec, options: as ProcessGroup takes them. InvalidArgumentError if torch has a backend of that
    name."""
    ProcessGroup(codec, **options)  # a wrong argument is an error now
    if not isinstance(name, str) or not name.isidentifier():
        raise wrong("name", name, "a word")
    if hasattr(dist.Backend, name.upper()):
        raise wrong("name", name, "a name that no backend of torch has yet")

    def create(
        store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> ProcessGroup:
        group = ProcessGroup(codec, **options)
        group.connect(store, rank, size, timeout)
        return group

    dist.Backend.register_backend(name, create, devices=["cpu", "cuda"])
