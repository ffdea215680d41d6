"""ProcessGroup, and how it meets its ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.arguments import wrong
from thinwire.torch import functional, private, tensors
from thinwire.torch.communicator import Communicator, check_place, settings_of
from thinwire.torch.process_group.works import CompressedWork, GlooWork, typed_error

_GLOO_TIMEOUT_S = 1800.0  # torch's own


class ProcessGroup(dist.ProcessGroup):
    """A process group whose allreduces by SUM or AVG of float32, bfloat16 and float16 are
    compressed, unless they are of at most `min_bytes` (65536 unless it is set) times ranks - 1.
    All other allreduces and all other collectives are Gloo's.

    codec, options: as Communicator takes them. There are no names here, so nothing that a codec
    loses comes back: take int8 or bf16 for gradients, or `communicator.all_reduce(name=...)`, which
    has error feedback, as thinwire.torch.attach has.

    Call configure() before the first collective, and again after a failure."""

    def __init__(self, codec: str | None = None, **options: Any) -> None:
        settings = settings_of(codec, options)
        super().__init__(0, 1)  # torch keeps these for good; the methods below tell the real ones
        self._codec, self._options = codec, options
        self._timeout_s = settings.timeout_s
        self._gloo: dist.ProcessGroup | None = None
        self._communicator: Communicator | None = None
        self._failure: errors.Error | None = None  # of Gloo's collectives

    def configure(self, store_addr: str, rank: int, world_size: int) -> None:
        """Joins `world_size` ranks that meet in the store of a torch TCPStore's server, in place of
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
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = dist.ReduceOp.SUM
    ) -> dist.Work:
        """As torch's; opts: AllreduceOptions or a ReduceOp."""
        communicator = self.communicator
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = functional.find_kind(getattr(opts, "reduceOp", opts))
        if op is None or not all(map(_is_float, given)):
            return self._by_gloo("allreduce", given, opts)
        return CompressedWork(
            [communicator.all_reduce(each, op, async_op=True) for each in given], given
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        return self.allreduce(tensors, opts)

    def _by_gloo(self, collective: str, *arguments: Any, **options: Any) -> Any:
        communicator, gloo = self._joined()

        def typed(error: Exception) -> errors.Error:
            self._failure = self._failure or typed_error(communicator.rank, collective, error)
            return errors.again(self._failure)

        try:
            made = getattr(gloo, collective)(*arguments, **options)
        except RuntimeError as error:  # a peer was lost before
            raise typed(error) from None
        # Only Gloo's own work of a receive from anybody tells from whom it was.
        bare = collective == "recv_anysource" or not isinstance(made, dist.Work)
        return made if bare else GlooWork(made, typed)

    def errored(self) -> errors.Error | None:
        """The first failure, which configure() mends; None if there was none."""
        communicator = self._communicator
        return self._failure or (None if communicator is None else communicator.error)

    def stats(self) -> dict[str, Any]:
        """As Communicator.stats()."""
        return self.communicator.stats()

    def abort(self) -> None:
        """Fails everything in flight, on every rank."""
        communicator, gloo = self._communicator, self._gloo
        self._communicator = self._gloo = None
        if gloo is not None:
            gloo.abort()
        if communicator is not None:
            communicator.fail(errors.Error(f"rank {communicator.rank} left the process group"))
            communicator.close()

    def shutdown(self) -> None:
        """Waits for compressed allreduces in flight, and leaves the group."""
        communicator, gloo = self._communicator, self._gloo
        self._communicator = self._gloo = None
        if communicator is not None:
            communicator.close()
        if gloo is not None:
            gloo.shutdown()

    def rank(self) -> int:
        return self._joined()[0].rank

    def size(self) -> int:
        return self._joined()[0].size

    # C++ calls these three.
    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "thinwire"


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in tensors.DTYPES


def _forwarding(name: str) -> Callable[..., Any]:
    def collective(self: ProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self._by_gloo(name, *arguments, **options)

    collective.__name__ = name
    return collective


for _name in private.COLLECTIVES:
    setattr(ProcessGroup, _name, _forwarding(_name))


def _parse(address: object) -> tuple[str, int, str]:
    """(host, port, prefix)"""
    host_port, _, prefix = address.partition("/") if isinstance(address, str) else ("", "", "")
    host, _, port = host_port.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or not prefix:
        raise wrong("store_addr", address, "'host:port/prefix'")
    return host.strip("[]"), int(port), prefix
