"""Communicator: allreduces among ranks that a store brings together, without torch's groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.arguments import as_int, check_kind, wrong
from thinwire.codec import codec_info
from thinwire.comm import Store
from thinwire.config import Config
from thinwire.torch import collectives, tensors
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Group, count_user


@dataclass(frozen=True)
class _Place:
    """A membership, as Session takes it, of ranks whose numbers are given."""

    joined: Group

    @property
    def rank(self) -> int:
        return self.joined.rank

    @property
    def size(self) -> int:
        return self.joined.size

    def group(self) -> Group:
        return self.joined


def place_of(rank: object, size: object) -> tuple[int, int]:
    """Return both as ints. InvalidArgumentError unless `rank` is one of `size` ranks."""
    size = as_int("size", size, 1)
    return as_int("rank", rank, 0, size - 1), size


def settings_of(codec: str | None, options: Mapping[str, Any]) -> Config:
    """Return all settings; codec None: bf16. InvalidArgumentError for a value that is not valid,
    such as an unknown codec."""
    settings = config.resolve(codec=collectives.codec_of(codec), **options)
    codec_info(settings.codec)
    return settings


def open_session(
    store: dist.Store | Store | None, rank: int, size: int, key: str, settings: Config
) -> Session:
    """Return a Session of `size` ranks that meet in a store under `key`."""
    return Session(
        _Place(Group(rank, size, key, count_user(), store if size > 1 else None)), settings
    )


class Communicator:
    """Compressed allreduces among `size` ranks that meet in a store.

    It is meant for custom process groups, elastic runtimes and schedulers, and does not need
    torch's default process group. It connects in the first all_reduce, which blocks until all ranks
    have called it. After a failure it stays failed. Thread-safe, except for close().

    Args:
        store: where the ranks find each other: a torch.distributed.Store (TCPStore, FileStore), or
            any object with set(key, value) and get(key, timeout_s), which waits for a key and
            raises when the time is over. None for a single rank.
        rank: this rank's number, from 0.
        size: the number of ranks.
        key: text, equal on all ranks and never used on this store before. Ranks that meet again, in
            the same or another number, create a new communicator with a new key.
        codec: a single spec, as all_reduce takes it (None: THINWIRE_CODEC, else bf16).
        options: the settings in `thinwire.torch.Options` (timeout_s, min_bytes, lanes, interface,
            ...), equal on all ranks where docs/reference/settings.md requires it.

    Raises:
        InvalidArgumentError: an argument is not valid.
    """

    def __init__(
        self,
        store: dist.Store | Store | None,
        rank: int,
        size: int,
        key: str,
        codec: str | None = None,
        **options: Any,
    ) -> None:
        rank, size = place_of(rank, size)
        if size > 1 and not (hasattr(store, "set") and hasattr(store, "get")):
            raise wrong("store", store, "a torch.distributed.Store, or an object with set and get")
        if not tensors.is_name(key) or not key:
            raise wrong("key", key, "text without NUL, and not empty")
        settings = settings_of(codec, options)
        self._session = open_session(store, rank, size, key, settings)
        self._session.close_with(self)

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def size(self) -> int:
        return self._session.size

    @property
    def error(self) -> errors.Error | None:
        """The first failure, which every later call raises; None if there was none."""
        return self._session.error

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        name: str | None = None,
    ) -> collectives.Work | None:
        """Reduce a tensor among this communicator's ranks, as thinwire.torch.all_reduce. All
        tensors must be on the device of the first one."""
        kind = collectives.check_op(op)
        tensors.check_name(name)
        check_kind("async_op", async_op, bool, "True or False")
        collectives.warn_of_feedback(name, self._session.config.codec)
        dtype = tensors.check_reducible(tensor, self.rank, name)
        try:
            return collectives.reduce_on(self._session, tensor, dtype, kind, name, async_op)
        except errors.InvalidArgumentError:
            raise
        except errors.Error as error:
            raise errors.again(self._session.fail(error)) from None

    def stats(self) -> dict[str, Any]:
        """Return the counters of State.stats() without parameters; steps is the number of
        all_reduces."""
        return self._session.summary()

    def describe(self) -> str:
        """Return, as text, what this rank waits for, and the engine's last events. May be called at
        any time from any thread."""
        return self._session.describe()

    def fail(self, error: errors.Error) -> None:
        """Fail the communicator on every rank with this error as the reason."""
        check_kind("error", error, errors.Error, "a thinwire.Error")
        self._session.abort(error)

    def close(self) -> None:
        """Wait for pending work and close the connections. A second call does nothing."""
        self._session.close()
