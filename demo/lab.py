"""The network lab: ranks in network namespaces of their own, joined by links of a chosen rate.

    tw<pid>r0 --veth--+
    tw<pid>r1 --veth--+-- bridge, in the namespace tw<pid>sw

Both ends of every link have a token bucket (`tc tbf`), so each rank sends and receives at the rate.
Everything lives in these namespaces and goes with them. Needs `ip`, `tc`, and root or the right to
make user namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import InvalidArgumentError

LOOPBACK = "loopback"
_PORT = 29500
_SUBNET = "10.88.0"
_POLL_S = 0.05


@dataclass(frozen=True)
class Lab:
    """Where ranks run. `link`: the rate of each rank's link ("1gbit"), or "loopback"."""

    world: int
    link: str
    namespaces: tuple[str, ...] = ()  # one a rank; none on loopback
    switch: str = ""  # namespace of the bridge, and of a port for each rank

    @property
    def ports(self) -> tuple[str, ...]:
        """Devices in the switch, by rank."""
        return tuple(f"port{rank}" for rank in range(len(self.namespaces)))

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """Runs `command` as every rank, with torchrun's variables set.

        RuntimeError if a rank fails or the time is over; no rank outlives the call."""
        port = _PORT if self.namespaces else _free_port()
        ranks = [self._start(rank, port, command) for rank in range(self.world)]
        try:
            _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()

    def _start(self, rank: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        shaped = bool(self.namespaces)
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": f"{_SUBNET}.1" if shaped else "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0" if shaped else "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d can not look names up in there, and says so
            "PYTHONPATH": os.pathsep.join([_import_path(), os.environ.get("PYTHONPATH", "")]),
        }
        inside = ["ip", "netns", "exec", self.namespaces[rank]] if shaped else []
        return subprocess.Popen([*inside, *command], env=environment)


def check_link(link: str) -> None:
    """InvalidArgumentError unless it is loopback or a rate as `tc` reads it."""
    if link != LOOPBACK and not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmgt]?bit", link):
        raise InvalidArgumentError(
            f"--link is '{link}', expected '{LOOPBACK}', or a rate such as 100mbit or 1gbit"
        )


def become_root_of_namespaces() -> None:
    """Runs this program anew as root of a user namespace, where the system lets anybody do that;
    its network namespaces and its /run are its own. Else, or for root itself, does nothing."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    mount = "mount -t tmpfs tmpfs /run"
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False)
    if tried.returncode == 0:
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execvp("unshare", [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *again])


def can_shape() -> str:
    """Empty if this machine lets us shape links; else the reason and the fix. It opens a lab."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "not root (run it with sudo)"
    try:
        with open_lab(1, "1gbit"):
            return ""
    except (RuntimeError, OSError) as error:
        return str(error)


@contextlib.contextmanager
def open_lab(world: int, link: str) -> Iterator[Lab]:
    """A lab of `world` ranks at `link`, e.g. "100mbit", "1gbit", or "loopback". Removes everything
    at the end, also after SIGTERM. RuntimeError if the system refuses."""
    if link == LOOPBACK:
        yield Lab(world, LOOPBACK)
        return
    prefix = f"tw{os.getpid()}"
    switch = f"{prefix}sw"
    ranks = tuple(f"{prefix}r{rank}" for rank in range(world))
    with _exit_on_sigterm():
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for rank, namespace in enumerate(ranks):
                _plug(switch, namespace, rank, link)
            yield Lab(world, link, ranks, switch)
        finally:
            for namespace in (*ranks, switch):
                subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _plug(switch: str, namespace: str, rank: int, rate: str) -> None:
    port = f"port{rank}"
    _ip("netns", "add", namespace)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
        "netns", namespace)  # fmt: skip
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", namespace, "addr", "add", f"{_SUBNET}.{rank + 1}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    for where, device in ((namespace, "eth0"), (switch, port)):
        _command("tc", "-n", where, "qdisc", "add", "dev", device, "root",
                 "tbf", "rate", rate, "burst", "128kb", "latency", "20ms")  # fmt: skip


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(arguments)}` failed: {done.stderr.strip()}")


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    def leave(_signal: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes):
            return
        bad = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if bad:
            raise RuntimeError(", ".join(bad))
        if time.monotonic() > end:
            raise RuntimeError(f"the ranks took too long: {codes}")
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _import_path() -> str:
    root = Path(__file__).resolve().parents[1]
    return os.pathsep.join([str(root / "integrations" / "python"), str(root)])
