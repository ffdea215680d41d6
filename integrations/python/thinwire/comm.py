"""Communicator: one process group of the C library, the store where its ranks find each other, its
buckets, and its works."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_size_t, c_uint32, c_void_p
from typing import NamedTuple, Protocol

from thinwire import _library, errors
from thinwire.config import Config

_log = logging.getLogger("thinwire")


def is_ending() -> bool:
    """Return whether the main thread has ended, so that exit handlers run or soon will."""
    return not threading.main_thread().is_alive()


def fatal_exception() -> BaseException | None:
    """Return the uncaught exception that ends this process; None before its end, or if it ends
    normally.

    Between the main thread's end and the exit handlers the interpreter prints an uncaught exception
    and keeps it in sys.last_exc (before Python 3.12 sys.last_value). An interactive session keeps
    exceptions of earlier commands there, which do not end the process."""
    if not is_ending() or hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def one_line(error: BaseException) -> str:
    """Return the type and the message, if there is one: Ctrl-C's exception has none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Store(Protocol):
    """A key-value store through which ranks find each other. Each key is written once."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until the key is set, and return its value; raise when the time is over."""
        ...


def poll(has: Callable[[str], bool], key: str, timeout_s: float) -> None:
    """Poll until a store has a key, so that its lock is not held. Raises TimeoutError after
    timeout_s seconds."""
    end, pause = time.monotonic() + timeout_s, pauses()
    while not has(key):
        if time.monotonic() > end:
            raise TimeoutError(f"nobody set {key!r} within {timeout_s:.1f} s")
        time.sleep(next(pause))


def pauses(longest_s: float = 0.02) -> Iterator[float]:
    """Yield the seconds between two polls: from 1 ms, for short waits, to longest_s, so that a long
    wait costs little."""
    seconds = 0.001
    while True:
        yield seconds
        seconds = min(2 * seconds, longest_s)


class StoreCallbacks:
    """A Store as two C functions. Exceptions do not pass through C: a failure becomes a number, and
    used() raises an exception that has interrupted them, such as Ctrl-C."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._interrupt: BaseException | None = None
        self.struct = _library.Store(
            None, _library.SET_FUNCTION(self._set), _library.GET_FUNCTION(self._get)
        )

    def _set(self, _context: int, key: bytes, value: int, size: int) -> int:
        try:
            self._store.set(key.decode(), ctypes.string_at(value, size))
        except BaseException as error:  # it cannot pass through C; the number reports a failure
            self._keep(error)
            _log.warning("the rendezvous store refused %r: %s", key, error)
            return 1
        return 0

    def _get(self, _context, key: bytes, out: int, capacity: int, size, timeout_ms: int) -> int:
        try:
            value = self._store.get(key.decode(), timeout_ms / 1000)
        except BaseException as error:
            self._keep(error)
            _log.info("the rendezvous store has no %r: %s", key, error)
            return 1
        size[0] = len(value)
        ctypes.memmove(out, value, min(len(value), capacity))
        return 0

    def _keep(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self._interrupt = error

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The context for a C call that uses them: raise an exception that has interrupted them in
        place of the error that it has caused."""
        try:
            yield
        except errors.Error:
            if self._interrupt is not None:
                raise self._interrupt from None
            raise


class Segment(NamedTuple):
    """Elements [offset, offset + count) of parameter `name`, which has `total` elements, encoded
    with codec number `codec` of the group."""

    name: str
    offset: int
    count: int
    total: int
    codec: int = 0


