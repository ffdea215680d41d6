"""Members of rounds: static() for the fixed ranks of a process group, and join() for members that
come and go."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from thinwire import errors
from thinwire.arguments import as_int, check_flag, is_finite, is_text, plain, wrong
from thinwire.torch import group
from thinwire.torch.sites.lighthouse_members import LighthouseMembers
from thinwire.torch.sites.meeting import Epoch
from thinwire.torch.sites.round import Members
from thinwire.torch.sites.store_members import StoreMembers


class StaticMembers:
    """The members that static() returns."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        group.check(process_group)
        self._process_group = process_group
        self._epoch: Epoch | None = None

    def meet(self, why: errors.Error | None) -> Epoch:
        """Return the ranks of the process group. Raises `why` after a failure: lost ranks cannot be
        replaced."""
        if why is not None:
            raise errors.again(why)
        if self._epoch is None:
            joined = group.join(self._process_group, "sites")
            names = tuple(f"rank {rank}" for rank in range(joined.size))
            self._epoch = Epoch(0, joined, names)
        return self._epoch

    def wants_change(self) -> bool:
        return False

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Do nothing: collectives of a process group have a deadline."""

    def close(self) -> None:
        """Do nothing."""


def static(process_group: dist.ProcessGroup | None = None) -> StaticMembers:
    """Return members that are the ranks of a process group, as long as the program runs. A lost
    rank is an error on all others.

    Args:
        process_group: None: the default group.
    """
    return StaticMembers(process_group)


def join(
    address: dist.Store | str,
    name: str,
    *,
    min_members: int = 2,
    key_file: str | os.PathLike[str] | None = None,
    host: str | None = None,
    timeout_s: float = 300.0,
    beat_s: float = 0.2,
    dead_s: float = 2.0,
    allow_split: bool = False,
) -> Members:
    """Return members that may come and go, and join them.

    Args:
        address: where members find one another: a torch store, such as
            TCPStore(host, port, is_master=False), whose server must outlive the members; or
            "http://host:29510" of torchft's Lighthouse.
        name: of this member, for messages and the reports of rounds.
        min_members: the least number of members that train. A Lighthouse has its own
            --min_replicas.
        key_file: a file with the group's secret, the same on all members; a process without the key
            cannot take part. None: THINWIRE_KEY_FILE, else a token in the store.
        host: with a Lighthouse: this machine's address for other members. None: the address on the
            route to the Lighthouse.
        timeout_s: seconds to wait for other members. Members that train come to a meeting with
            their next round, so this must be longer than the time between rounds.
        beat_s: seconds between two heartbeats.
        dead_s: seconds without a heartbeat after which a member counts as dead; over a store, half
            of that after a connection has closed. A Lighthouse has its own --heartbeat_timeout_ms.
        allow_split: False: members that were cut off from the others, or were suspended, wait for
            them, so that no two groups train separately: over a store for one member of the last
            epoch, over a Lighthouse for more than half of those that may live. A new process with
            the name of a lost member counts as that member. True, on all members: any min_members
            continue.

    Raises:
        InvalidArgumentError: an argument is not valid.
        UnavailableError: torchft is not installed, or there is no Lighthouse at the address.
    """
    if not is_text(name) or not name:
        raise wrong("name", name, "text in UTF-8 without NUL that is not empty")
    key_file = os.fspath(key_file) if isinstance(key_file, os.PathLike) else key_file
    if key_file is not None and not is_text(key_file):
        raise wrong("key_file", key_file, "the path of a file, or None")
    min_members = as_int("min_members", min_members, 1)
    check_flag("allow_split", allow_split)
    timeout_s, beat_s, dead_s = plain(timeout_s), plain(beat_s), plain(dead_s)
    for what, value in (("timeout_s", timeout_s), ("beat_s", beat_s), ("dead_s", dead_s)):
        if not (is_finite(value) and value > 0):
            raise wrong(what, value, "a number of seconds above 0")
    if not beat_s < dead_s:
        raise errors.InvalidArgumentError(
            f"beat_s is {beat_s!r} and dead_s {dead_s!r}, expected beat_s < dead_s"
        )
    if isinstance(address, str):
        return LighthouseMembers(
            address, name, key_file, host=host, timeout_s=timeout_s, beat_s=beat_s, dead_s=dead_s,
            allow_split=allow_split,
        )  # fmt: skip
    if not isinstance(address, dist.Store):
        raise wrong("address", address, "a torch.distributed.Store, or http://host:port")
    return StoreMembers(
        address, name, min_members, key_file, timeout_s=timeout_s, beat_s=beat_s, dead_s=dead_s,
        allow_split=allow_split,
    )  # fmt: skip
