"""Threads with a GPU: they must not make contexts on other devices, and variables that make two
NCCL communicators unsafe are reported. A stand-in for torch.cuda records the calls, so no GPU is
needed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from thinwire.torch.exchange import session
from thinwire.torch.exchange.bucket import Bucket, InFlight
from thinwire.torch.exchange.waiter import CudaDevice, Waiter

GPU = torch.device("cuda", 3)


class RecordedCuda:
    """Records torch.cuda's calls in their order, with the thread of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object, int]] = []
        self.broken = False

    def _note(self, name: str, argument: object) -> None:
        self.calls.append((name, argument, threading.get_ident()))

    def set_device(self, device: object) -> None:
        self._note("set_device", device)
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def Stream(self, device: object) -> RecordedCuda:
        self._note("Stream", device)
        return self

    cuda_stream = 7

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self._note("stream", stream)
        yield

    def of_thread(self, ident: int) -> list[str]:
        return [name for name, _, thread in self.calls if thread == ident]


class Tensor:
    """A tensor on a GPU, with what the waiter uses of it."""

    def record_stream(self, _stream: object) -> None:
        pass


class Work:
    """Remembers the thread that waited for it."""

    def __init__(self) -> None:
        self.thread = 0

    def wait_stream(self, _stream: int | None) -> None:
        self.thread = threading.get_ident()


@pytest.fixture
def cuda(monkeypatch) -> RecordedCuda:
    recorded = RecordedCuda()
    for name in ("set_device", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorded, name))
    # A future of a GPU's tensors needs a GPU.
    monkeypatch.setattr(CudaDevice, "future", lambda _: torch.futures.Future())
    return recorded


def in_flight(work: Work) -> InFlight:
    return InFlight(Bucket("g", 4, "float32"), Tensor(), work)


def wait_on_a_waiter(waiter: Waiter) -> Work:
    work = Work()
    waiter.add(in_flight(work)).future.wait()
    return work


def test_the_waiters_thread_takes_its_gpu_before_it_touches_a_stream(cuda):
    waiter = Waiter(CudaDevice(GPU), lambda error: error)
    try:
        work = wait_on_a_waiter(waiter)
    finally:
        waiter.close()
    assert work.thread != threading.get_ident()
    assert cuda.of_thread(work.thread)[:2] == ["set_device", "stream"]
    devices = {device for name, device, _ in cuda.calls if name == "set_device"}
    assert devices == {GPU}
    assert "set_device" not in cuda.of_thread(threading.get_ident()), "the caller's stays its own"


def test_a_callbacks_waiter_takes_the_gpu_too(cuda):
    waiter = Waiter(CudaDevice(GPU), lambda error: error)
    inner = Work()
    done = threading.Event()

    def submit_more(_future: torch.futures.Future) -> None:
        waiter.add(in_flight(inner)).future.then(lambda _: done.set())

    held = threading.Event()
    first = Work()
    try:
        # The first work is held until its callback is registered. The callback then runs on the
        # thread.
        pending = waiter.add(in_flight(first), held.wait)
        pending.future.then(submit_more)
        held.set()
        assert done.wait(30)
    finally:
        waiter.close()
    assert inner.thread not in (first.thread, threading.get_ident())
    assert cuda.of_thread(inner.thread)[0] == "set_device"


def test_a_gpu_that_cannot_be_taken_does_not_leave_a_future_unfinished(cuda):
    cuda.broken = True
    waiter = Waiter(CudaDevice(GPU), lambda error: error)
    try:
        assert wait_on_a_waiter(waiter).thread
    finally:
        waiter.close()


@pytest.fixture
def beside_nccl(monkeypatch) -> None:
    """As if torch had a process group on NCCL; without the variables, and no warning given yet."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(session, "_warned_of_two", threading.Event())
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)


UNSAFE = [("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")]
SAFE = [("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "0"), ("PATH", "/")]


@pytest.mark.parametrize(("name", "value"), UNSAFE)
@pytest.mark.usefixtures("beside_nccl")
def test_an_unsafe_variable_is_named_once(monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    for _ in range(3):
        session.warn_of_two_communicators(True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert name in message and "transport='gloo'" in message
    assert sum(other in message for other, _ in UNSAFE) == 1, "only what is set"


@pytest.mark.usefixtures("beside_nccl")
def test_both_are_named_in_one_line(monkeypatch, caplog):
    for name, value in UNSAFE:
        monkeypatch.setenv(name, value)
    session.warn_of_two_communicators(True)
    (message,) = caplog.messages
    assert all(name in message for name, _ in UNSAFE)


@pytest.mark.parametrize(("name", "value"), SAFE)
@pytest.mark.usefixtures("beside_nccl")
def test_a_safe_environment_has_no_warning(monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    session.warn_of_two_communicators(True)
    assert not caplog.messages


@pytest.mark.usefixtures("beside_nccl")
def test_one_communicator_has_no_warning(monkeypatch, caplog):
    monkeypatch.setenv(*UNSAFE[0])
    session.warn_of_two_communicators(False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    session.warn_of_two_communicators(True)
    assert not caplog.messages


def test_a_node_where_compression_is_slower_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(session, "_warned_of_one_node", threading.Event())
    session.warn_where_nothing_is_gained("hierarchical: 2 nodes of 8 ranks")
    assert not caplog.messages
    for _ in range(2):
        session.warn_where_nothing_is_gained("flat, do not compress: all ranks are on one node")
    (message,) = caplog.messages
    assert "leave compress() out" in message


class OverNccl:
    """A communicator that connects. The text of transport() does not name its transport."""

    def topology(self) -> str:
        return "flat"

    def transport(self) -> str:
        return "words for people"

    def matches_by_order(self) -> bool:
        return True

    def leave_exit_to_owner(self) -> None:
        pass

    def set_step(self, _step: int) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Place:
    """A membership whose group connects at once."""

    rank, size = 0, 1

    def group(self) -> Place:
        return self

    def connect(self, *_: object) -> OverNccl:
        return OverNccl()


@pytest.mark.usefixtures("beside_nccl")
def test_a_session_looks_when_it_connects(monkeypatch, caplog):
    monkeypatch.setenv(*UNSAFE[0])
    monkeypatch.setattr(session.checkpoint, "write", lambda *_: None)
    one = session.Session(Place(), session.Config())
    assert not caplog.messages
    one.connect(torch.zeros(1))
    assert len(caplog.messages) == 1
    one.close()
