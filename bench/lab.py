"""The network lab: hosts in separate network namespaces, joined by links with chosen rates, delays
and losses.

    python -m bench.lab [--ranks_per_host 1] [--delay_ms 0] [--loss 0] 1gbit 2 COMMAND...

    tw<pid>h0  eth0 --veth-- port0 --+
    tw<pid>h1  eth0 --veth-- port1 --+-- the switch, in the namespace tw<pid>sw

Both ends of every link have a token bucket (`tc tbf`), so each host sends and receives at its
rate. With delays or losses, a user-space switch takes the place of the kernel's bridge and delays
every frame, because not all kernels have netem. It takes about 1/8 of a core at 200 Mb/s.

Everything is inside these namespaces and is removed with them; no traffic leaves them. Requires
`ip` and `tc` (package iproute2), and root or the right to create user namespaces. `bench/`, the
tests and the demo use this lab."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LOOPBACK = "loopback"  # no namespaces: all ranks share the machine's loopback interface
NONE = "none"  # a host's link without a limit
SKIPPED = 77  # exit status of this program if the system allows no lab
PORT = 29500  # of the rendezvous, in a lab with namespaces
SUBNET = "10.88.0"
BURST_BYTES = 128 << 10  # of a token bucket
QUEUE_S = 0.02  # a bucket's queue holds as much as the link sends in this time
POLL_S = 0.02
TIMEOUT_S = 3600.0  # seconds for a command of this program


@dataclass(frozen=True)
class Lab:
    """The hosts of the ranks. Rank r is on host r // ranks_per_host."""

    world: int
    link: str  # of every host, or one for each, separated by commas; LOOPBACK
    namespaces: tuple[str, ...] = ()  # one per host; none on loopback
    switch: str = ""  # the namespace of the switch
    ranks_per_host: int = 1

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host's eth0."""
        return f"{SUBNET}.{host + 1}" if self.namespaces else "127.0.0.1"

    def command_of(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return `command` wrapped to run in the rank's namespace. It keeps the file systems, so
        that ranks of one host share memory."""
        if not self.namespaces:
            return list(command)
        namespace = self.namespaces[rank // self.ranks_per_host]
        return ["nsenter", f"--net=/run/netns/{namespace}", *command]

    def environment_of(self, rank: int, port: int) -> dict[str, str]:
        """Return the variables that torchrun would set."""
        local = self.ranks_per_host if self.namespaces else self.world
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0" if self.namespaces else "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that it cannot look up names there
        }

    def start(
        self,
        rank: int,
        command: Sequence[str],
        port: int = PORT,
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[bytes]:
        """Start `command` as one rank. options: of subprocess.Popen. The caller waits for it."""
        variables = os.environ | self.environment_of(rank, port) | dict(environment or {})
        return subprocess.Popen(self.command_of(rank, command), env=variables, **options)

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """Run `command` as every rank. RuntimeError if a rank fails, or after timeout_s seconds; no
        rank outlives the call."""
        port = PORT if self.namespaces else free_port()
        quiet = {"preexec_fn": ignore_interrupts}
        ranks = [self.start(rank, command, port, **quiet) for rank in range(self.world)]
        try:
            _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def ignore_interrupts() -> None:
    """In a new process: ignore Ctrl-C; the parent gets it and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_link(link: str) -> None:
    """ValueError unless `link` is LOOPBACK, NONE, or a rate in the syntax of `tc`."""
    if link not in (LOOPBACK, NONE) and not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmgt]?bit", link):
        raise ValueError(
            f"link is '{link}', expected '{LOOPBACK}', or a rate such as 100mbit or 1gbit"
        )


def bits_per_second(rate: str) -> float:
    """Return a rate of `tc` as a number; infinity for LOOPBACK and NONE."""
    if rate in (LOOPBACK, NONE):
        return float("inf")
    number, unit = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate).groups()
    return float(number) * 1000.0 ** " kmgt".index(unit or " ")


def become_root_of_namespaces() -> None:
    """Run this program again as root of a user namespace, if the system allows that for any user.
    It then has its own network namespaces and /run. No-op for root."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    mount = "mount -t tmpfs tmpfs /run"
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False)
    if tried.returncode == 0:
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execvp("unshare", [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *again])


def can_shape() -> str:
    """Return "" if this machine lets us shape links, else the reason and the fix. It creates a
    small lab to find out."""
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "not root (run it with sudo)"
    try:
        with open_lab(1, "1gbit"):
            return ""
    except (RuntimeError, OSError) as error:
        return str(error)


@contextlib.contextmanager
def open_lab(
    hosts: int,
    link: str | Sequence[str],
    *,
    ranks_per_host: int = 1,
    delay_ms: float = 0.0,
    loss: float = 0.0,
) -> Iterator[Lab]:
    """A lab that is removed at the end, also after SIGTERM.

    link: the rate of each host's link in both directions ("100mbit", NONE), one for all or one for
      each; or LOOPBACK, which has no delays.
    delay_ms, loss: of every pair and direction: the one-way delay, and the probability that a frame
      is dropped (a frame is what the kernel passes at once, up to 64 KiB of a stream).

    RuntimeError if the system refuses; ValueError for wrong arguments."""
    links = [link] * hosts if isinstance(link, str) else list(link)
    if len(links) != hosts:
        raise ValueError(f"{hosts} hosts, {len(links)} links")
    for rate in links:
        check_link(rate)
    switched = bool(delay_ms or loss)
    if LOOPBACK in links:
        if switched or set(links) != {LOOPBACK}:
            raise ValueError(
                "loopback has no link to delay or to share; take a shaped link or 'none'"
            )
        yield Lab(hosts * ranks_per_host, LOOPBACK, ranks_per_host=ranks_per_host)
        return
    prefix = f"tw{os.getpid()}"
    switch, names = f"{prefix}sw", tuple(f"{prefix}h{host}" for host in range(hosts))
    passing = None
    with _exit_on_sigterm():
        try:
            _ip("netns", "add", switch)
            for host, name in enumerate(names):
                _plug(switch, name, host, links[host])
            if switched:
                passing = _start_switch(switch, hosts, delay_ms / 1e3, loss)
            else:
                _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                _ip("-n", switch, "link", "set", "bridge", "up")
                for host in range(hosts):
                    _ip("-n", switch, "link", "set", f"port{host}", "master", "bridge")
            told = links[0] if len(set(links)) == 1 else ",".join(links)
            yield Lab(hosts * ranks_per_host, told, names, switch, ranks_per_host)
        finally:
            if passing is not None:
                passing.kill()
                passing.wait()
            for name in (*names, switch):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


_held_ports: list[socket.socket] = []  # bound but not listening, until this process ends


def free_port() -> int:
    """Return a TCP port of loopback that the system gives to no other process while this process
    lives. A server that sets SO_REUSEADDR, as torch's store does, can listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held_ports.append(held)
    return held.getsockname()[1]


