"""Communicator: one process group of the C library; the store where its ranks find each other, its
buckets, and what is in flight."""

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
    """Return whether the main thread has ended, so that exit handlers run, or soon will."""
    return not threading.main_thread().is_alive()


def fatal_exception() -> BaseException | None:
    """The uncaught exception that ends this process; None while it goes on, and after a normal end.

    Between the main thread's end and the exit handlers the interpreter prints an uncaught exception
    and keeps it (sys.last_exc, before Python 3.12 sys.last_value). An interactive session keeps
    those of earlier commands there, which end nothing."""
    if not is_ending() or hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


class Store(Protocol):
    """A key-value board on which ranks find each other. Keys are written once."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until somebody has set the key; raises when the time is over."""
        ...


def poll(has: Callable[[str], bool], key: str, timeout_s: float) -> None:
    """Wait until a store has a key, without holding the store meanwhile. Raises TimeoutError after
    timeout_s seconds."""
    end, pause = time.monotonic() + timeout_s, pauses()
    while not has(key):
        if time.monotonic() > end:
            raise TimeoutError(f"nobody set {key!r} within {timeout_s:.1f} s")
        time.sleep(next(pause))


def pauses(longest_s: float = 0.02) -> Iterator[float]:
    """Yield seconds between two looks: from a millisecond, for what others are about to write, to
    longest_s, so that a long wait costs little."""
    seconds = 0.001
    while True:
        yield seconds
        seconds = min(2 * seconds, longest_s)


class StoreCallbacks:
    """A Store as two C functions. Nothing is raised through C: a failure becomes a number, and
    used() raises what has interrupted them, such as Ctrl-C."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._interrupt: BaseException | None = None
        self.struct = _library.Store(
            None, _library.SET_FUNCTION(self._set), _library.GET_FUNCTION(self._get)
        )

    def _set(self, _context: int, key: bytes, value: int, size: int) -> int:
        try:
            self._store.set(key.decode(), ctypes.string_at(value, size))
        except BaseException as error:  # C code can't carry it; the number says that it happened
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
        """Around the call that has them: what has interrupted them is raised in place of the error
        that it led to."""
        try:
            yield
        except errors.Error:
            if self._interrupt is not None:
                raise self._interrupt from None
            raise


class Segment(NamedTuple):
    """Elements [offset, offset + count) of parameter `name`, which has `total` elements, and goes
    with codec number `codec` of the group's."""

    name: str
    offset: int
    count: int
    total: int
    codec: int = 0


