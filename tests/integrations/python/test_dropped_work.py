"""Works that nobody waits for, as after the first of several has failed, leave nothing behind."""

import ctypes
import gc

import numpy as np
import pytest
from thinwire.comm import Communicator
from thinwire.config import Config

WORKS = 2000


class Mallinfo2(ctypes.Structure):
    """As malloc.h has it; uordblks are the bytes that are in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def bytes_in_use() -> int:
    gc.collect()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("mallinfo2 came with glibc 2.33")
    mallinfo2.restype = Mallinfo2
    return mallinfo2().uordblks


def test_a_dropped_work_is_freed():
    communicator = Communicator(0, 1, None, "dropped", Config(codec="int8"))
    tensor = np.ones(100, np.float32)

    def drop(count: int) -> None:
        for _ in range(count):
            communicator.start(tensor.ctypes.data, len(tensor), "float32", "sum", "tensor")

    drop(100)
    before = bytes_in_use()
    drop(WORKS)
    grown = bytes_in_use() - before
    communicator.close()
    assert grown < 16 * WORKS, f"{grown / WORKS:.0f} bytes a work"


def test_a_work_may_outlive_its_communicator():
    communicator = Communicator(0, 1, None, "outlived", Config(codec="int8"))
    tensor = np.ones(100, np.float32)
    work = communicator.start(tensor.ctypes.data, len(tensor), "float32", "sum", "tensor")
    communicator.close()
    del work
    assert (tensor == 1).all()
