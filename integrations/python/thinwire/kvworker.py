"""KVStore: a worker's side of a store. It checks keys and tensors, and copies pulled values to the
caller's tensors."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from thinwire import _library, kvspecs
from thinwire import row_sparse as rows
from thinwire.arguments import check_flag, is_number, is_text, is_whole, plain, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

Key = int | str
Values = torch.Tensor | Sequence[torch.Tensor]


@dataclass
class _Landing:
    """A pulled value's memory on the host, and the tensors that wait() copies it to."""

    buffer: torch.Tensor
    outs: list[torch.Tensor]
    rows: torch.Tensor | None = None  # numbers of rows that were pulled; None: the whole value


class KVStore:
    """One worker's store; create() returns it. Not thread-safe.

    Keys are whole numbers or text, the same on all workers. A value is a float32, bfloat16 or
    float16 tensor of any shape on any device. It may be a list of tensors: push sums them, and pull
    writes all of them. With a list of keys there is one value for each key.

    A row-sparse value is a table of shape (rows, width), such as the weight of an embedding. It is
    pushed as a sparse tensor (Embedding(sparse=True) makes them), and only the rows in it are sent
    and updated; row_sparse_pull() pulls the rows that are needed.

    With all types but dist_sync a worker may join a run, or return after it was killed. Until its
    first push, init(), set_optimizer(), barrier() and load_optimizer_states() return at once, and
    the store keeps its values, which the worker must pull before it computes a gradient.

    Every method raises the typed errors of thinwire. After a PeerLostError, MismatchError or
    TimeoutError the store has failed, and each later call raises the same error.

    Attributes:
        type: the name that was passed to create().
        rank: number of this worker, from 0.
        num_workers: the number of workers at the start.
        has_joined: whether the store was set up before this worker came.
    """

    def __init__(self, name: str, options: _library.KvOptions, keep: Sequence[object]) -> None:
        self.type = name
        joins_later = options.rank >= options.workers + options.servers
        self.rank: int = options.rank - (options.servers if joins_later else 0)
        self.num_workers: int = options.workers
        self._library = _library.load()
        handle = c_void_p()
        _library.check(self._library.tw_kv_create(byref(options), byref(handle)))
        self._handle = handle
        joined = ctypes.c_int()
        _library.check(self._library.tw_kv_has_joined(handle, byref(joined)))
        self.has_joined = bool(joined.value)
        self._keep = keep
        self._landings: dict[str, _Landing] = {}
        self._tables: dict[str, torch.Size] = {}  # shapes of row-sparse values
        # Also when the interpreter exits, so that the others learn that this worker has left.
        self._destroy = weakref.finalize(self, self._library.tw_kv_destroy, handle)

    def init(self, key: Key | Sequence[Key], value: Values, *, row_sparse: bool = False) -> None:
        """Add keys with worker 0's values, uncompressed. All workers call it, in the same order.

        Args:
            key: one or a list of keys.
            value: a tensor for each key.
            row_sparse: whether the values are row-sparse. A sparse tensor with one sparse dimension
                always is.
        """
        check_flag("row_sparse", row_sparse)
        array, tables = [], {}
        for name, parts in _pairs(key, value, "value"):
            if row_sparse or rows.is_sparse(parts[0]):
                tensor = rows.table(parts[0], self.rank, name)
                tables[name] = tensor.shape
            else:
                tensor = self._on_host(name, parts[0])
            array.append((name, tensor))
        tensors = (_library.KvTensor * len(array))(
            *(
                _library.KvTensor(
                    *(name.encode(), *_memory(tensor)), tables[name][1] if name in tables else 0
                )
                for name, tensor in array
            )
        )
        self._check(self._library.tw_kv_init(self._alive(), tensors, len(array)))
        self._tables |= tables

    def push(
        self,
        key: Key | Sequence[Key],
        value: Values,
        priority: int = 0,
        *,
        weight: float = 1.0,
    ) -> None:
        """Send gradients; the tensors may be reused at once. With dist_sync it blocks while eight
        earlier pushes of the key wait for those of other workers.

        Args:
            key: one or a list of keys.
            value: a tensor for each key. For a row-sparse key: a sparse tensor, whose rows may
                repeat, or a dense one, of which the rows that are not zero are sent.
            priority: a higher one goes first.
            weight: with dist_sync:quorum=k,grace=s a positive number, such as the samples or tokens
                of the gradient: an update is the weighted mean of its pushes. Otherwise 1.

        Raises:
            InvalidArgumentError: an argument is not valid.
        """
        priority = whole_number("priority", priority)
        _check_weight(weight)
        for name, parts in _pairs(key, value, "value"):
            self._land(name)
            if name in self._tables:
                self._push_rows(name, parts, priority, weight)
                continue
            tensor = self._sum(name, parts)
            self._check(
                self._library.tw_kv_push(
                    self._alive(), name.encode(), *_memory(tensor), priority, weight
                )
            )

    def pull(
        self,
        key: Key | Sequence[Key],
        out: Values,
        priority: int = 0,
        *,
        wait: bool = True,
    ) -> None:
        """Write values to `out`.

        Args:
            key: one or a list of keys.
            out: a tensor for each key.
            priority: a higher one goes first.
            wait: False: return at once; the values are in `out` after wait().

        Raises:
            InvalidArgumentError: an argument is not valid, or a key is row-sparse; pull its rows
                with row_sparse_pull().
        """
        priority = whole_number("priority", priority)
        pairs = _pairs(key, out, "out")
        for name, outs in pairs:
            self._check_dense(name)
            self._land(name)
            landing = self._landing(name, outs)
            self._check(
                self._library.tw_kv_pull(
                    self._alive(), name.encode(), *_memory(landing.buffer), priority
                )
            )
            self._landings[name] = landing
        if wait:
            for name, _ in pairs:
                self._land(name)

    def pushpull(
        self,
        key: Key | Sequence[Key],
        value: Values,
        out: Values | None = None,
        priority: int = 0,
        row_ids: torch.Tensor | Sequence[int] | Sequence[torch.Tensor] | None = None,
        *,
        weight: float = 1.0,
    ) -> None:
        """Push and pull in one message. It returns at once, so that the exchanges of many keys
        overlap; read `out` after wait().

        Args:
            key: one or a list of keys.
            value: as push() takes it.
            out: a tensor for each key; None: `value`. For a row-sparse key as row_sparse_pull()
                takes it.
            priority: a higher one goes first.
            row_ids: the rows to pull of a row-sparse key, which need not be those of `value`; None
                for a dense key. With a list of keys, a list with one for each.
            weight: as push() takes it.

        Raises:
            InvalidArgumentError: an argument is not valid, a row-sparse key has no `out` or
                row_ids, or a dense key has row_ids.
        """
        priority = whole_number("priority", priority)
        _check_weight(weight)
        names = _pairs(key, value, "value")
        targets = names if out is None else _pairs(key, out, "out")
        wanted = [None] * len(names) if row_ids is None else _row_ids(key, row_ids)
        for (name, parts), (_, outs), ids in zip(names, targets, wanted, strict=True):
            if name in self._tables:
                if out is None or ids is None:
                    raise InvalidArgumentError(
                        f"key '{name}' is row-sparse: pushpull() takes out and row_ids for it; or "
                        "use push() and row_sparse_pull(key, row_ids=...)"
                    )
                self._start_rows(name, outs, rows.row_ids(ids, name), priority, parts, weight)
                continue
            if ids is not None:
                raise InvalidArgumentError(f"key '{name}' is dense, so it takes no row_ids")
            self._land(name)
            tensor = self._sum(name, parts)
            landing = self._landing(name, outs)
            send, recv = _memory(tensor), _memory(landing.buffer)
            _check_same_dtype(name, tensor, landing)
            self._check(
                self._library.tw_kv_push_pull(
                    self._alive(), name.encode(), send[0], *recv, priority, weight
                )
            )
            self._landings[name] = landing

    def row_sparse_pull(
        self,
        key: Key | Sequence[Key],
        out: Values | None = None,
        priority: int = 0,
        row_ids: torch.Tensor | Sequence[int] | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor] | None:
        """Pull rows of row-sparse keys, and wait for them.

        Args:
            key: one or a list of keys.
            out: a tensor of the key's shape, or a list of them. In a dense tensor the requested
                rows are written and the others stay unchanged; a sparse tensor has only these rows
                afterwards. None: return the rows.
            priority: a higher one goes first.
            row_ids: row numbers, of any shape and in any order; they may repeat. With a list of
                keys, a list with one for each.

        Returns:
            None with `out`. Else a float32 tensor of shape row_ids.shape + (width,), as
            torch.nn.functional.embedding returns it, or a list of them.

        Raises:
            InvalidArgumentError: a row does not exist, or a key is not row-sparse.
        """
        priority = whole_number("priority", priority)
        names = _names(key)
        targets = [[] for _ in names] if out is None else [o for _, o in _pairs(key, out, "out")]
        wanted = _row_ids(key, row_ids)
        landings = [
            self._start_rows(name, outs, rows.row_ids(ids, name), priority)
            for name, outs, ids in zip(names, targets, wanted, strict=True)
        ]
        for name in names:
            self._land(name)
        if out is not None:
            return None
        found = [landing.buffer for landing in landings]
        return found if isinstance(key, (list, tuple, range)) else found[0]

    def broadcast(
        self, key: Key | Sequence[Key], value: Values, out: Values, priority: int = 0
    ) -> None:
        """Call init(), then pull()."""
        self.init(key, value)
        self.pull(key, out, priority)

    def wait(self, key: Key | Sequence[Key] | None = None) -> None:
        """Block until the pulls of these keys (None: of all keys) have written their values."""
        names = list(self._landings) if key is None else _names(key)
        for name in names:
            self._land(name)

    def set_optimizer(self, optimizer: str | torch.optim.Optimizer, **numbers: float) -> None:
        """Set how servers apply gradients. All workers call it. Before that a pull returns the sum
        of a step's pushes, and dist_async has no rule. A call with the present optimizer and other
        numbers, such as a new learning rate, keeps its state.

        Args:
            optimizer: "sgd", "nag", "adam", "adamw", "adagrad"; "add": value += lr * gradient;
                "sum"; or an optimizer of torch.optim with one group, whose numbers are used.
            numbers: those of the optimizer by MXNet's or torch's names: learning_rate, momentum,
                wd, beta1, beta2, epsilon, nesterov, lr_decay, and rescale_grad, a factor on
                gradients. With dist_sync a gradient is the sum over all workers, so use
                rescale_grad=1/num_workers for a mean.
        """
        spec = kvspecs.optimizer_spec(optimizer, **numbers)
        self._check(self._library.tw_kv_set_optimizer(self._alive(), spec.encode()))

    def set_gradient_compression(self, compression: str | dict[str, Any]) -> None:
        """Set the codec of keys that are initialized later. All workers call it.

        Args:
            compression: a codec such as "int4" or "int8:down=fp32" (gradients up with error
                feedback, values down), or {"type": "int4"}. MXNet's
                {"type": "2bit", "threshold": 0.5} is "ternary:threshold=0.5,down=fp32": a worker
                sends bit-identical values.

        Raises:
            InvalidArgumentError: the codec or a key is unknown, or it is MXNet's "1bit".
        """
        self._check(self._library.tw_kv_set_codec(self._alive(), kvspecs.codec_spec(compression)))

    def is_capable(self, capability: str) -> bool:
        """Return whether servers support it: "optimizer", which MXNet checks, or "row_sparse"."""
        return kvspecs.checked_text("capability", capability).lower() in (
            b"optimizer",
            b"row_sparse",
        )

    def barrier(self) -> None:
        """Block until all workers have called it. Later pulls see all earlier pushes."""
        self._check(self._library.tw_kv_barrier(self._alive()))

    def save_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Write a checkpoint: worker 0 writes values and optimizer states to a file, and each
        worker its residuals to fname.worker-RANK. All workers call it.

        Raises:
            InvalidArgumentError: on all workers: one cannot write, or worker 0 has left; the former
                files are kept.
        """
        self._check(self._library.tw_kv_save(self._alive(), kvspecs.checked_text("fname", fname)))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a checkpoint of save_optimizer_states(), after the same init() calls and
        set_optimizer(), with any number of servers. All workers call it.

        Raises:
            InvalidArgumentError: on all workers: a file is missing, damaged, of another save, or of
                another optimizer that keeps arrays; nothing was changed.
        """
        self._check(self._library.tw_kv_load(self._alive(), kvspecs.checked_text("fname", fname)))

    def describe(self) -> str:
        """Return text about keys, servers, bytes sent and pending pulls."""
        handle, size = self._alive(), c_size_t()
        self._check(self._library.tw_kv_describe(handle, None, 0, byref(size)))
        text = ctypes.create_string_buffer(size.value + 256)
        self._check(self._library.tw_kv_describe(handle, text, len(text), byref(size)))
        return text.value.decode()

    def bytes_sent(self) -> int:
        """Return the bytes of all messages that this worker has sent."""
        sent = c_uint64()
        self._check(self._library.tw_kv_bytes_sent(self._alive(), byref(sent)))
        return sent.value

    def close(self) -> None:
        """Leave the store after the servers have received all pushes. A second call does
        nothing."""
        self._destroy()  # afterwards no pull writes to a landing
        self._landings.clear()
        for each in self._keep:
            if isinstance(each, threading.Thread):
                each.join()
        self._keep = ()

    _barrier = barrier  # MXNet's name

    def _alive(self) -> c_void_p:
        if not self._destroy.alive:
            raise InvalidArgumentError("this store is closed; make another one with create()")
        return self._handle

    def _check(self, status: int) -> None:
        _library.check(status)

    def _check_dense(self, name: str) -> None:
        if name in self._tables:
            raise InvalidArgumentError(
                f"key '{name}' is row-sparse; use push() and row_sparse_pull(key, row_ids=...)"
            )

    def _push_rows(
        self, name: str, parts: list[torch.Tensor], priority: int, weight: float
    ) -> None:
        ids, values = rows.rows_of(parts, self._tables[name], self.rank, name)
        self._check(
            self._library.tw_kv_push_rows(
                *(self._alive(), name.encode(), ids.data_ptr(), len(ids)),
                *(*_memory(values), priority, weight),
            )
        )

    def _start_rows(
        self,
        name: str,
        outs: list[torch.Tensor],
        ids: torch.Tensor,
        priority: int,
        parts: list[torch.Tensor] | None = None,
        weight: float = 1.0,
    ) -> _Landing:
        """Pull rows, and push those of `parts` with their weight in the same message."""
        if name not in self._tables:
            raise InvalidArgumentError(
                f"key '{name}' is not row-sparse on this worker; call init(key, value, "
                "row_sparse=True), or pull() it"
            )
        shape = self._tables[name]
        dtypes = {rows.check_out(out, shape, self.rank, name) for out in outs}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        landing = _Landing(torch.empty(*ids.shape, shape[1], dtype=dtype), outs, ids)
        self._land(name)
        head, pull = (self._alive(), name.encode()), (ids.data_ptr(), ids.numel())
        tail = (*_memory(landing.buffer), priority)
        if parts is None:
            self._check(self._library.tw_kv_pull_rows(*head, *pull, *tail))
        else:
            pushed, values = rows.rows_of(parts, shape, self.rank, name)
            _check_same_dtype(name, values, landing)
            push = (pushed.data_ptr(), len(pushed), *_memory(values)[:2])
            self._check(self._library.tw_kv_push_pull_rows(*head, *push, *pull, *tail, weight))
        self._landings[name] = landing
        return landing

    def _on_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if rows.is_sparse(tensor):
            raise InvalidArgumentError(
                f"rank {self.rank}, key '{name}' is dense: got a sparse tensor; call init(key, "
                "value, row_sparse=True), or pass tensor.to_dense()"
            )
        tensors.check(tensor, self.rank, lambda: f"key '{name}'")
        return tensor.detach().to("cpu").contiguous().resolve_neg()

    def _sum(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        total = self._on_host(name, parts[0])
        if len(parts) > 1:
            total = total.clone()
            for part in parts[1:]:
                more = self._on_host(name, part)
                self._check_alike(name, more, total)
                total += more
        return total

    def _check_alike(self, name: str, part: torch.Tensor, first: torch.Tensor) -> None:
        """InvalidArgumentError unless the tensors of a key have the same shape; torch would
        broadcast the smaller one."""
        if part.shape != first.shape:
            raise InvalidArgumentError(
                f"rank {self.rank}, key '{name}': got tensors of shapes {tuple(first.shape)} and "
                f"{tuple(part.shape)}; pass tensors of one shape"
            )

    def _landing(self, name: str, outs: list[torch.Tensor]) -> _Landing:
        for out in outs:
            tensors.check(out, self.rank, lambda: f"key '{name}'")
            tensors.check_writable(out, self.rank, f"key '{name}'")
            self._check_alike(name, out, outs[0])
        first = outs[0].detach()
        if first.device.type == "cpu" and first.is_contiguous() and not first.is_neg():
            return _Landing(first, outs[1:])
        return _Landing(torch.empty(first.shape, dtype=first.dtype), outs)

    def _land(self, name: str) -> None:
        landing = self._landings.get(name)
        if landing is None:
            return
        self._check(self._library.tw_kv_wait(self._alive(), name.encode()))
        if self._landings.pop(name, None) is None:
            raise InvalidArgumentError(
                f"key '{name}': another thread has waited for it or closed the store meanwhile; "
                "use a store from one thread"
            )
        with torch.no_grad():
            for out in landing.outs:
                if landing.rows is None:
                    out.copy_(landing.buffer)
                else:
                    rows.write(out, landing.rows, landing.buffer)


def take_work(
    store: KVStore, share: int, samples: int, batch: int, epochs: int, applied: int
) -> _library.KvWork:
    """Return the next range of samples for a worker: tw_kv_take."""
    work = _library.KvWork()
    plan = (samples, batch, epochs, applied)
    store._check(store._library.tw_kv_take(store._alive(), share, *plan, byref(work)))
    return work


def _names(key: Key | Sequence[Key]) -> list[str]:
    keys = list(key) if isinstance(key, (list, tuple, range)) else [key]
    for each in keys:
        if not is_whole(each) and not (is_text(each) and each):
            raise InvalidArgumentError(
                f"key {each!r} is no whole number, and no text that has no NUL and can be UTF-8"
            )
    return [str(each) for each in keys]


def _list(what: str, values: Any, expected: str = "a list of tensors") -> list:
    if isinstance(values, torch.Tensor) or not isinstance(values, (list, tuple)):
        raise wrong(what, values, expected)
    return list(values)


def _row_ids(key: Any, row_ids: Any) -> list:
    """Return the row ids of each key."""
    names = _names(key)
    is_list = isinstance(key, (list, tuple, range))
    wanted = _list(f"keys {names}: row_ids", row_ids) if is_list else [row_ids]
    if len(wanted) != len(names):
        raise InvalidArgumentError(
            f"row_ids: expected {len(names)}, one for each key, got {len(wanted)}"
        )
    return wanted


def _check_same_dtype(name: str, value: torch.Tensor, landing: _Landing) -> None:
    if value.dtype != landing.buffer.dtype:
        raise InvalidArgumentError(
            f"key '{name}': value is {value.dtype}, out is {landing.buffer.dtype}; pass tensors of "
            "one dtype"
        )


def whole_number(what: str, value: object) -> int:
    if not is_whole(value) or not -(1 << 31) < value < 1 << 31:
        raise wrong(what, value, "a whole number below 2^31")
    return int(value)


def _check_weight(value: object) -> None:
    value = plain(value)
    if not is_number(value) or (isinstance(value, int) and value.bit_length() > 1000):
        raise wrong("weight", value, "a number above 0")


def _pairs(key: Key | Sequence[Key], values: Any, what: str) -> list[tuple[str, list]]:
    """Return each key with its tensors."""
    names = _names(key)
    is_list = isinstance(key, (list, tuple, range))
    groups = _list(f"keys {names}: {what}", values) if is_list else [values]
    if len(groups) != len(names):
        raise InvalidArgumentError(
            f"{what}: expected {len(names)}, one for each key, got {len(groups)}"
        )
    pairs = []
    for name, group in zip(names, groups, strict=True):
        expected = "a tensor, or a list of tensors"
        is_tensor = isinstance(group, torch.Tensor)
        parts = [group] if is_tensor else _list(f"key '{name}': {what}", group, expected)
        if not parts:
            raise wrong(f"key '{name}': {what}", group, expected)
        pairs.append((name, parts))
    return pairs


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype]
