"""Settings of a process group: argument > environment > default, settled once.

This is the only file that reads the environment. The settings themselves are in options.py; a
default of None leaves the choice to the library (integrations/c/thinwire.h)."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from thinwire import errors
from thinwire.arguments import plain, wrong
from thinwire.errors import warn
from thinwire.options import ARGUMENTS, OPTIONS, Config, Option

# Stages in stats() and in the trace, in the order of a chunk's life.
STAGES = ("queue", "encode", "exchange", "reduce", "gather", "decode")

_PREFIX = "THINWIRE_"
# Environment variables, by name, and their meanings. `thinwire doctor` lists those that are set.
VARIABLES = {
    name: f"{option.meaning} ({option.default})"
    for option in OPTIONS
    for name in option.variables
    if name.startswith(_PREFIX)
}

_LISTS = {"GLOO_SOCKET_IFNAME"}  # torch allows several names in it; the first one is used

_LEVELS = ("debug", "info", "warning", "error")


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _choose(option: Option, argument: object) -> Any:
    """Return the argument, else the environment's value; None if there is neither."""
    kind, argument = option.kind, plain(argument)
    if not _is_unset(argument):
        if not kind.right(argument):
            raise wrong(option.setting, argument, kind.expected)
        return argument
    for variable in option.variables:
        text = os.environ.get(variable, "")
        if variable in _LISTS:
            text = text.split(",")[0]
        if not text:
            continue
        try:
            value = kind.parse(text)
        except ValueError as error:
            raise wrong(variable, text, kind.expected) from error
        if value is not None and not kind.right(value):
            raise wrong(variable, text, kind.expected)
        return value
    return None


def _warn_of_unknown_names() -> None:
    for name in sorted(os.environ):
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        near = difflib.get_close_matches(name, VARIABLES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        warn(f"{name} is not a setting of thinwire{hint}")


def check_names(arguments: Iterable[str]) -> None:
    """TypeError for an argument that resolve() does not have."""
    for name in arguments:
        if name in ARGUMENTS:
            continue
        near = difflib.get_close_matches(name, ARGUMENTS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"'{name}' is not a setting of thinwire{hint}")


@functools.cache
def _prepare_logger(level: str) -> None:
    if level.lower() not in _LEVELS:
        raise wrong("THINWIRE_LOG", level, ", ".join(_LEVELS))
    logger = logging.getLogger("thinwire")
    logger.setLevel(level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thinwire %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def library_path() -> Path | None:
    """Return the path of libthinwire.so that the user has set, or None."""
    named = os.environ.get("THINWIRE_LIBRARY")
    return Path(named) if named else None


def codec_variable() -> str | None:
    """Return the codec that the environment sets, or None."""
    return os.environ.get("THINWIRE_CODEC") or None


def cuda_library() -> str | None:
    """Return the path of libthinwire_cuda.so that the user has set, or None."""
    return os.environ.get("THINWIRE_CUDA_LIB") or None


def ucx_library() -> str | None:
    """Return the path of libucp.so.0 that the user has set, else that of an installed wheel, or
    None: then the dynamic linker looks for the system's."""
    if named := os.environ.get("THINWIRE_UCX_LIB"):
        return named
    wheel = importlib.util.find_spec("libucx")
    for folder in wheel.submodule_search_locations or () if wheel is not None else ():
        library = Path(folder) / "lib" / "libucp.so.0"
        if library.is_file():
            return str(library)
    return None


def nccl_library() -> str | None:
    """Return the path of libnccl.so.2 that the user has set, or None."""
    return os.environ.get("THINWIRE_NCCL_LIB") or None


def zmq_library() -> str | None:
    """Return the path of libzmq.so.5 that the user has set, or None."""
    return os.environ.get("THINWIRE_ZMQ_LIB") or None


def kv_journal() -> str | None:
    """Return the environment's setting of the servers' journals, or None."""
    return os.environ.get("THINWIRE_KV_JOURNAL") or None


def resolve(**arguments: Any) -> Config:
    """Return all settings. The arguments are those of options.ARGUMENTS; None means the
    environment's value, else the default. InvalidArgumentError for a value that is not valid;
    TypeError for an unknown argument."""
    check_names(arguments)
    _warn_of_unknown_names()
    if level := os.environ.get("THINWIRE_LOG"):
        _prepare_logger(level)
    chosen = {
        option.setting: _choose(option, arguments.get(option.setting))
        for option in OPTIONS
        if option.setting is not None
    }
    chosen["ucx_library"] = ucx_library()
    return Config(**{name: value for name, value in chosen.items() if value is not None})


def is_set(setting: str) -> bool:
    """Return whether the environment sets it."""
    option = next(option for option in OPTIONS if option.setting == setting)
    return any(os.environ.get(variable) for variable in option.variables)


def given(**settings: Any) -> Config:
    """Return these settings, without looking at the environment; None means the default.
    InvalidArgumentError for a value that is not valid."""
    settings = {name: plain(value) for name, value in settings.items()}
    for option in OPTIONS:
        value = settings.get(option.setting)
        if value is not None and not option.kind.right(value):
            raise wrong(option.setting, value, option.kind.expected)
    return Config(**{name: value for name, value in settings.items() if value is not None})


def check_here(settings: Config) -> None:
    """InvalidArgumentError if this machine lacks the network interface that the settings name, or
    the folder of a file that is written at the end."""
    here = sorted(name for _, name in socket.if_nameindex())
    interface = settings.interface
    if interface is not None and interface.partition(":")[0] not in here:  # eth0:1 is an alias
        raise errors.InvalidArgumentError(
            f"there is no network interface '{interface}' here, only {', '.join(here)}; "
            "name one of these in interface= or THINWIRE_IFACE"
        )
    for name in ("trace", "flight"):
        file = getattr(settings, name)
        if file is None:
            continue
        if Path(file).name in ("", ".."):
            raise wrong(name, file, "the name of a file")
        if not Path(file).resolve().parent.is_dir():
            raise errors.InvalidArgumentError(
                f"{name} is {file!r}, expected a file in a folder that exists; make the folder "
                f"{Path(file).parent} first"
            )