class Segments:
    """Segments in the form that the C library reads; created once per bucket, used in every step.

    Call mark_absent(i, True) before a step in which this rank has no gradient for segment i. Then
    its elements must be zeros, and its residual is left as it is."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._absent: set[int] = set()
        self.array = (_library.Segment * len(segments))(
            *(_library.Segment(s.name.encode(), *s[1:]) for s in segments)
        )

    def mark_absent(self, index: int, absent: bool) -> None:
        self.array[index].absent = int(bool(absent))
        (self._absent.add if absent else self._absent.discard)(index)

    def set_codecs(self, codecs: Sequence[int]) -> bool:
        """Set the codec of each segment, from the next Communicator.bucket() on. Return whether any
        codec has changed."""
        changed = [(s, codec) for s, codec in zip(self.array, codecs, strict=True)
                   if s.codec != codec]  # fmt: skip
        for segment, codec in changed:
            segment.codec = codec
        return bool(changed)

    def absent(self) -> tuple[ctypes.Array | None, int]:
        """Return the numbers of the marked segments, and how many there are."""
        count = len(self._absent)
        return ((c_uint32 * count)(*sorted(self._absent)) if count else None), count


class Work:
    """One allreduce in flight. Call wait() once; the memory must live until then. The work keeps
    its communicator alive until then."""

    def __init__(self, handle: c_void_p, communicator: Communicator) -> None:
        self._handle = handle
        self._destroy = _library.load().tw_work_destroy
        self._communicator: Communicator | None = communicator

    def __del__(self) -> None:
        """Wait for a work that the caller has dropped, for example after an earlier one has failed.
        This may run between another C call and its tw_last_error(), which it does not change."""
        if self._handle:
            self._destroy(self._handle)

    def wait(self) -> None:
        """Block without the GIL until the work is done; raise the typed error of a failure. On a
        GPU the result is ready for later work of the stream that it was started with."""
        handle, self._handle = self._handle, c_void_p()
        self._end(_library.load().tw_wait(handle))

    def wait_stream(self, stream: int | None) -> None:
        """Like wait(), but on a GPU the result is ready for later work of `stream`."""
        handle, self._handle = self._handle, c_void_p()
        self._end(_library.load().tw_wait_stream(handle, stream))

    def _end(self, status: int) -> None:
        try:
            _library.check(status)
        finally:
            self._communicator = None


class Bucket:
    """A tensor that is described to the library once, and started in every step by its handle.
    Communicator.bucket() creates it; the communicator lives at least as long. Not thread-safe. Call
    wait() or wait_stream() once after each start(); the memory must live until then."""

    def __init__(
        self, handle: c_void_p, segments: Segments | None, communicator: Communicator
    ) -> None:
        self.handle = handle
        self._segments = segments
        self._communicator = communicator
        # Not at exit, because the last works may still be waited for after this.
        weakref.finalize(self, _library.load().tw_bucket_destroy, handle).atexit = False

    def start(self, send: int, receive: int, stream: int | None = None) -> Bucket:
        """Start one use, from and to these addresses, and return this bucket at once. Segments that
        are marked absent count as zeros."""
        self._communicator.check_open()
        absent, count = (None, 0) if self._segments is None else self._segments.absent()
        _library.check(
            _library.load().tw_bucket_start(self.handle, send, receive, stream, absent, count)
        )
        return self

    def wait(self) -> None:
        """Wait for the use, as Work.wait()."""
        _library.check(_library.load().tw_bucket_wait(self.handle))

    def wait_stream(self, stream: int | None) -> None:
        """Wait for the use, as Work.wait_stream()."""
        _library.check(_library.load().tw_bucket_wait_stream(self.handle, stream))


DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # tw_dtype
OPS = {"mean": 0, "sum": 1}  # tw_op
COLLECTIVES = {
    "all_reduce": 0,
    "reduce_scatter": 1,
    "all_gather": 2,
    "all_to_all": 3,
}  # tw_collective

_MAX_NAME = 1 << 16


def _fail(handle: c_void_p, reason: errors.Error) -> int:
    status, message = errors.to_status(reason), str(reason).encode(errors="replace")
    return _library.load().tw_comm_fail(handle, status, message)


def _leave(handle: c_void_p, rank: int) -> None:
    """End a communicator that was not closed, when it is collected or the interpreter exits. If an
    exception ends this process, send that reason to the peers."""
    reason = fatal_exception()
    if reason is not None:
        _fail(handle, errors.Error(f"rank {rank} ended on {one_line(reason)}"))
    if is_ending() and threading.active_count() > 1:
        return  # a daemon thread may be using it; the process ends anyway
    _library.load().tw_comm_destroy(handle)


class Communicator:
    """Wraps tw_comm. Thread-safe, except for close(), which must come after the last wait().

    It also closes when it is collected, after its works and buckets, which keep it alive, and when
    the interpreter exits.

    Addresses are of host memory, or of the GPU that config.device names; counts are in elements.
    Streams are cudaStream_t (None: the default stream; always None on the host). Every method may
    raise a thinwire.Error."""

    def __init__(self, rank: int, size: int, store: Store | None, group: str, config: Config):
        self._library = _library.load()
        self._handle = c_void_p()
        self._callbacks = StoreCallbacks(store) if store is not None else None
        options = self._options(rank, size, group, config)
        with contextlib.nullcontext() if self._callbacks is None else self._callbacks.used():
            _library.check(self._library.tw_comm_create(byref(options), byref(self._handle)))
        self._end = weakref.finalize(self, _leave, self._handle, rank)

    def leave_exit_to_owner(self) -> None:
        """Do not close when the interpreter exits: the owner does, after its pending work."""
        self._end.atexit = False

    def _options(self, rank: int, size: int, group: str, config: Config) -> _library.Options:
        options = _library.options_of(config)
        options.rank, options.size = rank, size
        if self._callbacks is not None:
            options.store = self._callbacks.struct
        options.group = group.encode()
        return options

    def check_open(self) -> None:
        """Raise an Error after close()."""
        if not self._handle:
            raise errors.Error("this communicator was closed; create another")

    def _open(self) -> c_void_p:
        self.check_open()
        return self._handle

    def all_reduce(
        self, address: int, count: int, dtype: str, op: str, stream: int | None = None
    ) -> None:
        """Reduce in place, without a name or error feedback; return when it is done."""
        handle = self._open()
        _library.check(
            self._library.tw_all_reduce(
                address, address, count, DTYPES[dtype], OPS[op], handle, stream
            )
        )

    def start(
        self,
        address: int,
        count: int,
        dtype: str,
        op: str,
        name: str | None = None,
        segments: Segments | None = None,
        priority: int = 0,
        stream: int | None = None,
    ) -> Work:
        """Start to reduce in place. Calls with the same `name`, equal on all ranks, share a
        residual."""
        work, handle = c_void_p(), self._open()
        array = None if segments is None else segments.array
        _library.check(
            self._library.tw_all_reduce_segments(
                address, address, count, DTYPES[dtype], OPS[op], handle, stream,
                _encoded(name), priority, array, 0 if array is None else len(array), byref(work),
            )
        )  # fmt: skip
        return Work(work, self)

    def bucket(
        self,
        count: int,
        dtype: str,
        op: str,
        name: str | None = None,
        segments: Segments | None = None,
        priority: int = 0,
        collective: str = "all_reduce",
        shape: str | None = None,
    ) -> Bucket:
        """Describe a tensor of `count` elements for a collective: "all_reduce", "reduce_scatter"
        (with count / size elements of output) or "all_gather" (with count * size). shape: text that
        must be equal on all ranks; None: not compared. The bucket is valid as long as this
        communicator."""
        array = None if segments is None else segments.array
        info = _library.BucketInfo(
            ctypes.sizeof(_library.BucketInfo), _encoded(name), count, DTYPES[dtype], OPS[op],
            COLLECTIVES[collective], priority, array, 0 if array is None else len(array),
            _encoded(shape),
        )  # fmt: skip
        handle = c_void_p()
        _library.check(self._library.tw_bucket_create(self._open(), byref(info), byref(handle)))
        return Bucket(handle, segments, self)

    def describe(self) -> str:
        """Return, as text, what this rank waits for, and the engine's last events."""
        size = c_size_t()
        _library.check(self._library.tw_comm_describe(self._open(), None, 0, byref(size)))
        text = ctypes.create_string_buffer(size.value + 4096)  # for events that come meanwhile
        _library.check(self._library.tw_comm_describe(self._open(), text, len(text), byref(size)))
        return text.value.decode(errors="replace")

    def stats(self) -> dict[str, float]:
        """Return all_reduces; raw_bytes (a ring allreduce of fp32 would have sent them) and
        wire_bytes (sent by this rank); planned_chunks, whose order was predicted; and the seconds
        of each stage under its name plus `_s`."""
        stats = _library.Stats()
        _library.check(self._library.tw_comm_stats(self._open(), byref(stats)))
        return {name: getattr(stats, name) for name, _ in stats._fields_}

    def codec(self, index: int) -> str:
        """Return the spec that codec number `index` became: topk becomes int4 if that costs fewer
        bytes."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_codec(self._open(), index, text, _MAX_NAME))
        return text.value.decode()

    def transport(self) -> str:
        """Return the transport of the data, such as "gloo over TCP", "ucx 1.13.1 over shared
        memory" or "nccl 2.30.7", with ", memory not registered" if a rank could not register
        any."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_transport(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def matches_by_order(self) -> bool:
        """Return whether exchanges match by their order on all ranks, as NCCL's do, so that a
        missing one blocks all later ones. Otherwise they match by tag."""
        by_order = ctypes.c_int()
        _library.check(self._library.tw_comm_matches_by_order(self._open(), byref(by_order)))
        return by_order.value != 0

    def topology(self) -> str:
        """Return the topology of dense allreduces and the reason for it, such as "flat, all ranks
        are on one node"."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_topology(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def nodes(self) -> _library.Nodes:
        """Return the group's measurements of its nodes; zeros if nothing was measured."""
        nodes = _library.Nodes()
        _library.check(self._library.tw_comm_nodes(self._open(), byref(nodes)))
        return nodes

    def goes_raw(self, count: int, dtype: str) -> bool:
        """Return whether a tensor of that size is exchanged uncompressed."""
        raw = ctypes.c_int()
        _library.check(
            self._library.tw_comm_goes_raw(self._open(), count, DTYPES[dtype], byref(raw))
        )
        return raw.value != 0

    def set_step(self, step: int) -> None:
        """Set the step number of the next allreduce of every name; the same on all ranks."""
        _library.check(self._library.tw_comm_set_step(self._open(), step))

    def end_step(self) -> None:
        """Call when all of a training step was submitted, if the next step will submit the same
        named tensors."""
        _library.check(self._library.tw_comm_end_step(self._open()))

    def forget_step(self) -> None:
        """Call in place of end_step() if the next step may submit other tensors."""
        _library.check(self._library.tw_comm_forget_step(self._open()))

    def residuals(self) -> dict[str, int]:
        """Return the number of elements by parameter name. Nothing may be in flight."""
        count, sizes = c_size_t(), {}
        _library.check(self._library.tw_residual_count(self._open(), byref(count)))
        name, numel = ctypes.create_string_buffer(_MAX_NAME), c_size_t()
        for index in range(count.value):
            _library.check(
                self._library.tw_residual_info(self._handle, index, name, _MAX_NAME, byref(numel))
            )
            sizes[name.value.decode()] = numel.value
        return sizes

    def get_residuals(self, arrays: Sequence[tuple[str, str, int, int]]) -> None:
        """Copy residuals and momentum to float32 arrays, each given as (parameter, "first",
        "second" or "momentum", address, number of elements), in one pass over the memory."""
        handle = self._open()
        _library.check(
            self._library.tw_residual_get_all(handle, _residual_arrays(arrays), len(arrays))
        )

    def undo_residuals(self) -> None:
        """After a failure, when nothing is in flight: undo the changes that the last use of every
        tensor has made to residuals and momentum."""
        _library.check(self._library.tw_residual_undo(self._open()))

    def set_residuals(self, arrays: Sequence[tuple[str, str, int, int]]) -> None:
        """Replace the residuals and momentum of the parameters that these arrays name. The form is
        that of get_residuals()."""
        handle = self._open()
        _library.check(
            self._library.tw_residual_set_all(handle, _residual_arrays(arrays), len(arrays))
        )

    def fail(self, reason: errors.Error) -> None:
        """Fail the group on every rank; all of them raise this reason afterwards, unless the group
        had failed before."""
        _library.check(_fail(self._open(), reason))

    def close(self) -> None:
        """Close the connections and free all memory. A second call does nothing."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            self._end.detach()
            self._library.tw_comm_destroy(handle)


def _residual_arrays(arrays: Sequence[tuple[str, str, int, int]]) -> ctypes.Array:
    return (_library.ResidualArray * len(arrays))(
        *((parameter.encode(), array.encode(), *place) for parameter, array, *place in arrays)
    )


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
