"""Lists of hosts: Slurm's, and those of `thinwire run`."""

from __future__ import annotations

import re
from typing import NamedTuple

from thinwire.errors import InvalidArgumentError


class Slot(NamedTuple):
    """Where a rank runs."""

    host: str
    local_rank: int
    local_size: int


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks by node: "4(x2),3" is [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise InvalidArgumentError(
                f"Slurm's tasks by node are {text!r}, expected counts such as '4(x2),3'"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of Slurm's list: "gpu[003-005,010]-ib,login1" begins with gpu003-ib."""
    found = re.match(r"([^,\[]*)(?:\[([^\]]*)\]([^,\[]*))?", nodes)
    prefix, ranges, suffix = found.groups() if found else ("", None, None)
    first = re.split(r"[-,]", ranges)[0] if ranges else ""
    host = f"{prefix}{first}{suffix or ''}"
    if not host:
        raise InvalidArgumentError(f"Slurm's list of nodes is {nodes!r}, expected names of hosts")
    return host


def slots_of(hosts: str, count: int) -> list[Slot]:
    """One for each of `count` ranks, host by host, as many on each as it has slots: "a:2,b:2"; a
    host without a number has one. InvalidArgumentError if there are fewer."""
    places: dict[str, int] = {}
    for part in hosts.split(","):
        name, _, slots = part.strip().partition(":")
        if not name or (slots and not slots.isdecimal()):
            raise InvalidArgumentError(
                f"-H is {hosts!r}, expected hosts and their numbers of ranks, such as 'a:2,b:2'"
            )
        places[name] = places.get(name, 0) + int(slots or 1)
    room = sum(places.values())
    if room < count:
        raise InvalidArgumentError(
            f"-H {hosts} has room for {room} ranks, expected {count} as -n says; raise the numbers "
            "behind the hosts"
        )
    found: list[Slot] = []
    for host, slots in places.items():
        here = min(slots, count - len(found))
        found += [Slot(host, local, here) for local in range(here)]
    return found
