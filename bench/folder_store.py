"""FolderStore: a thinwire.comm.Store for ranks that share only a folder. It does not import
thinwire, so it works with any version of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote

_POLL_S = 0.002


class FolderStore:
    """A store with a file for each key, which is written and then renamed."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        file = self._file(key)
        written = file.with_name(f"{file.name}.{os.getpid()}.part")
        written.write_bytes(value)
        written.rename(file)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key; return its value. The TimeoutError names the key."""
        file, end = self._file(key), time.monotonic() + timeout_s
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(_POLL_S)
        return file.read_bytes()
