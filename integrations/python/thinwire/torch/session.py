"""Session: a communicator over a torch process group, connected at first use, closed at exit."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import torch

from thinwire import errors
from thinwire.comm import Communicator, Segments, Work
from thinwire.config import Config
from thinwire.torch import checkpoint
from thinwire.torch.group import Group
from thinwire.torch.place import Place, place_of
from thinwire.torch.waiter import Waiter


class Session:
    """Owns the communicator and the waiter. After the first error it stays failed. Thread-safe."""

    def __init__(self, group: Group, config: Config) -> None:
        self.group = group
        self.config = config
        self.restored: checkpoint.Residuals = {}  # what load() was given last
        self._first_step = 0
        self._counted_before: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._waiter: Waiter | None = None
        self._place: Place | None = None
        self._submitted: set[Work] = set()
        self._error: errors.Error | None = None
        self._closed = False
        self._process = os.getpid()

    def successor(self, group: Group, codec: str, step: int) -> Session:
        """Closes this one. A session with another codec, which goes on with what is kept, at
        `step`; all ranks call it, with nothing in flight."""
        kept, counts = self.memory(), self.stats()
        self.close()
        session = Session(group, dataclasses.replace(self.config, codec=codec))
        session.load(kept, step)
        session._counted_before = counts
        return session

    def stats(self) -> Counter[str]:
        """The communicator's, and those of the sessions before this one. Waits until nothing is in
        flight."""
        self.wait_idle()
        counts = Counter(self._counted_before)
        if self._communicator is not None:
            counts.update(self._communicator.stats())
        return counts

    def close_with(self, owner: object) -> None:
        """Closes when `owner` goes, or before the interpreter does."""
        weakref.finalize(owner, self.close)

    @property
    def error(self) -> errors.Error | None:
        """The first failure."""
        return self._error

    @property
    def communicator(self) -> Communicator | None:
        """None before the first use and after close()."""
        return self._communicator

    def fail(self, error: errors.Error) -> None:
        """Keeps the first reason."""
        with self._lock:
            if self._error is None:
                self._error = error

    def connect(self, tensor: torch.Tensor) -> tuple[Communicator, Place, Waiter]:
        """The communicator for tensors like this one; the first call blocks until all ranks make
        it, and settles the device. Raises the first error of this session, if there was one."""
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._closed:
                raise errors.Error("this state was closed; create another")
            if self._communicator is None:
                try:
                    self._connect(place_of(tensor))
                except errors.Error as error:
                    self._error = error
                    raise
            self._check_device(tensor)
            return self._communicator, self._place, self._waiter

    def _check_device(self, tensor: torch.Tensor) -> None:
        if str(tensor.device) != self._place.name:
            raise errors.InvalidArgumentError(
                f"rank {self.group.rank}: got a tensor on {tensor.device}, expected "
                f"{self._place.name} as the first one; keep them on one device"
            )

    def _connect(self, place: Place) -> None:
        config = dataclasses.replace(self.config, device=place.name)
        communicator = self.group.connect(config)
        try:
            checkpoint.write(communicator, self.restored)
            communicator.set_step(self._first_step)
        except errors.Error:
            communicator.close()
            raise
        self._communicator, self._place = communicator, place
        self._waiter = Waiter(place, self.fail)

    def start(
        self,
        tensor: torch.Tensor,
        dtype: str,
        op: str,
        name: str | None,
        segments: Segments | None = None,
        priority: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduces a contiguous tensor in place; a future of it."""
        communicator, place, waiter = self.connect(tensor)
        work = communicator.start(
            tensor.data_ptr(), tensor.numel(), dtype, op, name, segments, priority, place.stream()
        )
        return waiter.add(work, tensor, finish)

    def submit(
        self,
        tensor: torch.Tensor,
        dtype: str,
        op: str,
        name: str,
        segments: Segments | None = None,
        priority: int = 0,
    ) -> Work:
        """As start(), for a caller who calls complete() itself. (Futures complete in the order of
        their submission, which is not the order in which p3 reduces.)"""
        communicator, place, _ = self.connect(tensor)
        work = communicator.start(
            tensor.data_ptr(), tensor.numel(), dtype, op, name, segments, priority, place.stream()
        )
        self._submitted.add(work)
        return work

    def end_step(self) -> None:
        """All of a training step has been submitted; the next will submit the same tensors."""
        if self._communicator is not None:
            self._communicator.end_step()

    def complete(self, work: Work) -> None:
        """Returns when the tensor holds the result, on a GPU for later work of the current stream.
        Raises the typed error of a failure."""
        self._submitted.discard(work)
        try:
            work.wait_stream(self._place.stream())
        except errors.Error as error:
            self.fail(error)
            raise

    def reduce(self, tensor: torch.Tensor, dtype: str, op: str) -> None:
        """Reduces a contiguous tensor in place, unnamed, on the calling thread."""
        communicator, place, _ = self.connect(tensor)
        address, numel = tensor.data_ptr(), tensor.numel()
        communicator.all_reduce(address, numel, dtype, op, place.stream())

    def load(self, residuals: checkpoint.Residuals, step: int) -> None:
        """Replaces everything that is kept, and says which step comes next, now or when the group
        is connected."""
        self.wait_idle()
        if self._communicator is not None:
            checkpoint.write(self._communicator, residuals)
            self._communicator.set_step(step)
        self.restored, self._first_step = residuals, step

    def memory(self) -> checkpoint.Residuals:
        """What is kept of each parameter. Waits until nothing is in flight."""
        self.wait_idle()
        if self._communicator is None:
            return self.restored
        return checkpoint.read(self._communicator, self.config.momentum != 0)

    def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        if self._waiter is not None:
            self._waiter.wait_idle()

    def abort(self) -> None:
        """Fails the group on every rank, if it is connected."""
        if self._communicator is not None:
            self._communicator.abort()

    def close(self) -> None:
        """Ends what is in flight, says goodbye to the peers; may be called twice."""
        with self._lock:
            if self._closed or self._process != os.getpid():  # a forked child owns nothing
                return
            self._closed = True
            communicator, waiter = self._communicator, self._waiter
            self._communicator = self._waiter = None
        if communicator is None:
            return
        if waiter.busy() or self._submitted:
            communicator.abort()
        waiter.close()
        communicator.close()
