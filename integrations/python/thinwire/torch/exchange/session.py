"""Session: a communicator over a torch process group, connected at first use, closed at exit."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire import comm, errors
from thinwire.comm import Communicator, fatal_exception, one_line
from thinwire.config import STAGES, Config, check_here
from thinwire.torch.exchange import checkpoint
from thinwire.torch.exchange.bucket import Bucket, InFlight, handle_of
from thinwire.torch.exchange.recovery import StepLedger
from thinwire.torch.exchange.waiter import Device, Pending, Waiter, device_of
from thinwire.torch.group import Group, HomeProcess, Membership

_log = logging.getLogger("thinwire")

_warned_of_two = threading.Event()  # set by the process's one warning
_warned_of_one_node = threading.Event()


def warn_of_two_communicators(matches_by_order: bool) -> None:
    """Log one warning per process if data runs over NCCL, torch also has a process group on NCCL,
    and an environment variable makes the two communicators hang or fail.

    The library launches from its own thread and torch from the caller's, so ranks may launch in
    different orders. NCCL orders two communicators only with NCCL_LAUNCH_ORDER_IMPLICIT=1, and
    then returns ncclInvalidUsage when two threads launch at the same time (NCCL_LAUNCH_RACE_FATAL;
    NCCL 2.30, src/misc/strongstream.cc). Without that variable the kernels of both must fit on the
    GPU at the same time, and be in different hardware queues.

    Args:
        matches_by_order: Communicator.matches_by_order(), which is True only over NCCL.
    """
    if not matches_by_order or not _torch_uses_nccl() or _warned_of_two.is_set():
        return
    found = []
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append("CUDA_DEVICE_MAX_CONNECTIONS=1 makes kernels of one wait behind the other's")
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0"):
        found.append("NCCL_LAUNCH_ORDER_IMPLICIT fails when two threads launch at the same time")
    if not found:
        return
    _warned_of_two.set()
    _log.warning(
        "thinwire and torch launch on two NCCL communicators from two threads, without an order "
        "that all ranks share: %s; unset it, or take transport='gloo'",
        " and ".join(found),
    )


def warn_where_nothing_is_gained(topology: str) -> None:
    """Log one warning per process if compression makes an exchange slower: over NCCL among the GPUs
    of one node with NVLink.

    Args:
        topology: Communicator.topology().
    """
    if "do not compress" in topology and not _warned_of_one_node.is_set():
        _warned_of_one_node.set()
        _log.warning("thinwire over NCCL: %s; leave compress() out on such a machine", topology)


def _torch_uses_nccl() -> bool:
    """Return whether torch's default process group uses NCCL, alone or with another backend."""
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()


