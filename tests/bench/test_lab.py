"""The links of the network lab have the rates, delays and losses that the lab was asked for."""

import socket
import subprocess
import sys
import time

import pytest
from ranks import HANG_S
from torch.distributed import TCPStore

from bench import lab

REFUSAL = lab.can_shape()
shaped = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL or "shaped links can be made")
pytestmark = pytest.mark.slow

SERVER = """
import socket, sys
server = socket.create_server(("", 4000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 20):
            if len(data) < 9:
                connection.sendall(data)
"""
# Sends the bytes first, then waits for one byte to come back.
CLIENT = """
import socket, sys, time
peer, size, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with socket.create_connection((peer, 4000), timeout=timeout) as wire:
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.settimeout(timeout)
    start = time.monotonic()
    if size:
        wire.sendall(bytes(size))
        wire.shutdown(socket.SHUT_WR)
        wire.recv(1)
    else:
        wire.sendall(b"x")
        wire.recv(1)
    print(time.monotonic() - start)
"""


class Echo:
    """Runs a server on one host, and measures the links to it from the other hosts."""

    def __init__(self, place: lab.Lab, host: int) -> None:
        self._lab, self._host = place, host
        self._server = place.start(host, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        assert self._server.stdout.readline() == b"ready\n"

    def seconds(self, source: int, size: int = 0, timeout_s: float = HANG_S) -> float:
        """Return the seconds until `size` bytes have arrived (0: one round trip), infinity if they
        never do."""
        command = [
            sys.executable,
            "-c",
            CLIENT,
            self._lab.address(self._host),
            str(size),
            str(timeout_s),
        ]
        client = self._lab.start(source, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        out, _ = client.communicate(timeout=HANG_S)
        return float(out) if client.returncode == 0 else float("inf")

    def quickest(self, source: int, size: int = 0, *, below: float) -> float:
        """Return the smallest of measurements until one is below `below`: load only adds time."""
        least = float("inf")
        for _ in range(50):
            least = min(least, self.seconds(source, size))
            if least < below:
                break
        return least

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture
def echo():
    opened = []

    def open_echo(place: lab.Lab, host: int) -> Echo:
        opened.append(Echo(place, host))
        return opened[-1]

    yield open_echo
    for each in opened:
        each.close()


def test_impossible_labs_are_refused():
    with pytest.raises(ValueError, match="expected 'loopback'"):
        lab.check_link("fast")
    with (
        pytest.raises(ValueError, match="loopback has no link"),
        lab.open_lab(2, lab.LOOPBACK, delay_ms=1),
    ):
        pass
    with pytest.raises(ValueError, match="2 hosts, 1 links"), lab.open_lab(2, ["1gbit"]):
        pass


def test_ranks_know_who_they_are():
    place = lab.Lab(4, "1gbit", ("a", "b"), ranks_per_host=2)
    last = place.environment_of(3, 29500)
    assert (last["LOCAL_RANK"], last["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert place.command_of(2, ["x"])[1] == "--net=/run/netns/b"


def test_a_failed_rank_ends_the_others():
    with lab.open_lab(2, lab.LOOPBACK) as place:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 ended with 3"):
            place.run(["sh", "-c", '[ "$RANK" = 0 ] && exec sleep 1000; exit 3'], 500)
        assert time.monotonic() - start < 500  # rank 0 was killed in its sleep


@shaped
def test_each_host_has_a_rate_of_its_own(echo):
    with lab.open_lab(3, ["none", "80mbit", "160mbit"]) as place:
        size = 4_000_000
        one, two, zero = echo(place, 1), echo(place, 2), echo(place, 0)
        # The lower bounds hold whatever else the machine does: a token bucket lets no more than its
        # burst through early.
        assert one.seconds(0, size) > (size - 2 * lab.BURST_BYTES) * 8 / 80e6
        assert zero.seconds(1, size) > (size - 2 * lab.BURST_BYTES) * 8 / 80e6
        assert two.seconds(0, size) > (size - 2 * lab.BURST_BYTES) * 8 / 160e6
        limit = size * 8 / 80e6
        assert zero.quickest(2, size, below=limit) < limit, "others have no such limit"


@shaped
def test_frames_are_delayed_in_both_directions(echo):
    with lab.open_lab(2, "100mbit", delay_ms=40) as place:
        assert 0.080 <= echo(place, 1).quickest(0, below=0.2) < 0.2


@shaped
def test_frames_are_lost_at_the_asked_rate():
    with lab.open_lab(2, "none", loss=0.2) as place:
        code = (
            "import socket\nport = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "port.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE: it loses none\n"
            "port.bind(('', 4001))\nprint('ready', flush=True)\ncount = 0\n"
            "while port.recv(100) == b'x': count += 1\nprint(count)"
        )
        receiver = place.start(1, [sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert receiver.stdout.readline() == b"ready\n"
        send = (
            "import socket, time\nport = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "for _ in range(1000):\n"
            f"    port.sendto(b'x', ('{place.address(1)}', 4001)); time.sleep(.001)\n"
            "for _ in range(100):  # of which one will arrive\n"
            f"    port.sendto(b'end', ('{place.address(1)}', 4001))"
        )
        assert place.start(0, [sys.executable, "-c", send]).wait(HANG_S) == 0
        received = int(receiver.communicate(timeout=HANG_S)[0])
        assert 700 < received < 900  # of 1,000: 8 standard deviations around 800


def test_a_port_is_held_for_the_server_that_asked_for_it():
    port = lab.free_port()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass
    store = TCPStore("127.0.0.1", lab.free_port(), is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"


@shaped
def test_nothing_is_left_behind():
    def left() -> str:
        return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout

    with lab.open_lab(2, "1gbit", delay_ms=1) as place:
        assert all(name in left() for name in (*place.namespaces, place.switch))
    assert not [name for name in (*place.namespaces, place.switch) if name in left()]


PROBE = """
import sys
import torch
import torch.distributed as dist
from thinwire.torch.forecast import probe
dist.init_process_group("gloo")
print(probe((), torch.device("cpu")).link.latency_s)
dist.destroy_process_group()
"""


@shaped
def test_the_probe_sees_the_latency_of_a_far_link():
    with lab.open_lab(2, "1gbit", delay_ms=20) as place:
        command = [sys.executable, "-c", PROBE]
        ranks = [place.start(rank, command, stdout=subprocess.PIPE) for rank in range(2)]
        for rank in ranks:
            printed, _ = rank.communicate(timeout=HANG_S)
            assert 0.019 < float(printed) < 0.4  # far more than 0.02 where the machine is busy
