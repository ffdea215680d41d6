"""Joining: ranks without more data take part with zeros in the calls of ranks that have data.

Each rank counts its calls by kind and name. A rank that joins writes that to the rendezvous store;
the others look there while one of their calls is late. Then they write each unfinished call, and
each later one, to a log in the store. Joined ranks read it and make the calls that they have not
made. The log ends when every rank has written that it has joined."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.horovod.ops import REDUCE_OPS, Op
from thinwire.torch import private
from thinwire.torch.collectives import Work, all_reduce, reduce_scatter_tensor
from thinwire.torch.group import TorchStore

_LATE_S = 0.1  # seconds; a call that takes longer may be waiting for a joined rank
_LOOK_S = 1.0  # the longest pause between two looks into the store, in seconds

Wait = Callable[[], object]  # returns when a call has ended, or raises its error


class Call(NamedTuple):
    """A call in the log."""

    kind: str  # of Joining.makers
    key: tuple[str, str | None]  # equal on all ranks, which count the calls of each key
    number: int  # among the calls of the key
    part: Any  # the call's arguments for joined ranks, in JSON's types: tuples become lists


class EngineCall(NamedTuple):
    """An allreduce or reducescatter of thinwire's engine."""

    scatters: bool
    shape: tuple[int, ...]
    dtype: str  # of name_of()
    on_gpu: bool
    op: str  # an Op's value
    codec: str
    name: str | None

    def start(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[Work, torch.Tensor]:
        """Start it. Return the work, and the tensor that will hold the result."""
        options = {"codec": self.codec, "name": self.name, "strict": True}
        op = REDUCE_OPS[Op(self.op)]
        if not self.scatters:
            return all_reduce(tensor, op, group, True, **options), tensor
        mine = torch.empty_like(tensor[0])
        return reduce_scatter_tensor(mine, tensor, op, group, True, **options), mine


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype's name in torch, such as "float32", for zeros()."""
    return str(dtype).removeprefix("torch.")


def zeros(shape: Iterable[int], dtype: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the tensor that a joined rank passes."""
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)


class Joining:
    """One rank's calls that all ranks make, and join(). begin() is thread-safe."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.makers: dict[str, Callable[[Any, torch.device | None], Wait]] = {
            "engine": self._make_by_engine
        }
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = config.resolve().timeout_s or private.timeout_of(group) or 1800.0
        self._store = dist.PrefixStore("thinwire/horovod_join", private.store_of(group))
        self._reader = TorchStore(self._store)
        self._times = 0  # how often all ranks have joined
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._open: dict[object, tuple[float, Call]] = {}  # unfinished calls with their start times
        self._heard = False  # True if some rank has joined
        self._written: list[str] = []  # keys of the log
        self._closed = threading.Event()
        self._changed = threading.Condition()
        if self._size > 1:
            threading.Thread(target=self._watch, name="thinwire-join", daemon=True).start()

    def begin(self, kind: str, key: tuple[str, str | None], part: Any) -> Callable[[], object]:
        """Note a call before it is made. Return a function to call once when it has ended."""
        token = object()
        with self._changed:
            self._counts[key] += 1
            call = Call(kind, key, self._counts[key], part)
            self._open[token] = time.monotonic(), call
            heard = self._heard
            self._changed.notify()
        if heard:
            self._write(call)
        return lambda: self._open.pop(token, None)

    def join(self, device: torch.device | None) -> int:
        """Make the other ranks' calls until all have joined. Return the rank that joined last.

        device: for zeros in place of tensors on a GPU; None: torch's current GPU."""
        if self._size == 1:
            return 0
        self._store.set(f"{self._times}/joined", b"1")
        self._hear()
        self._write(self._rank)
        joined: set[int] = set()
        last, line, waits = self._rank, 1, list[Wait]()
        while len(joined) < self._size:
            found = self._read(line)
            line += 1
            if isinstance(found, int):
                joined.add(last := found)
            elif found.number > self._counts[found.key]:
                self._counts[found.key] = found.number
                waits.append(self.makers[found.kind](found.part, device))
        for wait in waits:
            wait()
        self._forget()
        return last

    def _make_by_engine(self, part: list[Any], device: torch.device | None) -> Wait:
        call = EngineCall(*part)
        where = (device or torch.device("cuda")) if call.on_gpu else "cpu"
        return call.start(zeros(call.shape, call.dtype, where), self._group)[0].wait

    def close(self) -> None:
        """End the thread that watches the store."""
        self._closed.set()
        with self._changed:
            self._changed.notify()

    def _read(self, line: int) -> Call | int:
        try:
            found = json.loads(self._reader.get(f"{self._times}/{line}", self._timeout_s))
        except TimeoutError as error:
            raise errors.TimeoutError(
                f"rank {self._rank}, join(): no other rank made a call or joined within "
                f"{self._timeout_s} s; look at their last lines, and let every rank call join()"
            ) from error
        if isinstance(found, int):
            return found
        kind, key, number, part = found
        return Call(kind, tuple(key), number, part)

    def _hear(self) -> None:
        """Call when some rank has joined: write this rank's unfinished calls. begin() writes later
        ones."""
        with self._changed:
            if self._heard:
                return
            self._heard = True
            calls = [call for _, call in list(self._open.values())]
        for call in calls:
            self._write(call)

    def _write(self, line: Call | int) -> None:
        key = f"{self._times}/{self._store.add(f'{self._times}/lines', 1)}"
        self._store.set(key, json.dumps(line))
        self._written.append(key)

    def _forget(self) -> None:
        """Call when every rank has joined: delete the log before this one. Other ranks may still
        read this one."""
        with self._changed:
            self._times += 1
            self._heard = False
            before = [key for key in self._written if not key.startswith(f"{self._times - 1}/")]
            self._written = self._written[len(before) :]
        for key in before:
            self._store.delete_key(key)

    def _watch(self) -> None:
        pause = _LATE_S
        while not self._closed.wait(pause):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed.is_set() or (self._open and not self._heard)
                )
                begun = next((begun for begun, _ in list(self._open.values())), None)
                late = 0.0 if begun is None else time.monotonic() - begun
            pause = min(max(late, _LATE_S), _LOOK_S)
            if self._closed.is_set() or late < _LATE_S:
                continue
            try:
                with private.in_torch():
                    if self._reader.has(f"{self._times}/joined"):
                        self._hear()
            except RuntimeError:  # the store's rank has ended; the calls themselves will fail
                return
