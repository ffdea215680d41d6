"""Checks that the members of a meeting can train together: they exchange digests of the arguments
that must be equal, and an error names the one that differs.

If no member has trained, all members raise the error, because the run was started wrongly. If some
have, only the members that differ from them raise it and leave; the others continue with a
warning."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from thinwire import errors
from thinwire.torch.sites.meeting import Epoch, Meeting
from thinwire.torch.sites.secure import FEWEST, MOST

_log = logging.getLogger("thinwire")

_DIGEST = 8
_PLACE = 96  # bytes of the text that describes a member's place


def digests_of(alike: Mapping[str, Any]) -> bytes:
    """Return bytes that are equal if the values are equal."""
    texts = [repr(each).encode() for each in alike.values()]
    return b"".join(hashlib.sha256(text).digest()[:_DIGEST] for text in texts)


def check_alike(epoch: Epoch, one: int, names: list[str], told: list[bytes], known: bool) -> None:
    """MismatchError on members that differ from member `one`, or on all if none has trained.

    Args:
        epoch: the members.
        one: the rank of a member with the right arguments.
        names: of the arguments that must be equal.
        told: digests_of() these arguments, of each member.
        known: whether some members have the group's state.
    """
    parts = [(name, slice(at * _DIGEST, (at + 1) * _DIGEST)) for at, name in enumerate(names)]
    for rank, name in enumerate(epoch.names):
        if other := [what for what, part in parts if told[rank][part] != told[one][part]]:
            _refuse(
                errors.MismatchError(
                    f"member {rank} ('{name}') has another {', '.join(other)} than member {one} "
                    f"('{epoch.names[one]}'); pass the same on all members"
                ),
                rank == epoch.rank or not known,
            )


def check_names(meeting: Meeting, known: list[bool]) -> None:
    """InvalidArgumentError on members that share a name, except on one that has trained. known:
    whether each member has the group's state."""
    names = meeting.epoch.names
    if len(set(names)) == len(names):
        return
    mine = meeting.place().encode()[:_PLACE].ljust(_PLACE)
    places = [each.decode(errors="replace").strip() for each in meeting.tell("place", mine)]
    for name, count in Counter(names).items():
        of_name = [rank for rank in range(len(names)) if names[rank] == name]
        first = next((rank for rank in of_name if known[rank]), None)
        if count > 1:
            _refuse(
                errors.InvalidArgumentError(
                    f"{count} members have the name '{name}', at "
                    f"{' and '.join(places[rank] for rank in of_name)}; give each a name of its "
                    "own, or, if they are ranks of one site, pass "
                    "site_group=torch.distributed.group.WORLD"
                ),
                not any(known) or (meeting.epoch.rank in of_name and meeting.epoch.rank != first),
            )


def _refuse(error: errors.Error, here: bool) -> None:
    """Raise the error if `here`. Otherwise warn and return when the members that raise have
    left."""
    if here:
        raise error
    _log.warning("%s", error)


def check_secure(epoch: Epoch) -> None:
    """InvalidArgumentError unless the number of members is supported by secure sums."""
    if not FEWEST <= epoch.size <= MOST:
        raise errors.InvalidArgumentError(
            f"{epoch.size} members {list(epoch.names)} with secure=True, expected {FEWEST} to "
            f"{MOST}: with two each knows the other's update from the sum, and with more than "
            f"{MOST} the codes are too coarse; pass min_members={FEWEST} to join(), or train "
            "without secure="
        )
