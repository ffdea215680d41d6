"""Nodes on one machine: IPC namespaces. Ranks in different namespaces share no memory, so UCX
serves inside each of them and Gloo between them. All share one network."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

CLONE_NEWIPC = 0x08000000

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def open_nodes(count: int) -> Iterator[list[str]]:
    """Open as many namespaces, and yield them as files that any process can enter. Yields none if
    the kernel refuses, as it does without root: all ranks are then on one node."""
    descriptors: list[int] = []

    def open_one() -> None:
        if _libc.unshare(CLONE_NEWIPC) == 0:  # of this thread
            descriptors.append(os.open("/proc/thread-self/ns/ipc", os.O_RDONLY))

    for _ in range(count):
        thread = threading.Thread(target=open_one)
        thread.start()
        thread.join()
    try:
        yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def inside(node: str | None) -> Iterator[None]:
    """The calling thread and threads that it starts are on the node; None: they do not move."""
    if node is None:
        yield
        return
    with open("/proc/thread-self/ns/ipc") as home:
        _enter(node)
        try:
            yield
        finally:
            _enter(f"/proc/thread-self/fd/{home.fileno()}")


def _enter(path: str) -> None:
    with open(path) as file:
        if _libc.setns(file.fileno(), CLONE_NEWIPC) != 0:
            raise OSError(ctypes.get_errno(), f"{path} can't be entered")
