"""A thread that waits for allreduces in flight and completes torch futures; and the device of their
tensors, which orders work.

On the host a result is ready when a wait returns. On a GPU events order three streams: the stream
that makes a tensor, the library's own, and the stream that uses the result."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch

from thinwire import errors
from thinwire.torch import private
from thinwire.torch.exchange.bucket import InFlight


class Device:
    """The host, where a result is ready when a wait returns."""

    name = "cpu"

    def enter_thread(self) -> None:
        """Prepare a thread of this package; it must call this first."""

    def stream(self) -> int | None:
        """Return the stream that the library's work must follow: a cudaStream_t, or None."""
        return None

    def later_stream(self) -> int | None:
        """Return the stream that must follow the library's work: a cudaStream_t, or None."""
        return None

    @contextlib.contextmanager
    def finishing(self, _tensor: torch.Tensor) -> Iterator[None]:
        """The context in which work on a result must run and its future must be completed."""
        yield

    def future(self) -> torch.futures.Future:
        """Return a new future of a tensor on this device."""
        return torch.futures.Future()


class CudaDevice(Device):
    """A GPU. Futures carry events: waiting for one makes the current stream wait, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._later = torch.cuda.Stream(device)
        self.name = f"cuda:{device.index}"

    def enter_thread(self) -> None:
        # A new thread's current device is GPU 0. When a stream's scope ends, torch returns to it,
        # and the runtime creates a context there, which takes memory of GPU 0 for every other rank.
        # A GPU that fails here fails in the work too, and the waiting caller gets that error.
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(self._device)

    def stream(self) -> int | None:
        return torch.cuda.current_stream(self._device).cuda_stream

    def later_stream(self) -> int | None:
        return self._later.cuda_stream

    @contextlib.contextmanager
    def finishing(self, tensor: torch.Tensor) -> Iterator[None]:
        with torch.cuda.stream(self._later):
            # The allocator must not reuse the tensor's memory before this stream is done with it.
            tensor.record_stream(self._later)
            yield

    def future(self) -> torch.futures.Future:
        return torch.futures.Future(devices=[self._device])


def device_of(tensor: torch.Tensor) -> Device:
    """Return a new object for the tensor's device: the host or a GPU (tensors.check() raises for
    others)."""
    return CudaDevice(tensor.device) if tensor.device.type == "cuda" else Device()


def failed_future(error: errors.Error) -> torch.futures.Future:
    """Return a completed future whose wait(), value() and use by DDP raise `error`."""
    future = torch.futures.Future()
    private.fail_future(future, error)
    return future


class Pending:
    """A submission and its future. The first to reach it completes the future: the waiter's thread
    in the order of submission, or an earlier caller of wait()."""

    def __init__(
        self,
        waiter: Waiter,
        in_flight: InFlight,
        finish: Callable[[], None] | None,
        future: torch.futures.Future,
    ) -> None:
        self.future = future
        self._waiter = waiter
        self._in_flight: InFlight | None = in_flight
        self._finish = finish
        self._unclaimed = threading.Lock()

    def wait(self) -> None:
        """Return when the future is complete, without waiting for earlier ones; raise its error."""
        self.complete()
        self.future.wait()

    def complete(self) -> None:
        """Wait for the work and complete the future, unless another thread does so."""
        if not self._unclaimed.acquire(blocking=False):
            return
        in_flight, self._in_flight = self._in_flight, None
        finish, self._finish = self._finish, None
        self._waiter.finish(in_flight, finish, self.future)


class Waiter:
    """Completes futures in the order of their submission, except those that a caller waits for: in
    strict order ranks could deadlock, each waiting first for a work that another rank has not
    submitted yet.

    A callback of a future runs on the waiter's thread, and may submit a work and wait for its
    future; so submissions from there go to another waiter. Thread-safe."""

    def __init__(self, device: Device, on_error: Callable[[errors.Error], errors.Error]) -> None:
        """on_error: called with an error before a future fails, on the thread that completes it;
        returns the error for the future, which is the first one of all."""
        self._device = device
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._pending = 0
        self._finishing: set[int] = set()  # ids of threads that are in finish()
        self._of_callbacks: Waiter | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="thinwire-waiter", daemon=True)
        self._thread.start()

    def add(self, in_flight: InFlight, finish: Callable[[], None] | None = None) -> Pending:
        """Return the submission with its future. The tensor is kept alive until its work is done;
        then `finish` runs."""
        if threading.get_ident() == self._thread.ident:
            if self._of_callbacks is None:
                self._of_callbacks = Waiter(self._device, self._on_error)
            return self._of_callbacks.add(in_flight, finish)
        pending = Pending(self, in_flight, finish, self._device.future())
        with self._changed:
            self._pending += 1
        self._queue.put(pending)
        return pending

    def busy(self) -> bool:
        """Return whether something is in flight."""
        nested = self._of_callbacks
        with self._changed:
            return self._pending > 0 or (nested is not None and nested.busy())

    def wait_idle(self) -> None:
        """Return when everything added so far is done or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)
        if self._of_callbacks is not None:
            self._of_callbacks.wait_idle()

    def close(self) -> None:
        """End the thread after it has completed everything that was added."""
        self._queue.put(None)
        # A thread in finish() may drop the last reference to the owner, which closes this object.
        own = threading.get_ident()
        if own != self._thread.ident:
            self._thread.join()
            with self._changed:
                self._changed.wait_for(lambda: self._finishing <= {own})
        if self._of_callbacks is not None:
            self._of_callbacks.close()

    def finish(
        self,
        in_flight: InFlight,
        finish: Callable[[], None] | None,
        future: torch.futures.Future,
    ) -> None:
        """Wait for the work and complete its future; Pending calls it once."""
        own = threading.get_ident()
        with self._changed:
            self._finishing.add(own)
        with self._device.finishing(in_flight.tensor):
            error = self._wait(in_flight, finish)
            # Count it as done before completing the future: after that, callers may read residuals.
            with self._changed:
                self._pending -= 1
                self._finishing.discard(own)
                self._changed.notify_all()
            if error is None:
                future.set_result(in_flight.tensor)
            else:
                private.fail_future(future, self._on_error(error))

    def _run(self) -> None:
        self._device.enter_thread()
        while (pending := self._queue.get()) is not None:
            pending.complete()
            del pending  # it may hold the last reference to the tensor

    def _wait(self, in_flight: InFlight, finish: Callable[[], None] | None) -> errors.Error | None:
        try:
            in_flight.work.wait_stream(self._device.later_stream())
            if finish is not None:
                finish()
        except errors.Error as error:
            return error
        except Exception as error:  # a bug here must not leave the future incomplete
            return errors.Error(f"completing an allreduce failed: {error!r}")
        return None
