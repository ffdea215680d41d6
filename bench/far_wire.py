"""Latency for a lab: a switch that holds every frame back for a while, in place of the bridge, for
kernels without netem.

    far_wire.py DELAY_MS PORT PORT...     in the switch's namespace; open_far_lab() starts it

Frames travel as the kernel hands them over, with their virtio-net header (packet(7),
PACKET_VNET_HDR), so that checksums and segmentation are still left to the far end. It costs about
an eighth of a core at 200 Mb/s. Ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 3, 263, 15, 4
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_PDEATHSIG = 1
HEADER = 10  # bytes of a virtio_net_hdr
FRAME = HEADER + 14 + 65536
BUFFER = 32 << 20  # bytes that a port may fall behind by


@contextlib.contextmanager
def open_far_lab(world: int, link: str, delay_ms: float) -> Iterator[lab.Lab]:
    """lab.open_lab, with frames that take delay_ms longer. RuntimeError if the system refuses, or
    if there is a delay and nothing to hold back."""
    if delay_ms and link == lab.LOOPBACK:
        raise RuntimeError("loopback has no wire to delay; take a shaped link")
    with lab.open_lab(world, link) as place:
        if not delay_ms:
            yield place
            return
        for port in place.ports:
            inside = ["ip", "-n", place.switch, "link", "set", port, "nomaster"]
            subprocess.run(inside, check=True)
        command = ["ip", "netns", "exec", place.switch, sys.executable, __file__, str(delay_ms)]
        switch = subprocess.Popen([*command, *place.ports], stdout=subprocess.PIPE)
        try:
            if not switch.stdout.readline():
                raise RuntimeError("the switch of the far lab did not start")
            yield place
        finally:
            switch.kill()
            switch.wait()


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    port.bind((name, 0))
    port.setblocking(False)
    return port


class Switch:
    def __init__(self, names: list[str], delay_s: float) -> None:
        self._ports = [open_port(name) for name in names]
        self._delay_s = delay_s
        self._held: deque[tuple[float, int, bytes]] = deque()  # until when, from which port
        self._home: dict[bytes, int] = {}  # MAC address to port

    def run(self) -> None:
        while True:
            wait = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            for port in select.select(self._ports, [], [], wait)[0]:  # to the microsecond
                self._take(self._ports.index(port))
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                self._pass_on(*self._held.popleft()[1:])

    def _take(self, number: int) -> None:
        while True:
            try:
                frame, address = self._ports[number].recvfrom(FRAME)
            except BlockingIOError:
                return
            if address[2] == PACKET_OUTGOING:  # what was passed on to this port
                continue
            self._held.append((time.monotonic() + self._delay_s, number, frame))

    def _pass_on(self, number: int, frame: bytes) -> None:
        target, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self._home[source] = number
        known = self._home.get(target)
        for to in range(len(self._ports)) if known is None else (known,):
            if to != number:
                self._send(to, frame)

    def _send(self, to: int, frame: bytes) -> None:
        try:
            self._ports[to].send(frame)
        except OSError:
            return  # the port's queue is full, or it has gone: a lost packet, as on any wire


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    delay_ms, *names = sys.argv[1:]
    switch = Switch(names, float(delay_ms) / 1000)
    print("ready", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
