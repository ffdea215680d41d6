"""Tensors as a communicator reduces them: their segments, buckets that are used every step, and
what is in flight."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_uint32, c_void_p
from typing import TYPE_CHECKING, NamedTuple

from thinwire import _library

if TYPE_CHECKING:
    from thinwire.comm import Communicator


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


class BucketWork:
    """One use of a bucket in flight. wait() or wait_stream() must be called, once; its memory must
    live until then."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        """As Work.wait()."""
        _library.check(_library.load().tw_bucket_wait(self._bucket.handle))

    def wait_stream(self, stream: int | None) -> None:
        """As Work.wait_stream()."""
        _library.check(_library.load().tw_bucket_wait_stream(self._bucket.handle, stream))


class Bucket:
    """A tensor that is described to the library once, and started in every step by its handle.
    Communicator.bucket() makes it, and lives as long. One thread at a time uses it."""

    def __init__(
        self, handle: c_void_p, segments: Segments | None, communicator: Communicator
    ) -> None:
        self.handle = handle
        self._segments = segments
        self._communicator = communicator
        # Not at exit, where the last works may still be waited for, after this.
        weakref.finalize(self, _library.load().tw_bucket_destroy, handle).atexit = False

    def start(self, send: int, receive: int, stream: int | None = None) -> BucketWork:
        """Starts one use, from and to these addresses, and returns at once. Segments that are
        marked absent count as zeros."""
        self._communicator.check_open()
        absent, count = (None, 0) if self._segments is None else self._segments.absent()
        _library.check(
            _library.load().tw_bucket_start(self.handle, send, receive, stream, absent, count)
        )
        return BucketWork(self)
