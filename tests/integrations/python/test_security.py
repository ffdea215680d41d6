"""The promises of SECURITY.md: where the ranks listen, and what is never written down."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import thinwire
import torch
from ranks import run
from thinwire.comm import Communicator
from thinwire.config import Config
from thinwire.torch import GradientExchange

CONNECTED, LISTENS = "01", "0A"  # states of /proc/net/tcp
SECRET = "hf_q7Zr1TbM0vXw"


def own_sockets() -> list[tuple[str, str]]:
    """Return (local address, state) of this process's TCP sockets."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # closed in the meantime
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.append((address_of(fields[1].partition(":")[0]), fields[3]))
    return found


def address_of(text: str) -> str:
    """Return the address in the kernel's hexadecimal words, each of which is in host byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


class Board:
    """A store for ranks in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values[key]


def test_a_wildcard_address_would_be_seen():
    with (
        socket.create_server(("0.0.0.0", 0)),
        socket.create_server(("::1", 0), family=socket.AF_INET6),
    ):
        assert {("0.0.0.0", LISTENS), ("::1", LISTENS)} <= set(own_sockets())


# GlooProcesses.ListensOnLoopbackOnly, in C++, tests where ranks listen before they are connected.
def test_ranks_are_connected_on_loopback_and_listen_no_more():
    before, board, running = set(own_sockets()), Board(), threading.Barrier(2)

    def be(rank: int) -> list[tuple[str, str]]:
        communicator = Communicator(rank, 2, board, "security", Config(timeout_s=100))
        values = (ctypes.c_float * 100_000)()
        communicator.all_reduce(ctypes.addressof(values), len(values), "float32", "sum")
        running.wait()
        sockets = own_sockets()
        running.wait()
        communicator.close()
        return sockets

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(be, range(2))
    kept = {*first, *second} - before
    assert {address for address, _ in kept} == {"127.0.0.1"}
    assert {state for _, state in kept} == {CONNECTED}, "nobody can connect any more"


def write_all_that_there_is(rank: int):
    """Write the log, trace, description and flight recorder of a group that fails."""
    exchange = GradientExchange(codec="int4", min_bytes=0)
    exchange.reduce({"x": torch.ones(5000)})
    with pytest.raises(thinwire.MismatchError) as caught:
        exchange.reduce({"x": torch.ones(5000 + rank)})
    text = exchange.describe()
    exchange.close()
    return f"{caught.value}\n{text}"


def test_nothing_of_the_environment_or_the_key_is_written_down(tmp_path, tmp_path_factory, capfd):
    key = tmp_path_factory.mktemp("key") / "group.key"
    key.write_text(SECRET * 2)
    key.chmod(0o600)
    environment = {
        "HF_TOKEN": SECRET,
        "THINWIRE_KEY_FILE": str(key),
        "THINWIRE_LOG": "debug",
        "THINWIRE_TRACE": str(tmp_path / "run.json"),
        "THINWIRE_FLIGHT": str(tmp_path / "flight.txt"),
    }
    texts = run(write_all_that_there_is, environment=environment)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"flight.rank0.txt", "flight.rank1.txt", "run.rank0.json"} <= set(written)
    texts += [*written.values(), *capfd.readouterr()]
    assert not [text for text in texts if SECRET in text]