class Segments:
    """Segments in the form that the C library reads; made once for a bucket, used every step.

    mark_absent(i, True) before a call: this rank has no gradient for segment i. Its elements must
    be zeros then, and what compression has kept of it stays."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._absent: set[int] = set()
        self.array = (_library.Segment * len(segments))(
            *(_library.Segment(s.name.encode(), *s[1:]) for s in segments)
        )

    def mark_absent(self, index: int, absent: bool) -> None:
        self.array[index].absent = int(bool(absent))
        (self._absent.add if absent else self._absent.discard)(index)

    def set_codecs(self, codecs: Sequence[int]) -> bool:
        """Gives each segment its codec, from the next Communicator.bucket() on. Return whether
        that changes anything."""
        changed = [(s, codec) for s, codec in zip(self.array, codecs, strict=True)
                   if s.codec != codec]  # fmt: skip
        for segment, codec in changed:
            segment.codec = codec
        return bool(changed)

    def absent(self) -> tuple[ctypes.Array | None, int]:
        """The numbers of the segments that are marked, and how many they are."""
        count = len(self._absent)
        return ((c_uint32 * count)(*sorted(self._absent)) if count else None), count


class Work:
    """One allreduce in flight. wait() must be called, once; its memory must live until then. It
    keeps its communicator until then, which may be dropped meanwhile."""

    def __init__(self, handle: c_void_p, communicator: Communicator) -> None:
        self._handle = handle
        self._destroy = _library.load().tw_work_destroy
        self._communicator: Communicator | None = communicator

    def __del__(self) -> None:
        """One that nobody waits for, such as those behind the first that failed, is waited for
        here. That may come between another call and its message, which stays as it is."""
        if self._handle:
            self._destroy(self._handle)

    def wait(self) -> None:
        """Blocks without the GIL until all is done; raises the typed error of a failure. On a GPU
        the result is there for later work of the stream that it was started with."""
        handle, self._handle = self._handle, c_void_p()
        self._end(_library.load().tw_wait(handle))

    def wait_stream(self, stream: int | None) -> None:
        """As wait(); on a GPU the result is there for later work of this stream."""
        handle, self._handle = self._handle, c_void_p()
        self._end(_library.load().tw_wait_stream(handle, stream))

    def _end(self, status: int) -> None:
        try:
            _library.check(status)
        finally:
            self._communicator = None


class Bucket:
    """A tensor that is described to the library once, and started in every step by its handle.
    Communicator.bucket() makes it, and lives as long. One thread at a time uses it: after start()
    comes wait() or wait_stream(), once, and the memory must live until then."""

    def __init__(
        self, handle: c_void_p, segments: Segments | None, communicator: Communicator
    ) -> None:
        self.handle = handle
        self._segments = segments
        self._communicator = communicator
        # Not at exit, where the last works may still be waited for, after this.
        weakref.finalize(self, _library.load().tw_bucket_destroy, handle).atexit = False

    def start(self, send: int, receive: int, stream: int | None = None) -> Bucket:
        """Starts one use, from and to these addresses, and returns this bucket at once. Segments
        that are marked absent count as zeros."""
        self._communicator.check_open()
        absent, count = (None, 0) if self._segments is None else self._segments.absent()
        _library.check(
            _library.load().tw_bucket_start(self.handle, send, receive, stream, absent, count)
        )
        return self

    def wait(self) -> None:
        """As Work.wait()."""
        _library.check(_library.load().tw_bucket_wait(self.handle))

    def wait_stream(self, stream: int | None) -> None:
        """As Work.wait_stream()."""
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
    """Ends a communicator that was not closed, since nobody has it any more or the interpreter
    ends. If an exception ends this process, its peers are told that."""
    reason = fatal_exception()
    if reason is not None:
        _fail(handle, errors.Error(f"rank {rank} ended on {type(reason).__name__}: {reason}"))
    if is_ending() and threading.active_count() > 1:
        return  # a daemon thread may be at work in it; the process ends anyway
    _library.load().tw_comm_destroy(handle)


class Communicator:
    """Wraps tw_comm. Thread-safe, but for close(), which comes after the last wait().

    One that is dropped, or still there when the interpreter ends, closes by itself: after its works
    and buckets, which keep it.

    Addresses are of host memory, or of the GPU that config.device names; counts are in elements.
    Streams are cudaStream_t (None: the default one; always None on the host). Every method raises
    a thinwire.Error."""

    def __init__(self, rank: int, size: int, store: Store | None, group: str, config: Config):
        self._library = _library.load()
        self._handle = c_void_p()
        self._callbacks = StoreCallbacks(store) if store is not None else None
        options = self._options(rank, size, group, config)
        with contextlib.nullcontext() if self._callbacks is None else self._callbacks.used():
            _library.check(self._library.tw_comm_create(byref(options), byref(self._handle)))
        self._end = weakref.finalize(self, _leave, self._handle, rank)

    def leave_exit_to_owner(self) -> None:
        """The owner closes it when the interpreter ends, after what it has in flight."""
        self._end.atexit = False

    def _options(self, rank: int, size: int, group: str, config: Config) -> _library.Options:
        options = _library.options_of(config)
        options.rank, options.size = rank, size
        if self._callbacks is not None:
            options.store = self._callbacks.struct
        options.group = group.encode()
        return options

    def check_open(self) -> None:
        """Raises an Error after close()."""
        if not self._handle:
            raise errors.Error("this communicator was closed; create another")

    def _open(self) -> c_void_p:
        self.check_open()
        return self._handle

    def all_reduce(
        self, address: int, count: int, dtype: str, op: str, stream: int | None = None
    ) -> None:
        """Reduces in place, unnamed, without error feedback; returns when it is done."""
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
        """Starts to reduce in place. `name`, equal on all ranks, carries the error feedback."""
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
        """Describes a tensor of `count` elements for the collective: "all_reduce",
        "reduce_scatter", whose output has count / size elements, or "all_gather", with count *
        size. shape: in words that must be equal on all ranks; None: it is not compared. It is valid
        as long as this communicator."""
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
        """Says who waits for whom, and the engine's last events, as text for people."""
        size = c_size_t()
        _library.check(self._library.tw_comm_describe(self._open(), None, 0, byref(size)))
        text = ctypes.create_string_buffer(size.value + 4096)  # some events may come meanwhile
        _library.check(self._library.tw_comm_describe(self._open(), text, len(text), byref(size)))
        return text.value.decode(errors="replace")

    def stats(self) -> dict[str, float]:
        """all_reduces; raw_bytes (an fp32 ring's) and wire_bytes (sent by this rank);
        planned_chunks, whose order was predicted; seconds of each stage under its name and `_s`."""
        stats = _library.Stats()
        _library.check(self._library.tw_comm_stats(self._open(), byref(stats)))
        return {name: getattr(stats, name) for name, _ in stats._fields_}

    def codec(self, index: int) -> str:
        """The spec that codec number `index` became: topk is int4 where that costs fewer bytes."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_codec(self._open(), index, text, _MAX_NAME))
        return text.value.decode()

    def transport(self) -> str:
        """Return what the data runs on, such as "gloo over TCP", "ucx 1.13.1 over shared memory" or
        "nccl 2.30.7", with ", memory not registered" where a rank could not register any."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_transport(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def matches_by_order(self) -> bool:
        """Return whether exchanges match by their order on all ranks, as NCCL's do, so that one
        which does not come holds all behind it. Others match by tag."""
        by_order = ctypes.c_int()
        _library.check(self._library.tw_comm_matches_by_order(self._open(), byref(by_order)))
        return by_order.value != 0

    def topology(self) -> str:
        """The way that dense allreduces go, and why, such as "flat, all ranks are on one node"."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_topology(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def nodes(self) -> _library.Nodes:
        """Return the group's measurements of its nodes; zeros if it has measured nothing."""
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
        """The step that the next allreduce of every name is; the same on all ranks."""
        _library.check(self._library.tw_comm_set_step(self._open(), step))

    def end_step(self) -> None:
        """All of a training step has been submitted; the next submits the same named tensors."""
        _library.check(self._library.tw_comm_end_step(self._open()))

    def forget_step(self) -> None:
        """In place of end_step(), where the next step may submit other tensors."""
        _library.check(self._library.tw_comm_forget_step(self._open()))

    def residuals(self) -> dict[str, int]:
        """Returns the number of elements by parameter name. Only while nothing is in flight."""
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
        """Writes kept arrays of parameters, each as (parameter, "first", "second" or "momentum",
        address, number of elements), float32. All are copied in one pass over the memory."""
        handle = self._open()
        _library.check(
            self._library.tw_residual_get_all(handle, _residual_arrays(arrays), len(arrays))
        )

    def undo_residuals(self) -> None:
        """After a failure, when nothing is in flight: takes back what the last use of every tensor
        has changed in residuals and momentum."""
        _library.check(self._library.tw_residual_undo(self._open()))

    def set_residuals(self, arrays: Sequence[tuple[str, str, int, int]]) -> None:
        """Replaces all that is kept of the parameters that these arrays name; as
        get_residuals()."""
        handle = self._open()
        _library.check(
            self._library.tw_residual_set_all(handle, _residual_arrays(arrays), len(arrays))
        )

    def fail(self, reason: errors.Error) -> None:
        """Fails the group on every rank, each of which raises this reason from here on, unless the
        group had failed before."""
        _library.check(_fail(self._open(), reason))

    def close(self) -> None:
        """Says goodbye to the peers and frees everything; may be called twice."""
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