class Session:
    """Owns the communicator and the waiter. After the first error it stays failed. Thread-safe."""

    def __init__(
        self, membership: Membership, config: Config, plan: Mapping[str, str] | None = None
    ) -> None:
        """InvalidArgumentError if this machine lacks something that the settings name.

        plan: as Group.connect() takes it."""
        check_here(config)
        self.config, self._plan = config, None if plan is None else dict(plan)
        self._membership = membership
        self.restored: checkpoint.Residuals = {}  # the residuals of the last load()
        self._first_step = 0
        self._counted_before: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._waiter: Waiter | None = None
        self._device: Device | None = None
        self._submitted: set[InFlight] = set()  # uses that complete() was not called for yet
        self.ledger = StepLedger()
        self._last: frozenset[Bucket] = frozenset()  # buckets of the last step that have a name
        self._error: errors.Error | None = None
        self._closed = False
        self._dissolved: tuple[checkpoint.Residuals, checkpoint.Residuals] | None = None
        self._home: HomeProcess | None = None  # the process that has connected
        self._end: weakref.finalize | None = None

    @property
    def rank(self) -> int:
        """This rank in the process group. InvalidArgumentError before that is initialized."""
        return self._membership.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group. InvalidArgumentError before that is initialized."""
        return self._membership.size

    def successor(
        self,
        membership: Membership,
        codec: str,
        momentum: float,
        plan: Mapping[str, str] | None,
        kept: checkpoint.Residuals,
        step: int,
    ) -> Session:
        """Close this session. Return one with another codec, momentum and plan that starts from the
        residuals `kept` at `step` and continues the counters. All ranks call it, with nothing in
        flight; allowed after a failure."""
        counts = self.stats()
        self.close()
        config = dataclasses.replace(self.config, codec=codec, momentum=momentum)
        session = Session(membership, config, plan)
        session.load(kept, step)
        session._counted_before = counts
        return session

    def stats(self) -> Counter[str]:
        """Return the counters of the communicator and of the sessions before this one. Waits until
        nothing is in flight."""
        self.wait_idle()
        return self.stats_so_far()

    def stats_so_far(self) -> Counter[str]:
        """Return the counters as stats(), but at once: what is in flight may be counted or not."""
        counts = Counter(self._counted_before)
        if self._communicator is not None:
            counts.update(self._communicator.stats())
        return counts

    def summary(self, steps: int | None = None) -> dict[str, Any]:
        """Return the counters in the form that users get: steps, all_reduces, raw_bytes (a ring
        allreduce of fp32 would have sent them), wire_bytes (sent by this rank),
        ratio = raw_bytes / wire_bytes, planned_chunks (chunks whose order was predicted), seconds
        by stage, summed over the lanes, and transport and topology, which are None before the first
        use and after close().

        steps: None: each allreduce counts as a step."""
        counts = self.stats()
        names = ("all_reduces", "raw_bytes", "wire_bytes", "planned_chunks")
        found = {name: int(counts.get(name, 0)) for name in names}
        wire, communicator = found["wire_bytes"], self._communicator
        return {
            "steps": found["all_reduces"] if steps is None else steps,
            **found,
            "ratio": found["raw_bytes"] / wire if wire else 1.0,
            "transport": None if communicator is None else communicator.transport(),
            "topology": None if communicator is None else communicator.topology(),
            "seconds": {stage: counts.get(f"{stage}_s", 0.0) for stage in STAGES},
        }

    def close_with(self, owner: object) -> None:
        """Close when `owner` is collected, or before the interpreter exits."""
        self._end = weakref.finalize(owner, self.close)

    @property
    def error(self) -> errors.Error | None:
        """The first failure; None if there was none."""
        return self._error

    @property
    def communicator(self) -> Communicator | None:
        """None before the first use and after close()."""
        return self._communicator

    def fail(self, error: errors.Error) -> errors.Error:
        """Keep the error unless there was one before; return the first."""
        with self._lock:
            if self._error is None:
                self._error = error
            return self._error

    def abort(self, error: errors.Error) -> errors.Error:
        """Fail the group on every rank, if it is connected, with this reason unless there was one
        before. Return the first reason."""
        first = self.fail(error)
        communicator = self._communicator
        if first is error and communicator is not None:
            communicator.fail(error)
        return first

    def connect(self, tensor: torch.Tensor) -> tuple[Communicator, Device, Waiter]:
        """Return the communicator, device and waiter for tensors on this tensor's device, which
        must be that of the first call. The first call blocks until all ranks make it. Raises the
        first error of this session, if there was one."""
        group = self._membership.group()  # its errors do not fail the session
        self._check_home()
        with self._lock:
            if self._error is not None:
                raise errors.again(self._error)
            if self._closed:
                raise errors.Error(
                    f"rank {self.rank}: this state was closed; make another, under DDP by wrapping "
                    "the model again and calling compress() on that"
                )
            if self._communicator is None:
                try:
                    self._connect(group, device_of(tensor))
                except errors.Error as error:
                    self._error = error
                    raise
            self._check_device(tensor)
            return self._communicator, self._device, self._waiter

    def _check_home(self) -> None:
        """InvalidArgumentError in a forked child, whose parent has the connections. Call it before
        any lock or wait: the child lacks the threads that would end them."""
        if self._home is not None:
            self._home.check("this connection")

    def _check_device(self, tensor: torch.Tensor) -> None:
        if str(tensor.device) != self._device.name:
            raise errors.InvalidArgumentError(
                f"rank {self.rank}: got a tensor on {tensor.device}, expected "
                f"{self._device.name} as the first one; keep them on one device"
            )

    def _connect(self, group: Group, device: Device) -> None:
        self._home = HomeProcess()
        plan = self._plan
        if plan is not None and "warm_up_steps" in plan:  # its end depends on the steps made
            plan = {**plan, "steps_before": str(self._first_step)}
        communicator = group.connect(dataclasses.replace(self.config, device=device.name), plan)
        communicator.leave_exit_to_owner()  # it would close before pending work is done
        try:
            checkpoint.write(communicator, self.restored)
            communicator.set_step(self._first_step)
        except errors.Error:
            communicator.close()
            raise
        self._communicator, self._device = communicator, device
        self._waiter = Waiter(device, self.fail)
        warn_of_two_communicators(communicator.matches_by_order())
        warn_where_nothing_is_gained(communicator.topology())

    def _launch(
        self,
        bucket: Bucket,
        tensor: torch.Tensor,
        communicator: Communicator,
        device: Device,
        result: torch.Tensor | None = None,
    ) -> comm.Work | comm.Bucket:
        """Hand a bucket to the library; no other code does. result: where the result goes; None: in
        place."""
        address = tensor.data_ptr()
        target = address if result is None else result.data_ptr()
        if bucket.parts and bucket.numel > 0:
            work = handle_of(bucket, communicator).start(address, target, device.stream())
            self.ledger.submitted(bucket)  # a rejected submission changes no residual
            return work
        if result is not None or (bucket.shape is not None and bucket.numel > 0):
            return handle_of(bucket, communicator).start(address, target, device.stream())
        return communicator.start(
            address, bucket.numel, bucket.dtype, bucket.op, bucket.name,
            bucket.segments, bucket.priority, device.stream(),
        )  # fmt: skip

    def start(
        self,
        bucket: Bucket,
        tensor: torch.Tensor,
        finish: Callable[[], None] | None = None,
        result: torch.Tensor | None = None,
    ) -> Pending:
        """Reduce a contiguous tensor, in place unless there is a `result`. The future of the result
        completes after `finish` has run: in the order of submission, or when Pending.wait() is
        called. Both tensors are kept alive until then."""
        communicator, device, waiter = self.connect(tensor)
        work = self._launch(bucket, tensor, communicator, device, result)
        in_flight = InFlight(bucket, tensor if result is None else result, work)
        return waiter.add(in_flight, functools.partial(self._on_mean, bucket, tensor, finish))

    def _on_mean(
        self, bucket: Bucket, _tensor: torch.Tensor, finish: Callable[[], None] | None
    ) -> None:
        self.ledger.came_back(bucket)
        if finish is not None:
            finish()

    def submit(
        self, bucket: Bucket, tensor: torch.Tensor, result: torch.Tensor | None = None
    ) -> InFlight:
        """Reduce a contiguous tensor, in place unless there is a `result`. The caller must call
        complete(), in any order."""
        communicator, device, _ = self.connect(tensor)
        work = self._launch(bucket, tensor, communicator, device, result)
        in_flight = InFlight(bucket, tensor, work)
        self._submitted.add(in_flight)
        return in_flight

    def end_step(self, *, repeats: bool | None) -> None:
        """Call after all of a training step was submitted. repeats: whether the next step will
        submit the same buckets; None: unknown."""
        buckets = self.ledger.end_step()
        communicator = self._communicator
        if communicator is None:
            return
        if repeats is None:
            named = frozenset(bucket for bucket in buckets if bucket.name is not None)
            like_the_last, self._last = named == self._last, named
            # If exchanges match by order, a predicted bucket that does not come would block all
            # later ones; if they match by tag, it is withdrawn.
            repeats = like_the_last and not communicator.matches_by_order()
        if repeats:
            communicator.end_step()
        else:
            communicator.forget_step()

    def complete(self, in_flight: InFlight) -> None:
        """Return when the tensor holds the result (on a GPU: for later work of the current stream).
        Raise the typed error of a failure."""
        try:
            in_flight.work.wait_stream(self._device.stream())
            self.ledger.came_back(in_flight.bucket)
        except errors.Error as error:
            raise errors.again(self.fail(error)) from None
        except BaseException as interruption:  # Ctrl-C: the result cannot be waited for again
            self.abort(  # this process may live on, and the peers would wait for its next step
                errors.Error(
                    f"rank {self.rank} was interrupted by {type(interruption).__name__} in the "
                    "middle of a step; call recover() on every rank, or end the program"
                )
            )
            raise
        finally:
            self._submitted.discard(in_flight)

    def load(self, residuals: checkpoint.Residuals, step: int) -> None:
        """Replace all residuals and momentum, and set the number of the next step, now or when the
        group is connected."""
        self.wait_idle()
        if self._communicator is not None:
            checkpoint.write(self._communicator, residuals)
            self._communicator.set_step(step)
        self.restored, self._first_step = residuals, step

    def replace(self, residuals: checkpoint.Residuals) -> None:
        """Replace the residuals and momentum of only these parameters, which no step has used since
        load()."""
        self.wait_idle()
        if self._communicator is not None:
            checkpoint.put(self._communicator, residuals)
        self.restored = {**self.restored, **residuals}

    def memory(self) -> checkpoint.Residuals:
        """Return the residuals and momentum of each parameter. Waits until nothing is in flight.
        Raises Error after close(), which drops them."""
        self.wait_idle()
        if self._communicator is None:
            if self._closed and self._home is not None:  # it was connected
                raise errors.Error("this state was closed; call state_dict() or save() before that")
            return self.restored
        return checkpoint.read(self._communicator, self.config.momentum != 0)

    def dissolve(self) -> tuple[checkpoint.Residuals, checkpoint.Residuals]:
        """Fail the group on every rank, unless it has failed, and wait until nothing is in flight.
        Return the residuals as they are now, and as they were before the last step."""
        self._check_home()
        if self._closed:
            raise errors.Error("this state was closed; create another, and load its state dict")
        communicator = self._communicator
        if communicator is None:
            return self.restored, self.restored
        if self._dissolved is not None:  # an earlier recovery was interrupted
            return self._dissolved
        self.abort(errors.Error(f"rank {self.rank} left the group to recover"))
        self.wait_idle()
        self._drain()
        now = self.memory()
        communicator.undo_residuals()
        self._dissolved = now, self.memory()
        return self._dissolved

    def wait_idle(self) -> None:
        """Return when nothing is in flight."""
        self._check_home()
        if self._waiter is not None:
            self._waiter.wait_idle()

    def describe(self) -> str:
        """Return, as text, what this rank waits for, and the engine's last events."""
        communicator = self._communicator
        return "not connected yet\n" if communicator is None else communicator.describe()

    def close(self) -> None:
        """Wait for pending work, and close the connections. If an exception ends this process, or
        if the peers wait for the rest of a step, fail the group instead, without waiting. A second
        call does nothing, and so does a call in a forked child."""
        if self._home is not None and not self._home.is_here():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            communicator, waiter = self._communicator, self._waiter
            self._communicator = self._waiter = None
        if self._end is not None:
            self._end.detach()  # it would keep this session alive as long as its owner
        if communicator is None:
            return
        reason = self._reason_to_abort(waiter.busy() or bool(self._submitted))
        if reason is not None:
            communicator.fail(errors.Error(f"rank {self.rank} {reason}"))
        waiter.close()
        self._drain()
        self._counted_before.update(communicator.stats())
        communicator.close()

    def _reason_to_abort(self, busy: bool) -> str | None:
        if (fatal := fatal_exception()) is not None:
            return f"ended on {one_line(fatal)}"
        return "left in the middle of a step" if busy and self.ledger.in_step else None

    def _drain(self) -> None:
        while self._submitted:
            try:
                self.complete(next(iter(self._submitted)))
            except errors.Error as error:  # no caller will wait for it
                _log.info("closing: %s", error)
