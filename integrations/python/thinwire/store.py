"""The store on which the ranks of a group find each other, and how the C library calls it."""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

from thinwire import _library

_log = logging.getLogger("thinwire")


class Store(Protocol):
    """A key-value board on which ranks find each other. Keys are written once."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until somebody has set the key; raises when the time is over."""
        ...


class StoreCallbacks:
    """A Store as two C functions. Nothing is raised through C: a failure becomes a number."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.struct = _library.Store(
            None, _library.SET_FUNCTION(self._set), _library.GET_FUNCTION(self._get)
        )

    def _set(self, _context: int, key: bytes, value: int, size: int) -> int:
        try:
            self._store.set(key.decode(), ctypes.string_at(value, size))
        except Exception as error:  # C code can't carry it; the number says that it happened
            _log.warning("the rendezvous store refused %r: %s", key, error)
            return 1
        return 0

    def _get(self, _context, key: bytes, out: int, capacity: int, size, timeout_ms: int) -> int:
        try:
            value = self._store.get(key.decode(), timeout_ms / 1000)
        except Exception as error:
            _log.info("the rendezvous store has no %r: %s", key, error)
            return 1
        size[0] = len(value)
        ctypes.memmove(out, value, min(len(value), capacity))
        return 0
