"""The parts of a round: who takes part (Members), the state that a commit changes (Model), the
round itself and its report. Rounds (rounds.py) makes rounds of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from thinwire import errors
from thinwire.torch.sites.meeting import Epoch, Gather
from thinwire.torch.sites.secure import SumCodec
from thinwire.torch.sites.updates import UpdateCodec, Values

NO_DIGEST = bytes(16)


class Members(Protocol):
    """Says who takes part: static(), join(), or a class of a user's own."""

    def meet(self, why: errors.Error | None) -> Epoch:
        """Return the next epoch once its members are agreed on, and the same object where nobody
        came or left and `why`, a failure, is None. All members call it. Raises `why`, or an error
        of its own, where there is no next epoch."""
        ...

    def wants_change(self) -> bool:
        """Return whether somebody may be waiting to come in. It does not block."""
        ...

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Calls `fail` if a member of the epoch is lost in a way that connections do not show."""
        ...

    def close(self) -> None:
        """Leaves. May be called twice, and while another thread waits in meet(), which is to raise
        then."""
        ...


class Model(Protocol):
    """All that the members have alike, and what a commit does to it."""

    def apply(self, one: Round) -> None: ...

    def dump(self) -> bytes: ...

    def load(self, state: bytes, keep_steps: bool) -> None: ...

    def since(self) -> int:
        """Return the steps since the last round began."""
        ...

    def measured(self) -> tuple[float, float]: ...

    def follow(self, begun: int, since: int) -> None:
        """A newcomer takes part in the rounds below `begun`, and goes on from there."""
        ...


class Report(NamedTuple):
    """A committed round; equal on all members but for `seconds` and `sent_bytes`."""

    number: int
    fragment: int
    members: tuple[str, ...]
    weights: tuple[float, ...]  # 0: took part, and had nothing to say
    norms: tuple[float, ...]  # of each member's update as it was sent; 0 for weight 0
    cosines: tuple[float, ...]  # of each member's update with the result; a poisoner's is low
    # With secure sums or in two hops nobody knows norms and cosines, and both are empty.
    digest: str
    seconds: float  # from its beginning to its commit
    sent_bytes: int  # by this member since the start
    measured: tuple[tuple[float, float], ...]

    def as_line(self) -> str:
        """Return what is equal on all members as one line of JSON; infinite numbers are null."""
        line = {
            "number": self.number,
            "fragment": self.fragment,
            "members": self.members,
            "weights": self.weights,
            "norms": [each if math.isfinite(each) else None for each in self.norms],
            "cosines": self.cosines,
            "digest": self.digest,
        }
        return json.dumps(line, allow_nan=False) + "\n"


@dataclass(eq=False)
class Round:
    """One round of this member, until it is committed."""

    number: int
    fragment: int
    codec: UpdateCodec | SumCodec
    pieces: list[bytes]
    residuals: Values  # valid with the commit; empty where nothing was sent
    weight: float
    begun: float
    # Fields of the last attempt.
    gather: Gather | None = None
    after: Round | None = None  # the open round before this one
    attempt: Future[None] | None = None
    result: Values = field(default_factory=dict)
    seen: bytes = b""  # digests of what each member has sent
    digest: bytes = NO_DIGEST  # of all that was received and made of it
    keys: bytes = b""  # a digest of the public keys, of secure sums
    report: Report | None = None
    changes: bool = False  # a member knows of somebody who wants to come in
    agreed: bool = False  # all members have this result
    in_two_hops: bool = False
    owed: Values = field(default_factory=dict)  # in two hops: lost by this owner; see residuals
