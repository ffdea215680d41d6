"""A client of torch's TCPStore that does not need torch, for processes that only serve: importing
torch would take them seconds.

The messages are those of torch/csrc/distributed/c10d/TCPStore.cpp since 2.1, in the machine's byte
order: a query's number, then texts and values, each as its length in 8 bytes and its bytes."""

from __future__ import annotations

import socket
import struct
import time

from thinwire.comm import poll
from thinwire.errors import UnavailableError

_VALIDATE, _SET, _GET, _ADD, _CHECK = 0, 1, 3, 4, 5
_MAGIC = 0x3C85F7CE
_READY = 0
_PAUSE_S = 0.05  # seconds between attempts to connect


class TcpStore:
    """A thinwire.comm.Store at `address` and `port`, where a torch.distributed.TCPStore listens;
    its keys begin with `prefix`, as those of a PrefixStore. Not thread-safe.

    Raises UnavailableError if nothing listens there within timeout_s seconds, and when the
    connection ends."""

    def __init__(self, address: str, port: int, prefix: str, timeout_s: float) -> None:
        self._place = f"{address}:{port}"
        self._prefix = f"/{prefix}/" if prefix else "/"
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.1, end - time.monotonic())
            try:
                self._socket = socket.create_connection((address, port), timeout=left)
                break
            except UnicodeError as error:  # such as of "a..b" or a label of 64 characters
                raise self._gone(f"this is no name of a host, {error}") from None
            except OSError as error:
                if time.monotonic() + _PAUSE_S > end:
                    raise self._gone(f"nothing could be reached within {timeout_s:g} s, {error}") \
                        from None  # fmt: skip
                time.sleep(_PAUSE_S)
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(struct.pack("=BI", _VALIDATE, _MAGIC))

    def come(self) -> None:
        """Count as one of the world_size processes that the store's owner waits for."""
        self._send(struct.pack("=B", _ADD) + _text("init/") + struct.pack("=q", 1))
        if not 0 < struct.unpack("=q", self._receive(8))[0] < 1 << 31:  # this process counts
            raise self._gone("what listens there is no TCPStore of torch")

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is initially 0; return the sum."""
        self._send(struct.pack("=B", _ADD) + self._key(key) + struct.pack("=q", amount))
        return struct.unpack("=q", self._receive(8))[0]

    def set(self, key: str, value: bytes) -> None:
        self._send(struct.pack("=B", _SET) + self._key(key) + _length(value) + value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key; return its value. Raises TimeoutError after timeout_s seconds."""
        poll(self.has, key, timeout_s)
        self._send(struct.pack("=B", _GET) + self._key(key))
        return self._receive(struct.unpack("=Q", self._receive(8))[0])

    def has(self, key: str) -> bool:
        """Return whether the key is set, without waiting for it."""
        self._send(struct.pack("=BQ", _CHECK, 1) + self._key(key))
        return self._receive(1)[0] == _READY

    def close(self) -> None:
        self._socket.close()

    def _key(self, key: str) -> bytes:
        return _text(self._prefix + key)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._gone(str(error)) from error

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except OSError as error:
                raise self._gone(str(error)) from error
            if not part:
                raise self._gone("it has closed the connection")
            data += part
        return bytes(data)

    def _gone(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"the rendezvous store at {self._place}, which rank 0 or torchrun holds: {why}"
        )


def _length(value: bytes) -> bytes:
    return struct.pack("=Q", len(value))


def _text(text: str) -> bytes:
    return _length(text.encode()) + text.encode()
