"""A TCP proxy between two ranks, which flips one bit of a tensor's bytes.

It parses what it needs of the stream: the challenge (transport/mesh/challenge.h), and then Gloo's
messages. Each begins with a preamble of six 64-bit words: the first is the size including the
payload, the third is the slot. Frames have even slots (transport/gloo/gloo_links.h): those of the
control plane, which carry no tensor, and those that contain small blocks."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

PREAMBLE = struct.Struct("<6Q")
PARCEL = struct.Struct("<QII")  # slot, bytes, sum
CONTROL_SLOT = 2
CHALLENGE_BYTES = (112, 40)  # hello, then proof one way; reply, then admission the other


class Proxy:
    """Stands between whoever connects to `port` and the rank that listens at `upstream`. It damages
    payload number `hit`, counted from 0, of those that the rank sends."""

    def __init__(self, upstream: tuple[str, int], hit: int) -> None:
        self._upstream, self._left = upstream, hit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.damaged = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; open ones stay until their ends close."""
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                caller, _ = self._listener.accept()
                rank = socket.create_connection(self._upstream)
                threading.Thread(target=self._connect, args=(caller, rank), daemon=True).start()

    def _connect(self, caller: socket.socket, rank: socket.socket) -> None:
        """Relay a connection in both directions, and close it when both have ended."""
        with caller, rank:
            ways = [
                threading.Thread(target=self._relay, args=way, daemon=True)
                for way in ((caller, rank, False), (rank, caller, True))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _relay(self, source: socket.socket, target: socket.socket, damages: bool) -> None:
        """Relay one direction. If its target is gone, keep reading: a connection that is closed
        with unread bytes is reset, and a reset overtakes the last message of the other
        direction."""
        with contextlib.suppress(OSError, EOFError):
            self._pass_on(source, target, damages)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while source.recv(1 << 16):
                pass

    def _pass_on(self, source: socket.socket, target: socket.socket, damages: bool) -> None:
        for count in CHALLENGE_BYTES:
            target.sendall(_exactly(source, count))
        while True:
            preamble = _exactly(source, PREAMBLE.size)
            size, _, slot, *_ = PREAMBLE.unpack(preamble)
            payload = bytearray(_exactly(source, size - PREAMBLE.size))
            if damages and payload and slot != CONTROL_SLOT:
                if self._left == 0:
                    payload[_middle(payload, slot)] ^= 0x10
                    self.damaged.set()
                self._left -= 1
            target.sendall(preamble + payload)


def _middle(payload: bytearray, slot: int) -> int:
    """Return the index of the byte in the middle of the block, or of a frame's first block."""
    if slot % 2 != 0:
        return len(payload) // 2
    return PARCEL.size + PARCEL.unpack_from(payload)[1] // 2


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
