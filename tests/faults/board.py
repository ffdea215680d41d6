"""A rendezvous store of files that lets a test watch its operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.folder_store import FolderStore


class Board(FolderStore):
    """Calls before(operation, key) before each operation."""

    def __init__(self, folder: Path, before: Callable[[str, str], None]) -> None:
        super().__init__(folder)
        self._before = before

    def set(self, key: str, value: bytes) -> None:
        self._before("set", key)
        super().set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self._before("get", key)
        return super().get(key, timeout_s)
