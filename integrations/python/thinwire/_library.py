"""libthinwire.so: finds and loads it; its structs and functions are those of
integrations/c/thinwire.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)  # fmt: skip
from pathlib import Path

from thinwire import config, errors
from thinwire.options import FIELDS

SET_FUNCTION = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
GET_FUNCTION = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_size_t), c_int
)


class Store(ctypes.Structure):
    """tw_store"""

    _fields_ = [("context", c_void_p), ("set", SET_FUNCTION), ("get", GET_FUNCTION)]


# The C types of tw_options' fields.
_TYPES = {
    "size_t": c_size_t,
    "int": c_int,
    "float": c_float,
    "const char*": c_char_p,
    "tw_store": Store,
}


class Options(ctypes.Structure):
    """tw_options"""

    _fields_ = [(option.field, _TYPES[option.c_type]) for option in FIELDS]


class Segment(ctypes.Structure):
    """tw_segment"""

    _fields_ = [
        ("name", c_char_p),
        ("offset", c_size_t),
        ("count", c_size_t),
        ("total", c_size_t),
        ("codec", c_size_t),
        ("absent", c_int),
    ]


class Stats(ctypes.Structure):
    """tw_stats"""

    _fields_ = [
        *((name, c_uint64) for name in ("all_reduces", "raw_bytes", "wire_bytes")),
        ("planned_chunks", c_uint64),
        *((f"{stage}_s", c_double) for stage in config.STAGES),
    ]


class Codec(ctypes.Structure):
    """tw_codec"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("help", c_char_p),
        ("spec", c_char * 256),
        ("up", c_char * 128),
        ("down", c_char * 128),
        ("up_bits", c_double),
        ("down_bits", c_double),
        ("entries", c_int),
        ("uses_feedback", c_int),
        ("has_kernels", c_int),
        ("momentum", c_int),
        ("num_parameters", c_size_t),
    ]


class Parameter(ctypes.Structure):
    """tw_parameter"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("key", c_char_p),
        ("range", c_char_p),
        ("help", c_char_p),
        ("default_value", c_char * 64),
        ("value", c_char * 64),
    ]


class Layer(ctypes.Structure):
    """tw_layer"""

    _fields_ = [("numel", c_size_t), ("forward_s", c_double), ("backward_s", c_double)]


class Nodes(ctypes.Structure):
    """tw_nodes"""

    _fields_ = [
        ("local_size", c_size_t),
        ("inside_bytes_per_s", c_double),
        ("between_bytes_per_s", c_double),
    ]


class Simulation(ctypes.Structure):
    """tw_simulation"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("options", POINTER(Options)),
        ("layers", POINTER(Layer)),
        ("num_layers", c_size_t),
        ("between_s", c_double),
        ("barrier", c_int),
        ("planned", c_int),
        *(
            (name, c_double)
            for name in (
                "bytes_per_s", "latency_s", "burst_bytes", "overhead_s",
                "encode_s", "reduce_s", "decode_s", "cpu_s_per_byte", "contention",
            )
        ),
        ("steps", c_int),
        ("inside_bytes_per_s", c_double),
    ]  # fmt: skip


# Functions that return something other than a tw_status.
_RESULTS = {
    "tw_version": c_char_p,
    "tw_last_error": c_char_p,
    "tw_simd_target": c_char_p,
    "tw_codec_name": c_char_p,
    "tw_digest": c_uint64,
    "tw_options_init_sized": None,
    "tw_comm_destroy": None,
    "tw_work_destroy": None,
    "tw_bucket_destroy": None,
    "tw_kv_options_init_sized": None,
    "tw_kv_destroy": None,
}

_CALL = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]


