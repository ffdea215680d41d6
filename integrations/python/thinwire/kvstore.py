"""A parameter server with the method names of MXNet's KVStore, on torch tensors. Experimental.

A worker::

    import thinwire.kvstore as kvs  # was: import mxnet as mx

    kv = kvs.create("dist_sync")  # a process that serves does not return from here
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
    for i, p in enumerate(model.parameters()):
        kv.init(i, p.data)
    ...
    for i, p in enumerate(model.parameters()):
        kv.pushpull(i, p.grad, out=p.data, priority=-i)
    kv.wait()

Workers push gradients to keys on servers and pull values from them; the servers apply an optimizer
by its name and numbers. docs/how-to/parameter-server.md says how to start processes."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from ctypes import byref, c_void_p
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire import _library, config, errors, kvserver, kvspecs, launch
from thinwire.arguments import as_int
from thinwire.comm import StoreCallbacks
from thinwire.errors import InvalidArgumentError
from thinwire.kvworker import KVStore
from thinwire.torch.group import TorchStore

__all__ = ["KVStore", "create"]

_WITH_NUMBERS = ("dist_ssp:", "dist_sync:")
# MXNet's types. MXNet itself only searches them for "async" and "dist".
_MODES = {
    "dist": "sync",
    "dist_sync": "sync",
    "dist_sync_device": "sync",
    "dist_device_sync": "sync",
    "dist_async": "async",
    "dist_async_device": "async",
    "dist_device_async": "async",
}
_LOCAL = ("local", "device", "local_allreduce_cpu", "local_allreduce_device")
_SCHEDULER_POLL_S = 0.1
_SCHEDULER_LINGER_S = 1.0  # seconds in which members read the scheduler's last answers

_numbers = itertools.count()  # numbers of this process's stores


def create(
    name: str = "local",
    *,
    codec: str | dict[str, Any] | None = None,
    slice_elements: int = 0,
    timeout_s: float | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> KVStore:
    """Create this process's store. In a server, or in MXNet's scheduler, this call serves until all
    workers have left, and then exits the process.

    Args:
        name: "dist_sync": a step is applied when all workers have pushed it. "dist_async": a push
            is applied when it arrives. "dist_ssp:staleness=k": as async, but no gradient is applied
            that is older than k updates for each worker. "dist_sync:quorum=k,grace=s": a step is
            applied when all workers have pushed it, or s seconds after k workers have, as the
            weighted mean of its pushes; a late push counts in the next step. "local": only this
            process. MXNet's other spellings with "device" mean the same.
        codec: as set_gradient_compression() takes it; None: no compression.
        slice_elements: elements of each slice of a key; slices have priorities and go to different
            servers. A multiple of 4096; 0: 65,536, or fewer, so that a slice has at most 80 KiB on
            the wire: 16,384 in fp32.
        timeout_s: seconds, of connecting and of each wait; None: THINWIRE_TIMEOUT_S, else 60.
        journal: a folder for the servers' journals. A server that was killed and is started again
            on its host, with its rank, recovers with the same bits, and workers wait for it until
            timeout_s; it exits if all workers had left. "FOLDER,bytes=N": a snapshot after N bytes
            of messages (2^30); ",durable=fsync": messages are on the disk before they are answered.
            None: THINWIRE_KV_JOURNAL, else no journal. "local" has none.

    Returns:
        The worker's store.

    Raises:
        DataLossError: the journal is damaged.
        MismatchError: the journal is of other numbers of members; or this worker joins a run of
            dist_sync, or has other keys than the run.
        InvalidArgumentError: the name or an environment variable is not valid.
        UnavailableError: libzmq is missing.
        TimeoutError: not all members came in time.
    """
    mode = _mode_of(name)
    settings = config.resolve(timeout_s=timeout_s)
    if journal is not None:
        journal = kvspecs.checked_text("journal", journal).decode()
    options = kvserver.store_options(settings, journal)
    options.mode = mode.encode()
    options.codec = None if codec is None else kvspecs.codec_spec(codec)
    slice_elements = as_int("slice_elements", slice_elements, 0, (1 << 31) - 1)
    options.slice_elements = slice_elements
    if name in _LOCAL:
        options.journal = None
        thread = _serve_here(options)
        try:
            return KVStore(name, options, [thread])
        except errors.Error:
            _release(options, thread)
            raise

    role = launch.store_role()
    kvserver.place(options, role, settings)
    timeout = timedelta(milliseconds=options.timeout_ms)
    meeting = kvserver.meet(options, role, lambda seconds: _meet(role, timedelta(seconds=seconds)))
    if meeting is None:
        sys.exit(0)
    meeting.set_timeout(timeout)
    number = next(_numbers)
    options.rank = kvserver.rank_of(role, meeting)
    if role.role == "server":
        kvserver.serve(options, TorchStore(meeting), number)
        sys.exit(0)
    options.group = kvserver.group_of(number)
    callbacks = StoreCallbacks(TorchStore(meeting))
    options.store = callbacks.struct
    with callbacks.used():
        store = KVStore(name, options, [callbacks, meeting])
    if role.rank is None:
        meeting.add("connected", 1)
    return store


def _mode_of(name: str) -> str:
    if isinstance(name, str) and name in _LOCAL:
        return "sync"
    if isinstance(name, str) and name in _MODES:
        return _MODES[name]
    if isinstance(name, str) and name.startswith(_WITH_NUMBERS):
        return name.removeprefix("dist_")  # the library reports an unknown mode
    raise InvalidArgumentError(
        f"the store's type is {name!r}, expected local, dist_sync, dist_async, "
        "dist_ssp:staleness=2 or dist_sync:quorum=2,grace=0.5"
    )


def _serve_here(options: _library.KvOptions) -> threading.Thread:
    """Start a server on a thread of this process, which ends when its only worker has left."""
    options.local_group = f"thinwire.kvstore/{os.getpid()}/{next(_numbers)}".encode()
    served = _library.KvOptions.from_buffer_copy(options)
    served.rank = 1
    library = _library.load()

    def serve(_texts: _library.KvOptions = options) -> None:  # keeps the memory of `served` alive
        library.tw_kv_serve(byref(served))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def _release(options: _library.KvOptions, thread: threading.Thread) -> None:
    """End the server of a store that could not be created, by a worker that leaves at once."""
    options.codec, options.slice_elements, handle = None, 0, c_void_p()
    options.mode = b"sync"
    if _library.load().tw_kv_create(byref(options), byref(handle)) == 0:
        _library.load().tw_kv_destroy(handle)
        thread.join()


def _meet(role: launch.StoreRole, timeout: timedelta) -> dist.Store:
    """Return the rendezvous store of the members. MXNet's scheduler serves it here, and exits."""
    try:
        return _board(role, timeout)
    except dist.DistError as error:
        first = str(error).split("\n")[0]
        kind = errors.TimeoutError if "timed out" in first.lower() else errors.UnavailableError
        raise kind(
            f"the store's members meet at {role.address}:{role.port} (MASTER_ADDR and MASTER_PORT, "
            f"or DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT), where rank 0 or the scheduler listens: "
            f"{first}"
        ) from error


def _board(role: launch.StoreRole, timeout: timedelta) -> dist.Store:
    if role.rank is not None:
        if not role.joins_later:
            launch.setup()
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return dist.PrefixStore(os.environ.get(kvserver.ATTEMPT, "0"), store)
    is_scheduler = role.role == "scheduler"
    store = dist.TCPStore(
        role.address, role.port, is_master=is_scheduler, timeout=timeout, wait_for_workers=False
    )
    if not is_scheduler:
        return store
    # When all workers are connected, no member needs this store any more.
    while store.add("connected", 0) < role.workers:
        time.sleep(_SCHEDULER_POLL_S)
    time.sleep(_SCHEDULER_LINGER_S)
    sys.exit(0)
