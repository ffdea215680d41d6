"""Encryption by a lower layer: ranks that use the interface of a WireGuard tunnel send nothing
readable on the link. Userspace programs run the tunnels, in namespaces of our own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ranks import started, values_of
from thinwire import _library
from thinwire.comm import Communicator
from thinwire.config import Config

from bench.folder_store import FolderStore
from bench.lab import Lab, can_shape, open_lab

WORLD = 2
PATTERN = b"thinwire"  # two floats
CLONE_NEWNET = 0x40000000
SO_RCVBUFFORCE = 33
ETH_P_ALL, ETH_P_IP, IGMP, UDP = 3, 0x0800, 2, 17
DEADLINE_S = 100.0


pytestmark = pytest.mark.slow


@pytest.fixture
def lab() -> Iterator[Lab]:
    reason = can_shape()
    for tool in ("wireguard-go", "wg"):
        if shutil.which(tool) is None:
            reason = f"{tool} is missing (apt-get install wireguard-go wireguard-tools)"
    if reason:
        pytest.skip(f"a tunnel needs network namespaces and WireGuard: {reason}")
    with open_lab(WORLD, "1gbit") as lab:
        yield lab


def enter(namespace: str) -> None:
    """Move the calling thread into the namespace."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0


def listen_in(namespace: str) -> socket.socket:
    """Return a socket that gets a copy of all packets of the namespace's eth0."""
    opened = []

    def open_there() -> None:
        enter(namespace)
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        tap.bind(("eth0", 0))
        tap.setblocking(False)
        opened.append(tap)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    return opened[0]


def packets(tap: socket.socket) -> list[bytes]:
    heard = []
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(tap.recv(1 << 16))
    return heard


@contextlib.contextmanager
def tunnels(lab: Lab, folder: Path) -> Iterator[list[str]]:
    """Set up the tunnels' interfaces, one per rank, with the addresses 10.89.0.1, 10.89.0.2, ..."""
    names = [f"wg{rank}-{os.getpid()}" for rank in range(WORLD)]
    inside = [["ip", "netns", "exec", namespace] for namespace in lab.namespaces]
    keys = [text("wg", "genkey") for _ in range(WORLD)]
    running = [
        subprocess.Popen([*inside[rank], "wireguard-go", "-f", names[rank]],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        for rank, name in enumerate(names):
            await_file(Path(f"/var/run/wireguard/{name}.sock"))
            (folder / name).write_text(keys[rank])
            peer = 1 - rank
            for command in (
                ["wg", "set", name, "listen-port", "51820", "private-key", str(folder / name),
                 "peer", text("wg", "pubkey", given=keys[peer]),
                 "allowed-ips", f"10.89.0.{peer + 1}/32", "endpoint", f"10.88.0.{peer + 1}:51820"],
                ["ip", "addr", "add", f"10.89.0.{rank + 1}/24", "dev", name],
                ["ip", "link", "set", name, "up"],
            ):  # fmt: skip
                subprocess.run([*inside[rank], *command], check=True)
        yield names
    finally:
        for process in running:
            process.terminate()
            process.wait()


def text(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def await_file(path: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.01)


def reduce(rank: int, folder: Path, namespace: str, interface: str) -> bool:
    """Run one rank in its namespace: sum values whose bytes are the pattern, uncompressed."""
    enter(namespace)
    _library.load()
    values = np.frombuffer(PATTERN * 50_000, np.float32).copy()
    expected = WORLD * values
    config = Config(codec="fp32", interface=interface, timeout_s=DEADLINE_S)
    communicator = Communicator(rank, WORLD, FolderStore(folder), "tunnel", config)
    communicator.all_reduce(values.ctypes.data, len(values), "float32", "sum")
    communicator.close()
    return bool(np.array_equal(values, expected))


def heard_on_the_link(lab: Lab, folder: Path, interfaces: list[str]) -> list[bytes]:
    """Return all packets of an allreduce between ranks that listen on these interfaces."""
    arguments = [(r, folder, lab.namespaces[r], interfaces[r]) for r in range(WORLD)]
    tap = listen_in(lab.namespaces[0])
    with contextlib.closing(tap), started(reduce, arguments) as ranks:
        assert values_of(ranks) == [True] * WORLD, "a wrong sum"
        return packets(tap)


def protocol_of(packet: bytes) -> int | None:
    """Return the packet's IP protocol number; None for other packets, such as ARP's."""
    return packet[23] if struct.unpack_from("!H", packet, 12)[0] == ETH_P_IP else None


def test_without_a_tunnel_gradients_can_be_read(lab, tmp_path):
    heard = heard_on_the_link(lab, tmp_path, ["eth0"] * WORLD)
    assert any(PATTERN * 8 in packet for packet in heard)


def test_in_a_tunnel_nothing_can_be_read(lab, tmp_path):
    with tunnels(lab, tmp_path) as interfaces:
        heard = heard_on_the_link(lab, tmp_path, interfaces)
    assert sum(map(len, heard)) > len(PATTERN) * 50_000
    assert not any(PATTERN in packet for packet in heard)
    # The kernel sometimes reports its multicast groups, by IGMP.
    assert {protocol_of(packet) for packet in heard} <= {UDP, IGMP, None}
