"""Communicator: one process group of the C library.

What its methods take and return is in store.py and works.py, and can be imported from here."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_void_p

from thinwire import _library, errors
from thinwire.config import Config
from thinwire.process_end import fatal_exception, is_ending
from thinwire.store import Store, StoreCallbacks
from thinwire.works import Bucket, BucketWork, Segment, Segments, Work

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "OPS",
    "Bucket",
    "BucketWork",
    "Communicator",
    "Segment",
    "Segments",
    "Store",
    "Work",
]

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # tw_dtype
OPS = {"mean": 0, "sum": 1}  # tw_op
COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2}  # tw_collective

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
        """What the data runs on, such as "gloo over TCP", "ucx 1.13.1 over shared memory" or
        "nccl 2.30.7", with ", memory not registered" where a rank could not register any."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_transport(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def topology(self) -> str:
        """The way that dense allreduces go, and why, such as "flat, all ranks are on one node"."""
        text = ctypes.create_string_buffer(_MAX_NAME)
        _library.check(self._library.tw_comm_topology(self._open(), text, _MAX_NAME))
        return text.value.decode()

    def nodes(self) -> _library.Nodes:
        """What the group has measured of its nodes; zeros if it has measured nothing."""
        nodes = _library.Nodes()
        _library.check(self._library.tw_comm_nodes(self._open(), byref(nodes)))
        return nodes

    def goes_raw(self, count: int, dtype: str) -> bool:
        """Whether a tensor of that size is exchanged uncompressed."""
        raw = ctypes.c_int()
        _library.check(
            self._library.tw_comm_goes_raw(self._open(), count, DTYPES[dtype], byref(raw))
        )
        return raw.value != 0

    def set_step(self, step: int) -> None:
        """The step that the next allreduce of every name is; the same on all ranks."""
        _library.check(self._library.tw_comm_set_step(self._open(), step))

    def end_step(self) -> None:
        """All of a training step has been submitted; the next will submit the same tensors."""
        _library.check(self._library.tw_comm_end_step(self._open()))

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
