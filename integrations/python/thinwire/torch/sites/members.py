"""Members of rounds: static() for the ranks of a process group, which stay the same, and
join() for members that come and go."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from thinwire import errors
from thinwire.arguments import check_flag, check_whole, is_finite, is_text, wrong
from thinwire.torch import group
from thinwire.torch.sites.lighthouse_members import LighthouseMembers
from thinwire.torch.sites.meeting import Epoch
from thinwire.torch.sites.round import Members
from thinwire.torch.sites.store_members import StoreMembers


class StaticMembers:
    """Returned by static()."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        group.check(process_group)
        self._process_group = process_group
        self._epoch: Epoch | None = None

    def meet(self, why: errors.Error | None) -> Epoch:
        """The ranks of the process group, at the first call. Raises `why`: nobody can take the
        place of a lost rank."""
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
        """Does nothing: a process group has a deadline."""

    def close(self) -> None:
        """Nothing is held."""


def static(process_group: dist.ProcessGroup | None = None) -> StaticMembers:
    """The ranks of a process group (None: the default one) are the members, for as long as the
    program runs. A lost one is an error on all others."""
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
    """Take part among members that come and go.

    Args:
        address: where members learn of one another: a store of torch's, such as
            TCPStore(host, port, is_master=False), whose server outlives the members; or
            "http://host:29510" of torchft's Lighthouse.
        name: of this member, for messages and the reports of rounds.
        min_members: fewer do not train. A Lighthouse has its own --min_replicas.
        key_file: a file with the group's secret, the same on all members; without the key nobody
            takes part. None: THINWIRE_KEY_FILE, else a token in the store.
        host: the own address that others reach, for a Lighthouse. None: the one towards it.
        timeout_s: how long to wait for others. Members that train come to the meeting with their
            next round, so it is to be longer than the time between rounds.
        beat_s: seconds between two signs of life.
        dead_s: seconds without one after which a member is taken for dead, and over a store half as
            many after a connection has closed; a Lighthouse has its own --heartbeat_timeout_ms.
        allow_split: members that are cut off from the others, or stood still meanwhile, wait for
            these, so that no two groups train apart: over a store for one of the last epoch's
            members, over a Lighthouse for more than half of those that may live. A new process
            with the name of a member that was lost counts as that one. True on all members: any
            min_members go on.

    Raises:
        InvalidArgumentError: an argument cannot be.
        UnavailableError: torchft is not installed, or there is no Lighthouse at the address.
    """
    if not is_text(name) or not name:
        raise wrong("name", name, "text in UTF-8 without NUL that is not empty")
    key_file = os.fspath(key_file) if isinstance(key_file, os.PathLike) else key_file
    if key_file is not None and not is_text(key_file):
        raise wrong("key_file", key_file, "the path of a file, or None")
    check_whole("min_members", min_members, 1)
    check_flag("allow_split", allow_split)
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
