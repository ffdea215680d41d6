"""Communicators of a device, over the C interface. CPU threads stand in for a GPU."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import thinwire
from thinwire import _library, config, errors
from thinwire.comm import Communicator

BUILD = Path(_library.path()).parents[2]
STAND_IN = BUILD / "tests/host_device/libthinwire_host_device_plugin.so"
NUMEL = 50_000


@pytest.fixture(scope="module")
def stand_in():
    """Allocate device memory: allocate(values) -> address; read(address) -> values."""
    if not STAND_IN.is_file():
        pytest.skip(f"{STAND_IN} is not built")
    try:
        _library.cuda_devices(str(STAND_IN))
    except errors.UnavailableError as error:
        pytest.skip(str(error))
    return StandIn()


class DeviceTable(ctypes.Structure):
    """The first fields of DeviceApi (kernels/device_api.h)."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("runtime_version", ctypes.c_int),
        ("error_text", ctypes.c_void_p),
        ("device_count", ctypes.c_void_p),
        ("driver_version", ctypes.c_void_p),
        ("device_of", ctypes.c_void_p),
        (
            "allocate",
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
            ),
        ),
    )


class StandIn:
    """Calls the entries of the library's table that tests need."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(STAND_IN))
        library.tw_cuda_api.restype = ctypes.POINTER(DeviceTable)
        table = library.tw_cuda_api().contents
        assert table.version == 13, "another version has its entries elsewhere: see device_api.h"
        self._allocate = table.allocate

    def put(self, value: float) -> ctypes.Array:
        """Return device memory of NUMEL floats; here the host can read it."""
        address = ctypes.c_void_p()
        assert self._allocate(0, NUMEL * 4, ctypes.byref(address)) == 0
        floats = (ctypes.c_float * NUMEL).from_address(address.value)
        floats[:] = [value] * NUMEL
        return floats


def run_ranks(body, **options) -> list:
    def be(rank: int):
        settings = config.Config(
            codec="int4", device="cuda", cuda_library=str(STAND_IN), local_group=body.__name__,
            timeout_s=20, min_bytes=0, **options,
        )  # fmt: skip
        communicator = Communicator(rank, 2, None, "device", settings)
        try:
            return body(rank, communicator)
        except errors.Error as error:
            return error
        finally:
            communicator.close()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(be, range(2)))


def test_start_and_wait(stand_in):
    def start_and_wait(rank, communicator):
        values = stand_in.put(rank + 1.0)
        address = ctypes.addressof(values)
        for _ in range(3):
            work = communicator.start(address, NUMEL, "float32", "mean", name="g")
            work.wait_stream(None)
        communicator.all_reduce(address, NUMEL, "float32", "mean")  # its queue is created later
        communicator.close()  # waits for the device
        return values[0], values[NUMEL - 1]

    first, second = run_ranks(start_and_wait)
    assert first == second
    assert first[0] == pytest.approx(1.5, abs=0.2)


def test_host_memory_is_refused(stand_in):
    def host_memory(_rank, communicator):
        values = (ctypes.c_float * NUMEL)()
        communicator.all_reduce(ctypes.addressof(values), NUMEL, "float32", "mean")

    for error in run_ranks(host_memory):
        assert isinstance(error, errors.InvalidArgumentError)
        assert "expected a tensor on that device" in str(error)


def test_a_missing_library_is_unavailable_in_one_sentence():
    settings = config.Config(device="cuda", cuda_library="/nowhere/libthinwire_cuda.so")
    with pytest.raises(thinwire.UnavailableError, match="keep gradients in host memory") as caught:
        Communicator(0, 1, None, "missing", settings)
    assert "\n" not in str(caught.value)
