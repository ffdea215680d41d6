"""`thinwire doctor`: reports what is installed, what is missing, and what to do. It changes
nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import platform
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thinwire import _library, config, errors
from thinwire.codec import codec_info


@dataclass(frozen=True)
class Finding:
    """A line of the report. mark: "ok", "missing" (a required part) or "absent" (an optional
    one)."""

    mark: str
    what: str
    detail: str


def main() -> int:
    """Print the findings; return 1 if a required part is missing, else 0."""
    findings = [finding for look in _LOOKS for finding in look()]
    for finding in findings:
        print(f"{finding.mark:8} {finding.what:20} {finding.detail}")
    missing = sum(finding.mark == "missing" for finding in findings)
    print("ready" if missing == 0 else f"not ready: {missing} needed part(s) missing, see above")
    return int(missing > 0)


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()}, {os.cpu_count()} CPUs")


def _c_library() -> Iterator[Finding]:
    try:
        library = _library.load()
    except errors.UnavailableError as error:
        yield Finding("missing", "libthinwire.so", str(error))
        return
    version, target = library.tw_version().decode(), library.tw_simd_target().decode()
    yield Finding("ok", "libthinwire.so", f"{version}, {target} codecs, {_library.path()}")


@functools.cache
def _import_torch() -> tuple[Any, Exception | None]:
    """Return the module, or None and the exception of its import, which may be of any type."""
    try:
        return importlib.import_module("torch"), None
    except Exception as error:
        return None, error


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("missing", "torch", "pip install torch (2.13 or newer)")
        return
    torch, error = _import_torch()
    if torch is None:
        yield Finding("missing", "torch", f"it does not import ({error!r}); install it again")
        return
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    good = (major, minor) >= (2, 13)
    fix = "" if good else ", expected 2.13 or newer: pip install --upgrade torch"
    yield Finding("ok" if good else "missing", "torch", torch.__version__ + fix)
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    detail = (
        "torch.distributed on Gloo" if gloo else "this torch has no Gloo; install another build"
    )
    yield Finding("ok" if gloo else "missing", "rendezvous", detail)


def _optional(name: str, ask: Callable[[], object], use: str) -> Iterator[Finding]:
    """Report on an optional library. ask: returns its version, or a number of devices."""
    try:
        found = ask()
    except errors.UnavailableError as error:
        yield Finding("absent", name, str(error))
    else:
        yield Finding("ok", name, f"{found}{use}")


def _cuda() -> Iterator[Finding]:
    ask = functools.partial(_library.cuda_devices, config.cuda_library())
    yield from _optional("GPU codecs", ask, " CUDA device(s)")


def _ucx() -> Iterator[Finding]:
    ask = functools.partial(_library.ucx_version, config.ucx_library())
    yield from _optional("UCX", ask, "; transport='auto' takes it for ranks on one host")


def _zmq() -> Iterator[Finding]:
    ask = functools.partial(_library.zmq_version, config.zmq_library())
    yield from _optional("ZeroMQ", ask, "; a thinwire.kvstore sends by it")


def _nccl() -> Iterator[Finding]:
    try:
        version = _library.nccl_version(config.nccl_library())
    except errors.UnavailableError as error:
        yield Finding("absent", "NCCL", str(error))
        return
    try:
        _library.cuda_devices(config.cuda_library())
    except errors.UnavailableError:
        yield Finding(
            "absent", "NCCL", f"{version}, but there is no GPU for it (GPU codecs, above)"
        )
    else:
        detail = f"{version}; transport='auto' takes it for ranks with GPUs of their own"
        yield Finding("ok", "NCCL", detail)


def _nccl_shim() -> Iterator[Finding]:
    try:
        shim = _library.path().parent / "libthinwire_nccl_shim.so"
    except errors.UnavailableError:  # libthinwire.so is missing; another line reports that
        return
    detail = f"for unchanged programs on NCCL: LD_PRELOAD={shim}"
    here = shim.is_file()
    yield Finding("ok" if here else "absent", "NCCL shim", detail if here else f"no {shim}")


def _settings() -> Iterator[Finding]:
    for name in ("GLOO_SOCKET_IFNAME", *config.VARIABLES):
        if os.environ.get(name):
            yield Finding("ok", name, os.environ[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            settings = config.resolve()
            config.check_here(settings)
            _check_codec(settings.codec)
            _check_congestion(settings.congestion)
        except errors.Error as error:
            yield Finding("missing", "settings", str(error))
    for warning in caught:
        yield Finding("absent", "settings", str(warning.message))


def _check_codec(specs: str) -> None:
    """InvalidArgumentError for a codec that does not exist."""
    with contextlib.suppress(errors.UnavailableError):  # another line reports a missing library
        for spec in specs.split(";"):
            if spec != "auto":
                codec_info(spec)


def _check_congestion(name: str | None) -> None:
    """InvalidArgumentError for a congestion control that this process may not choose."""
    if name in (None, "", "system"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
        try:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            raise errors.InvalidArgumentError(
                f"congestion is {name!r}, expected 'system' or one that the kernel lets this "
                "process choose: see /proc/sys/net/ipv4/tcp_allowed_congestion_control"
            ) from None


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python, _c_library, _torch, _cuda, _ucx, _zmq, _nccl, _nccl_shim, _settings,
)  # fmt: skip
