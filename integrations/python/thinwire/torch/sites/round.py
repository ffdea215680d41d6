"""The parts of a round: the members, the state that a commit changes (Model), the round itself, its
report, and the computation of its result. Rounds (rounds.py) uses them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from thinwire import errors
from thinwire.torch.sites.meeting import Epoch, Meeting
from thinwire.torch.sites.secure import CODES, FEWEST, Masks, SumCodec, sum_of
from thinwire.torch.sites.updates import (
    Rule,
    UpdateCodec,
    Values,
    doubles,
    length_of,
    mean,
)

NO_DIGEST = bytes(16)
WEIGHTS = ("weight=", "steps", "saw()")  # the kinds of a member's weight
MOST_WORK = 1e18  # the largest work of a member in a round, so that sums of weights stay finite


def check_counts(counts: Mapping[str, int]) -> None:
    """MismatchError if some members count samples by saw() and others steps. counts: indices into
    WEIGHTS, by member."""
    who = {WEIGHTS[kind]: each for each, kind in reversed(counts.items())}
    if {"saw()", "steps"} <= who.keys():
        raise errors.MismatchError(
            f"{who['saw()']} weighs by what it saw() and {who['steps']} by its steps, expected one "
            "of the two; call saw() on all members, and all ranks of a site, before each step, or "
            "on none, or pass weight="
        )


class Members(Protocol):
    """The members of rounds: the result of static() or join(), or a custom class."""

    def meet(self, why: errors.Error | None) -> Epoch:
        """Return the next epoch when its members have agreed on it. If no member came or left and
        `why` (a failure) is None, return the same object. All members call it. Raises `why`, or
        another error, if there is no next epoch."""
        ...

    def wants_change(self) -> bool:
        """Return whether a new member may be waiting to join. It does not block."""
        ...

    def guard(self, epoch: Epoch, fail: Callable[[errors.Error], None]) -> None:
        """Call `fail` if a member of the epoch is lost in a way that connections do not show."""
        ...

    def close(self) -> None:
        """Leave. A second call does nothing. If another thread waits in meet(), that must raise."""
        ...


class Model(Protocol):
    """The state that is equal on all members, and its change by a commit."""

    def keep(self, one: Round) -> None:
        """Keep the state that apply_ahead() will change. Called while the round's bytes are in
        flight."""
        ...

    def apply_ahead(self, one: Round, result: Values) -> None:
        """Do the slow part of apply() for some parameters, while bytes and votes are in flight. The
        calls of a round together have the whole result. apply() or take_back() follows before the
        caller uses the model."""
        ...

    def take_back(self) -> None:
        """Restore the state of keep(), bit for bit, if apply_ahead() has changed it."""
        ...

    def apply(self, one: Round) -> None:
        """Commit a round."""
        ...

    def dump(self) -> bytes: ...

    def load(self, state: bytes, keep_steps: bool) -> None: ...

    def alike(self) -> dict[str, Any]:
        """Return the values, by argument name, that must be equal on members to train together.
        They do not change."""
        ...

    def since(self) -> int:
        """Return the steps since the last round began."""
        ...

    def measured(self) -> tuple[float, float]: ...

    def follow(self, begun: int, since: int) -> None:
        """On a new member: take part in the rounds before number `begun`, and continue from
        there."""
        ...


class Report(NamedTuple):
    """A committed round; equal on all members, except `seconds` and `sent_bytes`."""

    number: int
    fragment: int
    members: tuple[str, ...]
    weights: tuple[float, ...]  # 0: the member took part without an update
    norms: tuple[float, ...]  # of each member's update as it was sent; 0 for weight 0
    cosines: tuple[float, ...]  # of each member's update with the result; low if it is poisoned
    # With secure sums or in two hops no member knows norms and cosines, and both are empty.
    digest: str
    seconds: float  # from the beginning of the round to its commit
    sent_bytes: int  # by this member since the start
    measured: tuple[tuple[float, float], ...]

    def as_line(self) -> str:
        """Return the fields that are equal on all members as one line of JSON; infinite numbers are
        null."""
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


class RoundLog:
    """A file to which a line is appended for each committed round, as it is committed.

    If it cannot be written, for example because the disk is full, rounds continue after one
    warning. Lines wait in the file's buffer for space, and those that do not fit are dropped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """InvalidArgumentError if it cannot be opened."""
        try:
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        except (OSError, TypeError, ValueError) as error:
            raise errors.InvalidArgumentError(
                f"round_log is {path!r}, expected a file that can be appended to ({error})"
            ) from None
        self._warned = False

    def write(self, report: Report) -> None:
        with self._or_warning():
            self._file.write(report.as_line())

    def close(self) -> None:
        """May be called twice."""
        with self._or_warning():
            self._file.close()

    @contextlib.contextmanager
    def _or_warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                errors.warn(
                    f"round_log {self._file.name!r} cannot be written ({error}), and may lack "
                    "rounds; training goes on; make space for it"
                )


@dataclass(eq=False)
class Round:
    """One round of this member, until it is committed."""

    number: int
    fragment: int
    codec: UpdateCodec | SumCodec
    pieces: list[bytes]
    residuals: Values  # valid after the commit; empty if nothing was sent
    weight: float
    counts: str  # the kind of the weight, one of WEIGHTS
    begun: float
    # Fields of the last attempt.
    gathers: list[Any] = field(default_factory=list)  # of the header, then of the chunks in order
    after: Round | None = None  # the open round before this one
    attempt: Future[None] | None = None
    result: Values = field(default_factory=dict)
    seen: bytes = b""  # digests of what each member has sent
    digest: bytes = NO_DIGEST  # of all received bytes and of the result
    keys: bytes = b""  # with secure sums: a digest of the public keys
    report: Report | None = None
    changes: bool = False  # a member knows of a process that wants to join
    agreed: bool = False  # all members have this result
    in_two_hops: bool = False
    owed: Values = field(default_factory=dict)  # in two hops: residuals of this owner's result


