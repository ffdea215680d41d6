"""Every setting, and the only place that reads the environment: argument > environment > default.

A default of None leaves the choice to the library (integrations/c/thinwire.h)."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thinwire import errors

# Of stats() and of the trace, in the order of a chunk's life.
STAGES = ("queue", "encode", "exchange", "reduce", "gather", "decode")

# Name -> what it sets. `thinwire doctor` prints this list.
VARIABLES = {
    "THINWIRE_CODEC": "codec of hooks and calls that name none (int4)",
    "THINWIRE_IFACE": "network interface to listen on (GLOO_SOCKET_IFNAME, else MASTER_ADDR's)",
    "THINWIRE_TIMEOUT_S": "seconds until connecting or an allreduce fails (30)",
    "THINWIRE_LANES": "chunks in flight (4)",
    "THINWIRE_CHUNK_BYTES": "bytes of fp32 in a chunk (4194304)",
    "THINWIRE_TRACE": "file for a Chrome trace; each rank adds its number to the name",
    "THINWIRE_LOG": "level of the 'thinwire' logger: debug, info, warning or error",
    "THINWIRE_KEY_FILE": "key of an authenticated transport; this version has none",
    "THINWIRE_INSECURE": "accept an unauthenticated transport; this version has no other",
    "THINWIRE_NCCL_LIB": "path of libnccl; this version has no NCCL transport",
    "THINWIRE_LIBRARY": "path of libthinwire.so",
    "THINWIRE_CUDA_LIB": "path of libthinwire_cuda.so (beside libthinwire.so)",
}

_LEVELS = ("debug", "info", "warning", "error")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Config:
    """What a process group is set up with. None: the library's default."""

    codec: str = "int4"  # several, separated by ";", which segments choose from
    momentum: float = 0.0  # of SGD, owned by the library; 0: none
    nesterov: bool = False
    policy: str = "wfbp"  # or "fifo", "p3"
    planned: bool | None = None  # order of steps foretold; None: above a millisecond of latency
    interface: str | None = None  # network interface to listen on
    rendezvous_host: str | None = None  # listen where this host is reached; None: loopback
    timeout_s: float | None = None  # of connecting, and of one allreduce
    lanes: int | None = None  # chunks in flight
    chunk_bytes: int | None = None  # of fp32 input
    min_bytes: int | None = None  # smaller tensors go raw; 0: none does
    trace: str | None = None  # file
    device: str = "cpu"  # or "cuda:N": where all tensors lie
    cuda_library: str | None = None  # path of libthinwire_cuda.so
    local_group: str | None = None  # ranks are threads of this process, which meet under this name


def _invalid(name: str, expected: str, got: object) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(f"{name} is {got!r}, expected {expected}")


def _choose(
    argument: _T | None, variable: str, parse: Callable[[str], _T], expected: str
) -> _T | None:
    if argument is not None:
        return argument
    text = os.environ.get(variable, "")
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise _invalid(variable, expected, text) from error


def _positive(name: str, value: float | None, at_least: float = 0.0) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= at_least:
        raise _invalid(name, f"a number above {at_least:g}", value)


def _warn_of_unknown_names() -> None:
    for name in sorted(os.environ):
        if not name.startswith("THINWIRE_") or name in VARIABLES:
            continue
        near = difflib.get_close_matches(name, VARIABLES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        warnings.warn(f"{name} is not a setting of thinwire{hint}", stacklevel=3)


@functools.cache
def _prepare_logger(level: str) -> None:
    if level.lower() not in _LEVELS:
        raise _invalid("THINWIRE_LOG", ", ".join(_LEVELS), level)
    logger = logging.getLogger("thinwire")
    logger.setLevel(level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thinwire %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def library_path() -> Path | None:
    """The libthinwire.so that the user named, if any."""
    named = os.environ.get("THINWIRE_LIBRARY")
    return Path(named) if named else None


def cuda_library() -> str | None:
    """The libthinwire_cuda.so that the user named, if any."""
    return os.environ.get("THINWIRE_CUDA_LIB") or None


def resolve(
    *,
    codec: str | None = None,
    policy: str | None = None,
    interface: str | None = None,
    timeout_s: float | None = None,
    lanes: int | None = None,
    chunk_bytes: int | None = None,
    min_bytes: int | None = None,
    trace: str | None = None,
    planned: bool | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Config:
    """Settles every setting once. InvalidArgumentError for a value that can't be."""
    _warn_of_unknown_names()
    if level := os.environ.get("THINWIRE_LOG"):
        _prepare_logger(level)
    if os.environ.get("THINWIRE_KEY_FILE"):
        raise errors.UnavailableError(
            "THINWIRE_KEY_FILE asks for an authenticated transport, which this version does not "
            "have; unset it, and keep the ranks on a network that you trust"
        )
    gloo_interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None
    timeout_s = _choose(timeout_s, "THINWIRE_TIMEOUT_S", float, "seconds")
    lanes = _choose(lanes, "THINWIRE_LANES", int, "a whole number")
    chunk_bytes = _choose(chunk_bytes, "THINWIRE_CHUNK_BYTES", int, "a whole number of bytes")
    _positive("timeout_s", timeout_s)
    _positive("lanes", lanes)
    _positive("chunk_bytes", chunk_bytes)
    _positive("min_bytes", min_bytes, at_least=-1)
    if planned is not None and not isinstance(planned, bool):
        raise _invalid("planned", "True, False or None", planned)
    if not (isinstance(momentum, (int, float)) and 0 <= momentum < 1):
        raise _invalid("momentum", "a number from 0 to below 1", momentum)
    return Config(
        codec=_choose(codec, "THINWIRE_CODEC", str, "a codec") or "int4",
        momentum=float(momentum),
        nesterov=bool(nesterov),
        policy=policy or "wfbp",
        planned=planned,
        interface=_choose(interface, "THINWIRE_IFACE", str, "an interface") or gloo_interface,
        rendezvous_host=os.environ.get("MASTER_ADDR"),
        timeout_s=timeout_s,
        lanes=lanes,
        chunk_bytes=chunk_bytes,
        min_bytes=min_bytes,
        trace=_choose(trace, "THINWIRE_TRACE", str, "a file"),
        cuda_library=cuda_library(),
    )
