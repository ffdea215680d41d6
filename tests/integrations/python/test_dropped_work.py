"""Works that are never waited for, as after a failure of an earlier one, leave nothing behind."""

import numpy as np
from memory import bytes_in_use
from thinwire.comm import Communicator
from thinwire.config import Config

WORKS = 2000


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