# The functions that compute the result of an attempt: from all whole updates, from this owner's
# parts in two hops, or from sums under masks. `rows` are the bytes of each member after its header,
# and `weights` their weights, by rank.


class Sums:
    """Inner products of the updates and the result in float64, in the form of decode_mean()."""

    def __init__(self, speakers: Sequence[int], members: int) -> None:
        self._speakers, self._members = speakers, members
        self.products = (ctypes.c_double * (2 * len(speakers) + 1))()

    def add(self, updates: Sequence[Values], result: Values) -> None:
        """Add the inner products of these values."""
        count = len(updates)
        for name, values in result.items():
            for whole, *parts in doubles(values, *(update[name] for update in updates)):
                self.products[2 * count] += float(whole @ whole)
                for at, part in enumerate(parts):
                    self.products[at] += float(part @ part)
                    self.products[count + at] += float(part @ whole)

    def by_rank(self) -> tuple[list[float], list[float]]:
        """Return norms and cosines; 0 for members without an update."""
        norms, cosines = [0.0] * self._members, [0.0] * self._members
        count = len(self._speakers)
        length = length_of(self.products[2 * count])
        for at, rank in enumerate(self._speakers):
            norms[rank] = length_of(self.products[at])
            if 0 < norms[rank] * length < math.inf:
                cosines[rank] = round(self.products[count + at] / (norms[rank] * length), 3)
        return norms, cosines


def combine(
    one: Round,
    rows: Iterable[Sequence[memoryview]],
    weights: Sequence[float],
    rule: Rule,
    before: Values,
    made: Callable[[torch.Tensor], None],
    whole: Values,
) -> tuple[list[float], list[float]]:
    """Compute the round's result from all members' updates. Return norms and cosines by rank.

    Args:
        rows: for each chunk in turn, the bytes of each member; may block for each chunk.
        before: the last result.
        made: called with the result's values in order, as soon as they are computed.
        whole: gets parameters that are complete before the last chunk, if the rule works chunk by
            chunk.
    """
    codec = one.codec
    speakers = [rank for rank, weight in enumerate(weights) if weight > 0]
    said = [weights[rank] for rank in speakers]
    factors = [weight / math.fsum(said) for weight in said]
    as_they_come = rule is mean and len(speakers) > 0
    updates = [codec.empty() for _ in speakers if not as_they_come]
    result = codec.empty() if as_they_come else {}
    sums = Sums(speakers, len(weights))
    for parts, sent in zip(codec.chunks, rows, strict=True):
        heard = [sent[rank] for rank in speakers]
        if as_they_come:
            codec.mean_chunk(heard, parts, factors, result, sums.products)
            for name, begin, end in codec.runs(parts):
                made(result[name][begin:end])
                if end == codec.sizes[name]:
                    whole[name] = result[name]
        else:
            for row, update in zip(heard, updates, strict=True):
                codec.decode_chunk(row, parts, update)
    if updates:
        result = rule(updates, said, before)
        sums.add(updates, result)
        for values in result.values():
            made(values)
    one.result = result
    return sums.by_rank()


def reduce_owned(
    meeting: Meeting,
    one: Round,
    rows: Sequence[memoryview],
    weights: Sequence[float],
    rule: Rule,
    seen: list,
) -> None:
    """Compute this owner's parts of the result, and gather those of all owners. rows: the bytes
    that each member sent to this owner. seen: hashes of each member's bytes, which are continued
    here."""
    speakers = [rank for rank, weight in enumerate(weights) if weight > 0]
    if not speakers:
        return
    codec, me, members = one.codec, meeting.epoch.rank, len(rows)
    parts = codec.owned(me, members)
    updates = [codec.decode_owned(rows[rank], parts) for rank in speakers]
    result = rule(updates, [weights[rank] for rank in speakers], {})
    mine, lost = codec.encode_result(result, members)
    # The residual will be multiplied by this member's weight in its next update.
    shares = math.fsum(weights) / weights[me] if weights[me] > 0 else len(speakers)
    one.owed = codec.owed(lost, shares)
    gather = meeting.start(f"results {one.fragment}", [mine])
    sent = gather.rows()
    for each, row in zip(seen, sent, strict=True):
        each.update(row)
    one.result = codec.decode_results(sent)


def add_hidden(
    meeting: Meeting,
    one: Round,
    rows: Sequence[memoryview],
    weights: list[float],
    masks: Masks,
    seen: list,
) -> list[float]:
    """Compute the round's result from the sum of all updates. Return the weights that count. If too
    few members have an update, nothing is sent, no weight counts, and the updates wait for the next
    round. seen: hashes of each member's bytes, which are continued here."""
    speakers = sum(weight > 0 for weight in weights)
    if speakers < FEWEST:
        return [0.0] * len(weights)
    codec = one.codec
    scales = codec.scales(sum_of(rows, codec.scale_bytes))
    codes, lost = codec.codes(codec.values(one.pieces), one.weight, scales, speakers)
    one.residuals = lost if one.weight > 0 else {}
    hidden = masks.hide(codes, codec.wide_bytes, one.number, CODES)
    gather = meeting.start(f"codes {one.fragment}", [hidden])
    sent = gather.rows()
    for each, row in zip(seen, sent, strict=True):
        each.update(row)
    total = sum_of(sent, codec.wide_bytes)
    one.result = codec.mean(total, scales, speakers, math.fsum(weights))
    return weights