def _plug(switch: str, name: str, host: int, rate: str) -> None:
    port = f"port{host}"
    _ip("netns", "add", name)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", switch, "link", "set", port, "up")
    _ip("-n", name, "addr", "add", f"{SUBNET}.{host + 1}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    if rate != NONE:
        bucket = f"tbf rate {rate} burst {BURST_BYTES} latency {round(1e3 * QUEUE_S)}ms"
        for where, device in ((name, "eth0"), (switch, port)):
            _command(*f"tc -n {where} qdisc add dev {device} root {bucket}".split())


def _start_switch(switch: str, hosts: int, delay_s: float, loss: float) -> subprocess.Popen[bytes]:
    command = ["nsenter", f"--net=/run/netns/{switch}", sys.executable, __file__]
    command += ["--switch", str(hosts), str(delay_s), str(loss)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=ignore_interrupts)
    if not process.stdout.readline():
        process.kill()
        process.wait()
        raise RuntimeError("the user-space switch did not start")
    return process


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
        time.sleep(POLL_S)


# The user-space switch. It passes frames as it gets them from the kernel, with their virtio-net
# header (packet(7), PACKET_VNET_HDR), so that the receiver does checksums and segmentation.

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 3, 263, 15, 4
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_PDEATHSIG = 1
HEADER = 10  # bytes of a virtio_net_hdr
FRAME = HEADER + 14 + 65536
BUFFER = 32 << 20  # bytes of a port's socket buffer


class Switch:
    """Passes frames between ports, each after the delay. Single-threaded; run() never returns."""

    def __init__(self, hosts: int, delay_s: float, loss: float) -> None:
        self._ports = [self._open(f"port{host}") for host in range(hosts)]
        self._number = {port.fileno(): number for number, port in enumerate(self._ports)}
        self._delay_s, self._loss = delay_s, loss
        self._held: deque[tuple[float, int, bytes]] = deque()  # (time to send, port, frame)
        self._home: dict[bytes, int] = {}  # MAC address to port
        self._random = random.Random(0)

    @staticmethod
    def _open(name: str) -> socket.socket:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
        port.bind((name, 0))
        port.setblocking(False)
        return port

    def run(self) -> None:
        poller = select.epoll()
        for descriptor in self._number:
            poller.register(descriptor, select.EPOLLIN)
        while True:
            wait = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            for descriptor, _ in poller.poll(wait):
                self._take(self._number[descriptor])
            while self._held and self._held[0][0] <= time.monotonic():
                _, to, frame = self._held.popleft()
                with contextlib.suppress(OSError):  # a full queue drops the frame
                    self._ports[to].send(frame)

    def _take(self, number: int) -> None:
        while True:
            try:
                frame, address = self._ports[number].recvfrom(FRAME)
            except BlockingIOError:
                return
            if address[2] == PACKET_OUTGOING:  # a frame that was sent through this port
                continue
            target, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            self._home[source] = number
            known = self._home.get(target)
            until = time.monotonic() + self._delay_s
            for to in range(len(self._ports)) if known is None else (known,):
                if to != number and self._random.random() >= self._loss:
                    self._held.append((until, to, frame))


def main() -> int:
    if sys.argv[1:2] == ["--switch"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        hosts, delay_s, loss = sys.argv[2:]
        switch = Switch(int(hosts), float(delay_s), float(loss))
        print("ready", flush=True)
        switch.run()
        return 0
    parser = argparse.ArgumentParser(description="Runs a command as every rank of a network lab.")
    parser.add_argument(
        "link", help="the rate of every host's link, such as 1gbit; 'none'; or 'loopback'"
    )
    parser.add_argument("hosts", type=int)
    parser.add_argument("--ranks_per_host", type=int, default=1)
    parser.add_argument("--delay_ms", type=float, default=0.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.0, help="probability of a frame")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    refusal = "" if arguments.link == LOOPBACK else can_shape()
    if refusal:
        print(f"skipped: {refusal}", file=sys.stderr)
        return SKIPPED
    try:
        with open_lab(
            arguments.hosts, arguments.link, ranks_per_host=arguments.ranks_per_host,
            delay_ms=arguments.delay_ms, loss=arguments.loss,
        ) as place:  # fmt: skip
            place.run(arguments.command, TIMEOUT_S)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
