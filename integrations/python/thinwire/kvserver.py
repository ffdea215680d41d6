"""A process that serves a store of thinwire.kvstore: `thinwire serve`. It does not import torch, so
that a server that was killed restarts quickly."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from ctypes import byref
from typing import TypeVar

from thinwire import _library, config, launch
from thinwire.comm import Store, StoreCallbacks
from thinwire.errors import (
    Error,
    InvalidArgumentError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)
from thinwire.options import Config, milliseconds
from thinwire.tcp_store import TcpStore

_log = logging.getLogger("thinwire")
_T = TypeVar("_T")

DEFAULT_TIMEOUT_S = 60.0
_TOKEN = "/kv/token"  # the key that worker 0 sets first (schedule/store_host/join_store.cc)
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # members of one attempt meet under its number
_LOOK_S = 2.0  # for the rendezvous store, before the journal is asked if the run is over


def serve_here(
    timeout_s: float | None = None, journal: str | None = None, *, awaits_workers: bool = False
) -> None:
    """Serve the first store of the workers, until they have left.

    Args:
        timeout_s: as kvstore.create() takes it.
        journal: as kvstore.create() takes it.
        awaits_workers: timeout_s begins only when worker 0 creates its store.

    Raises:
        InvalidArgumentError: the launcher's variables do not make this process a server.
        Error: the errors of kvstore.create().
    """
    settings = config.resolve(timeout_s=timeout_s)
    role = launch.store_role()
    if role.role != "server":
        raise InvalidArgumentError(
            f"this process is a {role.role} by its variables, expected a server: the last "
            "THINWIRE_SERVERS ranks, or DMLC_ROLE=server"
        )
    options = store_options(settings, journal)
    place(options, role, settings)
    prefix = "" if role.rank is None else os.environ.get(ATTEMPT, "0")

    def connect(seconds: float) -> TcpStore:
        store = TcpStore(role.address, role.port, prefix, seconds)
        if role.rank is not None:
            store.come()
        return store

    store = meet(options, role, connect)
    if store is None:
        return
    options.rank = rank_of(role, store)
    if awaits_workers:
        store.get(group_of(0).decode() + _TOKEN, math.inf)
    serve(options, store, 0)


def store_options(settings: Config, journal: str | os.PathLike[str] | None) -> _library.KvOptions:
    """Return the options that are equal on all members: timeout and journal."""
    options = _library.KvOptions()
    _library.load().tw_kv_options_init_sized(byref(options), ctypes.sizeof(options))
    options.timeout_ms = milliseconds(settings.timeout_s or DEFAULT_TIMEOUT_S)
    kept = os.fspath(journal) if journal is not None else config.kv_journal()
    options.journal = kept.encode() if kept else None
    return options


def place(options: _library.KvOptions, role: launch.StoreRole, settings: Config) -> None:
    """Set the options that describe the members, and how they connect."""
    if options.journal and role.rank is None:
        raise InvalidArgumentError(
            f"the store's journal is {options.journal.decode()!r}, but under DMLC_ROLE a server "
            "that is started again gets another rank; start members with RANK and THINWIRE_SERVERS"
        )
    options.workers, options.servers = role.workers, role.servers
    options.bigarray_bound = role.bigarray_bound
    options.rendezvous_host = role.address.encode()
    for field in ("key_file", "interface"):
        if (text := getattr(settings, field)) is not None:
            setattr(options, "interface_name" if field == "interface" else field, text.encode())
    if (library := config.zmq_library()) is not None:
        options.zmq_library = library.encode()


def rank_of(role: launch.StoreRole, meeting) -> int:
    """Return its rank, or the next free one. meeting: a store with add(), as torch's."""
    if role.rank is not None:
        return role.rank
    number = meeting.add(f"{role.role}s", 1) - 1
    limit = role.workers if role.role == "worker" else role.servers
    if number >= limit:
        raise InvalidArgumentError(
            f"this is {role.role} {number + 1}, expected {limit}; start as many as "
            "DMLC_NUM_WORKER and DMLC_NUM_SERVER say, each with one store"
        )
    return number if role.role == "worker" else role.workers + number


def meet(
    options: _library.KvOptions, role: launch.StoreRole, connect: Callable[[float], _T]
) -> _T | None:
    """Return connect(timeout in seconds), the rendezvous store. Return None for a server that
    can't reach it, and whose journal says that the run is over."""
    seconds = options.timeout_ms / 1000
    if role.role != "server" or not options.journal or role.rank is None:
        return connect(seconds)
    try:
        return connect(min(seconds, _LOOK_S))
    except (TimeoutError, UnavailableError):
        options.rank = role.rank
        if _is_over(options):
            return None
    return connect(seconds)


def _is_over(options: _library.KvOptions) -> bool:
    """Return whether the journal says that all workers have left, and remove it if so. Call only
    if the rendezvous store is gone."""
    alone = _library.KvOptions.from_buffer_copy(options)
    alone.store = _library.Store()
    try:
        _library.check(_library.load().tw_kv_serve(byref(alone)))
    except Error:  # the caller tries the rendezvous store again, or raises its error
        return False
    _log.warning(
        "server %d of %d: the run of the journal in %s is over, since all workers had left, and "
        "nobody is there for another one; for a new run, start the server again",
        options.rank - options.workers,
        options.servers,
        options.journal.decode(),
    )
    return True


def group_of(number: int) -> bytes:
    """Return the key prefix of this process's store with this number, from 0."""
    return f"thinwire.kvstore/{number}".encode()


def serve(options: _library.KvOptions, store: Store, number: int) -> None:
    """Serve until all workers have left. Ctrl-C ends the process, unless the program has its own
    handler."""
    options.group = group_of(number)
    callbacks = StoreCallbacks(store)
    options.store = callbacks.struct
    _log.info("server %d of %d", options.rank - options.workers, options.servers)
    try:
        with _ended_by_ctrl_c(), callbacks.used():
            _library.check(_library.load().tw_kv_serve(byref(options)))
    except (PeerLostError, TimeoutError):
        # Rank 0's process, which held the rendezvous store, may have ended meanwhile.
        if not options.journal or not _is_over(options):
            raise


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python's own handler would wait for the C call to
    return, at the end of the run."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