class BucketInfo(ctypes.Structure):
    """tw_bucket_info."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("count", c_size_t),
        ("dtype", c_int),
        ("op", c_int),
        ("collective", c_int),
        ("priority", c_int),
        ("segments", POINTER(Segment)),
        ("num_segments", c_size_t),
        ("shape", c_char_p),
    )


class ResidualArray(ctypes.Structure):
    """tw_residual_array."""

    _fields_ = (
        ("parameter", c_char_p),
        ("array", c_char_p),
        ("values", c_void_p),
        ("numel", c_size_t),
    )


class KvOptions(ctypes.Structure):
    """tw_kv_options."""

    _fields_ = (
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("rank", "workers", "servers", "timeout_ms")),
        ("store", Store),
        *((name, c_char_p) for name in ("local_group", "store_path", "group", "mode", "codec")),
        ("slice_elements", c_size_t),
        ("bigarray_bound", c_size_t),
        *(
            (name, c_char_p)
            for name in ("key_file", "interface_name", "rendezvous_host", "zmq_library", "journal")
        ),
    )


class KvTensor(ctypes.Structure):
    """tw_kv_tensor."""

    _fields_ = (
        *(("key", c_char_p), ("values", c_void_p), ("count", c_size_t), ("dtype", c_int)),
        ("width", c_size_t),
    )


class KvWork(ctypes.Structure):
    """tw_kv_work."""

    _fields_ = (*((name, c_uint64) for name in ("epoch", "first", "count")), ("waited", c_int))


_KV_TENSOR = [c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int]
_KV_ROWS = [c_void_p, c_char_p, c_void_p, c_size_t, *_KV_TENSOR[2:]]

_ARGUMENTS: dict[str, list[object]] = {
    "tw_version": [],
    "tw_last_error": [],
    "tw_simd_target": [],
    "tw_options_init_sized": [POINTER(Options), c_size_t],
    "tw_comm_create": [POINTER(Options), POINTER(c_void_p)],
    "tw_comm_abort": [c_void_p],
    "tw_comm_fail": [c_void_p, c_int, c_char_p],
    "tw_comm_destroy": [c_void_p],
    "tw_all_reduce": _CALL,
    "tw_all_reduce_async": [*_CALL, c_char_p, c_int, POINTER(c_void_p)],
    "tw_all_reduce_segments": [
        *_CALL, c_char_p, c_int, POINTER(Segment), c_size_t, POINTER(c_void_p),
    ],
    "tw_wait": [c_void_p],
    "tw_wait_stream": [c_void_p, c_void_p],
    "tw_work_destroy": [c_void_p],
    "tw_bucket_create": [c_void_p, POINTER(BucketInfo), POINTER(c_void_p)],
    "tw_bucket_start": [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_size_t],
    "tw_bucket_wait": [c_void_p],
    "tw_bucket_wait_stream": [c_void_p, c_void_p],
    "tw_bucket_destroy": [c_void_p],
    "tw_comm_describe": [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)],
    "tw_cuda_device_count": [c_char_p, POINTER(c_int)],
    "tw_encoded_bytes": [c_char_p, c_size_t, POINTER(c_size_t)],
    "tw_encode": [
        c_char_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_size_t),
    ],
    "tw_decode": [c_char_p, c_void_p, c_size_t, c_void_p, c_size_t],
    "tw_decode_mean": [
        c_char_p, POINTER(c_void_p), c_size_t, POINTER(c_float), c_size_t, c_size_t, c_void_p,
        c_size_t, POINTER(c_double),
    ],
    "tw_codec_name": [c_size_t],
    "tw_codec_info": [c_char_p, POINTER(Codec)],
    "tw_codec_parameter": [c_char_p, c_size_t, POINTER(Parameter)],
    "tw_comm_stats": [c_void_p, POINTER(Stats)],
    "tw_comm_codec": [c_void_p, c_size_t, c_char_p, c_size_t],
    "tw_comm_transport": [c_void_p, c_char_p, c_size_t],
    "tw_comm_matches_by_order": [c_void_p, POINTER(c_int)],
    "tw_comm_topology": [c_void_p, c_char_p, c_size_t],
    "tw_comm_nodes": [c_void_p, POINTER(Nodes)],
    "tw_ucx_version": [c_char_p, c_char_p, c_size_t],
    "tw_zmq_version": [c_char_p, c_char_p, c_size_t],
    "tw_nccl_version": [c_char_p, c_char_p, c_size_t],
    "tw_comm_goes_raw": [c_void_p, c_size_t, c_int, POINTER(c_int)],
    "tw_comm_set_step": [c_void_p, c_uint64],
    "tw_comm_end_step": [c_void_p],
    "tw_comm_forget_step": [c_void_p],
    "tw_simulate": [POINTER(Simulation), POINTER(c_double), POINTER(c_double)],
    "tw_residual_count": [c_void_p, POINTER(c_size_t)],
    "tw_residual_info": [c_void_p, c_size_t, c_char_p, c_size_t, POINTER(c_size_t)],
    "tw_residual_get": [c_void_p, c_char_p, c_void_p, c_void_p, c_void_p, c_size_t],
    "tw_residual_undo": [c_void_p],
    "tw_digest": [c_void_p, c_size_t],
    "tw_residual_set": [c_void_p, c_char_p, c_void_p, c_void_p, c_void_p, c_size_t],
    "tw_residual_get_all": [c_void_p, POINTER(ResidualArray), c_size_t],
    "tw_residual_set_all": [c_void_p, POINTER(ResidualArray), c_size_t],
    "tw_kv_options_init_sized": [POINTER(KvOptions), c_size_t],
    "tw_kv_serve": [POINTER(KvOptions)],
    "tw_kv_create": [POINTER(KvOptions), POINTER(c_void_p)],
    "tw_kv_destroy": [c_void_p],
    "tw_kv_set_codec": [c_void_p, c_char_p],
    "tw_kv_init": [c_void_p, POINTER(KvTensor), c_size_t],
    "tw_kv_push": [*_KV_TENSOR, c_double],
    "tw_kv_pull": _KV_TENSOR,
    "tw_kv_push_pull": [
        c_void_p, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_double,
    ],
    "tw_kv_push_rows": [*_KV_ROWS, c_double],
    "tw_kv_pull_rows": _KV_ROWS,
    "tw_kv_push_pull_rows": [*_KV_ROWS[:6], *_KV_ROWS[2:], c_double],
    "tw_kv_wait": [c_void_p, c_char_p],
    "tw_kv_set_optimizer": [c_void_p, c_char_p],
    "tw_kv_barrier": [c_void_p],
    "tw_kv_save": [c_void_p, c_char_p],
    "tw_kv_load": [c_void_p, c_char_p],
    "tw_kv_describe": [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)],
    "tw_kv_bytes_sent": [c_void_p, POINTER(c_uint64)],
    "tw_kv_has_joined": [c_void_p, POINTER(c_int)],
    "tw_kv_take": [c_void_p, c_uint32, *[c_uint64] * 4, POINTER(KvWork)],
}  # fmt: skip


def candidates() -> list[Path]:
    """Return the paths of the library in the order of the search; the first that exists is used."""
    named = config.library_path()
    if named is not None:
        return [named]
    package = Path(__file__).resolve().parent
    return [
        package / "lib" / "libthinwire.so",
        package.parent.parent.parent / "build" / "integrations" / "c" / "libthinwire.so",
    ]


def path() -> Path:
    """Return the library's file. UnavailableError if there is none."""
    for candidate in candidates():
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates())
    raise errors.UnavailableError(
        f"libthinwire.so was not found at {looked}: build it with `make build`, install the wheel, "
        "or set THINWIRE_LIBRARY to its path."
    )


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, which is loaded once. UnavailableError if it is missing or of another
    version."""
    file = path()
    try:
        library = ctypes.CDLL(str(file))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _RESULTS.get(name, c_int)
    except (OSError, AttributeError) as error:
        raise errors.UnavailableError(
            f"{file} does not load ({error}): build it on this machine with `make build`, or "
            "install the wheel of this version."
        ) from error
    return library


def options_of(settings: config.Config) -> Options:
    """Return tw_options with these settings; the caller sets rank, size and the store."""
    options = Options()
    load().tw_options_init_sized(ctypes.byref(options), ctypes.sizeof(options))
    for option in FIELDS:
        if option.setting is not None:
            value = getattr(settings, option.setting)
            setattr(options, option.field, option.kind.to_c(value))
    return options


def cuda_devices(cuda_library: str | None = None) -> int:
    """Return the number of usable GPUs. UnavailableError, with the reason, if there is none."""
    count = c_int()
    named = None if cuda_library is None else cuda_library.encode()
    check(load().tw_cuda_device_count(named, ctypes.byref(count)))
    return count.value


def ucx_version(ucx_library: str | None = None) -> str:
    """Return the version of UCX that would be used. UnavailableError, with the reason, if none."""
    return _version(load().tw_ucx_version, ucx_library)


def zmq_version(zmq_library: str | None = None) -> str:
    """Return the version of ZeroMQ that a store would use. UnavailableError, with the reason, if
    there is none."""
    return _version(load().tw_zmq_version, zmq_library)


def nccl_version(nccl_library: str | None = None) -> str:
    """Load the NCCL that would be used, and return its version. UnavailableError, with the reason,
    if there is none."""
    return _version(load().tw_nccl_version, nccl_library)


def _version(function: Callable[..., int], library: str | None) -> str:
    version = ctypes.create_string_buffer(64)
    named = None if library is None else library.encode()
    check(function(named, version, len(version)))
    return version.value.decode()


def check(status: int) -> None:
    """Raise the typed error for the tw_status of the last call on this thread, unless it is
    TW_OK."""
    if status != 0:
        message = load().tw_last_error().decode(errors="replace")
        raise errors.from_status(status, message)
