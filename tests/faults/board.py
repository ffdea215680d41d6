"""A rendezvous store of files, whose operations can be watched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class Board:
    """thinwire.comm.Store. before(operation, key) is called ahead of each operation."""

    def __init__(self, folder: Path, before: Callable[[str, str], None]) -> None:
        self._folder, self._before = folder, before

    def set(self, key: str, value: bytes) -> None:
        self._before("set", key)
        path = self._path(key)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_bytes(value)
        whole.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        self._before("get", key)
        end = time.monotonic() + timeout_s
        while not self._path(key).exists():
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(0.001)
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")
