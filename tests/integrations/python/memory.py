"""The bytes that this process has allocated, as the allocator counts them."""

from __future__ import annotations

import ctypes
import gc

import pytest


class _Mallinfo2(ctypes.Structure):
    """malloc.h's struct: uordblks is the bytes in use, hblkhd the bytes in separate mappings."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def bytes_in_use() -> int:
    gc.collect()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("mallinfo2 came with glibc 2.33")
    mallinfo2.restype = _Mallinfo2
    counted = mallinfo2()
    return counted.uordblks + counted.hblkhd
