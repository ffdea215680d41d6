"""Rounds: exchanges of members' updates. Each round is committed by all members or by none.

A round, of one fragment of the model:

1. Each member encodes its update once, with its residual, and sends the bytes to all members: a
   header with its weight, then chunks, so that a chunk is encoded while the one before it is in
   flight, and decoded while the next one is. All decode the same bytes, and apply the same rule.
   With more than eight members each member sends every owner its part of the bytes, and owners send
   the result to all. The error of encoding an owner's result is added to the owner's own residual,
   so that its next update corrects it, even if the part has another owner then.
2. All exchange digests of the bytes that they received from each member. A member commits when it
   has all digests, and they agree. So if one member has committed, every other one has the result.
   If the caller waits for the round, the result is applied while bytes and votes are in flight, and
   undone bit for bit before the caller continues if a vote is missing or differs.
3. After a failure the remaining members meet again and exchange their progress. If one has
   committed the round, or all have its result, all commit it; otherwise none does, and each sends
   its encoded bytes again to the remaining members. No local step is lost.

With secure sums a retry without one member would reveal its update, as the difference, to the
members that have the sum of the attempt before. So members that have a result send it to those who
took part and lack it, and all commit it.

Members commit rounds in the order of their numbers. A new member, or one whose state has another
digest, gets the state in slices from all members that have it, and checks the digest."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from thinwire import errors
from thinwire.config import Config
from thinwire.torch.agree import digest as digest_of
from thinwire.torch.sites.alike import check_alike, check_names, check_secure, digests_of
from thinwire.torch.sites.meeting import MOST_IN_ONE_HOP, Epoch, Gather, Meeting
from thinwire.torch.sites.round import (
    MOST_WORK,
    NO_DIGEST,
    WEIGHTS,
    Members,
    Model,
    Report,
    Round,
    add_hidden,
    check_counts,
    combine,
    reduce_owned,
)
from thinwire.torch.sites.secure import SCALE, Masks, SumCodec
from thinwire.torch.sites.state import memory_of, pack, unpack
from thinwire.torch.sites.updates import Rule, UpdateCodec, Values, mean

_log = logging.getLogger("thinwire")

# Round, fragment, whether a process waits to join, weight, seconds of a round and of a step, and
# the kind of the weight, as an index into WEIGHTS.
_HEADER = struct.Struct("<QIIdddB23x")
# Rounds committed, digest of the last one, whether the member has the group's state, digest of the
# next round's result (zeros: none), rounds begun, steps since then. digests_of() follow.
_STATUS = struct.Struct("<Q16sI16sQQ")
_SIZE = struct.Struct("<Q16s")  # bytes of a state, and its digest
_DIGEST = 16
_ABSENT = b"\xff" * _DIGEST  # in a status: others made the next round without this member
_MEETINGS = 5  # a member gives up after this many failed meetings in a row
_SLICE = 4 << 20  # bytes of a state that one member sends at once
# A message of more bytes waits one latency for its receiver's notice. Small messages are sent at
# once (transport/gloo/gloo_links.cc); all other members together get _SMALL_PIECES of them, as much
# as 100 Mb/s send in 20 ms.
_SMALL_BYTES = 16 << 10
_SMALL_PIECES = 15
# Notices queue behind pieces that were sent before. So the chunk with this number is sent in one
# message, before most of the pieces, and its receiver's notice arrives by the time they have left.
_WHOLE = 1
_SMALL_FROM = 1 << 20  # least bytes of an update for small pieces; each costs 200 bytes more


class Rounds:
    """The rounds of one member. All calls come from one thread, the one that trains."""

    def __init__(
        self,
        members: Members,
        settings: Config,
        rule: Rule | None,
        model: Model,
        background: bool,
        fragments: int,
    ) -> None:
        """rule: None for secure sums, whose rounds use a SumCodec. fragments: the number of
        fragments, which have rounds in turn. background: rounds are completed on another thread,
        while the caller trains."""
        self._members, self._settings, self._rule, self._model = members, settings, rule, model
        self._fragments = fragments
        self._masks: Masks | None = None  # of the present meeting
        self._worker = ThreadPoolExecutor(1, "thinwire sites") if background else None
        self._meeting: Meeting | None = None
        self._open: deque[Round] = deque()
        self._sent_before = 0  # bytes sent in former meetings
        self._known = False  # True if this member has the group's state
        self._last = NO_DIGEST
        self.committed = self.begun = 0  # numbers of rounds
        self.epochs = self.retried = 0
        self._interrupted: errors.Error | None = None
        self.before: dict[int, Values] = {}  # the last result of each fragment

    @property
    def epoch(self) -> Epoch | None:
        return None if self._meeting is None else self._meeting.epoch

    @property
    def open(self) -> list[Round]:
        return list(self._open)

    def sent_bytes(self) -> int:
        return self._sent_before + (0 if self._meeting is None else self._meeting.wire_bytes())

    def meet(self) -> None:
        """Connect to the other members and get the group's state, unless that was done. Blocks
        until they have come."""
        if self._meeting is None:
            self._meet(None)

    def resume(self, committed: int) -> None:
        """Set the number of rounds after which this member has the group's state. Call it before
        meet()."""
        self.committed = self.begun = committed
        self._known = True

    def begin(
        self, fragment: int, codec: UpdateCodec | SumCodec, pieces: Iterable[bytes],
        residuals: Values, weight: float, counts: str,
    ) -> Round:  # fmt: skip
        """Begin a round with this member's encoded update. Call meet() first.

        Args:
            fragment: the number of the fragment.
            pieces: of the update; each is computed while those before it are in flight.
            residuals: after the update; valid when this returns.
            weight: of this member.
            codec: of the update.
            counts: the kind of the weight, one of WEIGHTS.
        """
        now = time.monotonic()
        one = Round(self.begun, fragment, codec, [], residuals, weight, counts, now)
        self.begun += 1
        self._open.append(one)
        self._launch(one, pieces)
        return one

    def check(self) -> None:
        """Between steps: meet again at once if the oldest open round has failed, because the others
        wait for this member then."""
        if self.has_failed():
            self._again(self._open[0].attempt.exception())

    def has_failed(self) -> bool:
        """Return whether check() would meet again."""
        attempt = self._open[0].attempt if self._open else None
        return attempt is not None and attempt.done() and attempt.exception() is not None

    def interrupt(self, error: errors.Error) -> None:
        """Make this member leave: the present call on another thread, and all later calls that
        would block, raise an error."""
        self._interrupted = error
        meeting = self._meeting
        if meeting is not None:
            meeting.fail(error)
        self._members.close()

    def end(self, one: Round) -> None:
        """Block until the round, the oldest open one, is committed. After a failure there is
        another attempt among the remaining members."""
        while one.number >= self.committed:
            try:
                if one.attempt is None:
                    self._attempt(self._meeting, one)
                else:
                    one.attempt.result()
            except Exception as error:  # a worker's thread may raise anything
                self._again(error)
                continue
            self._commit(one)
            if one.changes:
                self._meet(None)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        self._leave(None)
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._members.close()

    # One attempt.

    def _launch(self, one: Round, fresh: Iterable[bytes] = ()) -> None:
        """Send a round's bytes in the present meeting. A failure is kept in the attempt. fresh: the
        pieces of a new round."""
        earlier = [other for other in self._open if other.number < one.number]
        one.after = earlier[-1] if earlier else None
        one.result, one.digest, one.report = {}, NO_DIGEST, None
        one.changes = one.agreed = False
        one.owed, one.in_two_hops = {}, self._takes_two_hops(one, self._meeting)
        one.gathers, one.attempt = [], None
        header = _HEADER.pack(
            one.number, one.fragment, self._members.wants_change(), one.weight,
            *self._model.measured(), WEIGHTS.index(one.counts),
        )  # fmt: skip
        meeting = self._meeting
        if self._masks is not None or one.in_two_hops:
            one.pieces.extend(fresh)
        pieces: Iterable[bytes] = list(one.pieces) or _kept(fresh, one.pieces)
        if self._masks is not None:
            one.residuals, one.keys = {}, self._masks.digest
            places = one.codec.places(one.codec.values(pieces), one.weight)
            pieces = [self._masks.hide(places, len(places), one.number, SCALE)]
        try:
            # It is a separate exchange, because chunks of different codecs differ in length.
            one.gathers.append(meeting.start(f"head {one.fragment}", [header]))
            if one.in_two_hops:
                slices = one.codec.slices(pieces, meeting.epoch.size)
                one.gathers.append(meeting.scatter(f"owned {one.fragment}", slices))
            else:
                chunks = pieces if self._masks is not None else one.codec.cut(pieces)
                early = self._masks is None and one.codec.size >= _SMALL_FROM
                left = -(-_SMALL_PIECES // max(1, meeting.epoch.size - 1)) if early else 0
                for number, each in enumerate(chunks):
                    name = f"round {one.fragment} {number}"
                    small = 0 if number == _WHOLE else min(left, -(-len(each) // _SMALL_BYTES))
                    one.gathers.append(_start_in_pieces(meeting, name, each, small))
                    left -= small
                # Masks and results of owners have other exchanges, which do not repeat.
                if self._masks is None and one.fragment == self._fragments - 1:
                    meeting.end_turn()
        except errors.InvalidArgumentError:
            raise
        except errors.Error as error:
            one.attempt = Future()
            one.attempt.set_exception(error)
        for _ in pieces:  # encode those that were not sent, too
            pass
        if one.attempt is None and self._worker is not None:
            one.attempt = self._worker.submit(self._attempt, meeting, one)

    def _takes_two_hops(self, one: Round, meeting: Meeting) -> bool:
        """Return whether the round takes two hops; equal on all members. With a rule that tolerates
        poisoned updates it must not, because an owner could poison the result."""
        return (
            meeting.epoch.size > MOST_IN_ONE_HOP
            and one.codec.may_take_two_hops
            and self._rule is mean
        )

    def _attempt(self, meeting: Meeting, one: Round) -> None:
        """Do everything of a round but its commit."""
        if one.after is not None and (not one.after.agreed or one.after.changes):
            raise errors.Error("the round before this one is to be made first")
        if self._worker is None:
            self._model.keep(one)
        try:
            self._vote(meeting, one, self._receive(meeting, one))
        except BaseException:
            self._model.take_back()
            raise
        one.agreed = True

    def _receive(self, meeting: Meeting, one: Round) -> set[str]:
        """Compute the round's result. While bytes are in flight, apply the parameters whose result
        is complete; return their names."""
        first, *rest = one.gathers
        rows = first.rows()
        heads = [_HEADER.unpack(row) for row in rows]
        _check_heads(heads, meeting.epoch)
        weights = [head[3] for head in heads]
        norms, cosines = [], []
        whole: Values = {}  # complete parameters that are not applied yet
        applied: set[str] = set()
        seen = [hashlib.sha256(row) for row in rows]
        result = hashlib.sha256()

        def made(values: torch.Tensor) -> None:
            # A fast hash that is not cryptographic: this member has computed the values itself,
            # from the bytes in `seen`.
            result.update(digest_of(values).to_bytes(8, "little"))

        def meanwhile() -> None:
            if self._worker is None and whole:  # else the caller is training
                self._model.apply_ahead(one, dict(whole))
                applied.update(whole)
                whole.clear()

        if one.in_two_hops:
            reduce_owned(meeting, one, rest[0].rows(), weights, self._rule, seen)
            for values in one.result.values():
                made(values)
        elif self._masks is None:
            before = self.before.get(one.fragment, {})
            chunks = _chunks(rest, seen, meanwhile)
            norms, cosines = combine(one, chunks, weights, self._rule, before, made, whole)
        else:
            (sent,) = _chunks(rest, seen)
            weights = add_hidden(meeting, one, sent, weights, self._masks, seen)
            _add(result.update, one.result)
        one.seen = b"".join(each.digest()[:_DIGEST] for each in seen)
        result.update(one.seen)
        digest = result.digest()[:_DIGEST]
        one.changes = any(head[2] for head in heads)
        one.report = Report(
            one.number, one.fragment, meeting.epoch.names, tuple(weights), tuple(norms),
            tuple(cosines), digest.hex(), time.monotonic() - one.begun,
            self._sent_before + meeting.wire_bytes(), tuple(head[4:6] for head in heads),
        )  # fmt: skip
        one.digest = digest  # the round can be committed now
        return applied

    def _vote(self, meeting: Meeting, one: Round, applied: set[str]) -> None:
        """Exchange votes. applied: names of the parameters that are applied already."""

        def meanwhile() -> None:
            rest = {name: values for name, values in one.result.items() if name not in applied}
            if self._worker is None and rest:  # else the caller is training
                self._model.apply_ahead(one, rest)

        votes = meeting.tell(f"vote {one.fragment}", one.digest + one.seen, meanwhile)
        names = meeting.epoch.names
        for sender, name in enumerate(names):
            at = (sender + 1) * _DIGEST
            if len({vote[at : at + _DIGEST] for vote in votes}) > 1:
                raise errors.MismatchError(
                    f"round {one.number}: member {sender} ('{name}') has sent different bytes to "
                    "different members; find out why before it takes part again"
                )
        others = [n for n, vote in zip(names, votes, strict=True) if vote[:_DIGEST] != one.digest]
        if others:
            raise errors.MismatchError(
                f"round {one.number}: {', '.join(others)} made another result of the same updates "
                "than this member; use the same aggregate= and version on all members"
            )

    def _commit(self, one: Round) -> None:
        self._open.remove(one)
        self.before[one.fragment] = one.result
        self.committed, self._last = one.number + 1, one.digest
        self._model.apply(one)

    # From one meeting to the next.

    def _again(self, error: BaseException) -> None:
        """After a failure: meet the remaining members, and send open rounds again. Raise an error
        that another meeting would not fix."""
        if isinstance(error, (errors.InvalidArgumentError, errors.MismatchError)):
            self._meeting.fail(error)
            raise errors.again(error)
        if not isinstance(error, errors.Error):
            raise error
        self._check_interrupted()
        _log.warning("round %d: %s", self.committed, error)
        self._meet(error)

    def _meet(self, why: errors.Error | None) -> None:
        """End the epoch and begin the next one; after a failure try another one."""
        for _ in range(_MEETINGS):
            if why is not None:
                self._leave(why)  # before meet(), so that the others notice it
            self._check_interrupted()
            epoch = self._members.meet(why)
            if self._meeting is not None and self._meeting.epoch is epoch:
                return
            self._leave(why)
            self._meeting = Meeting(epoch, self._settings)
            self._check_interrupted()
            self.epochs += 1
            self._members.guard(epoch, self._meeting.fail)
            try:
                self._agree(self._meeting)
                return
            except (errors.InvalidArgumentError, errors.MismatchError):
                raise
            except errors.Error as error:
                _log.warning("meeting %d: %s", epoch.number, error)
                why = error
        self._leave(why)
        raise errors.Error(
            f"members met {_MEETINGS} times in a row, and each time it failed; the last time: "
            f"{why}; look for one that cannot be reached"
        )

    def _check_interrupted(self) -> None:
        if self._interrupted is not None:
            raise errors.again(self._interrupted)

    def _leave(self, why: errors.Error | None) -> None:
        """Return when nothing of the meeting is in flight."""
        if self._meeting is None:
            return
        if why is not None or any(one.gathers for one in self._open):
            self._meeting.fail(why or errors.Error("a member has left"))
        for one in self._open:
            if one.attempt is not None and not one.attempt.cancel():
                one.attempt.exception()  # waits
            one.gathers = []
        with contextlib.suppress(errors.Error):
            self._sent_before += self._meeting.wire_bytes()
        self._meeting.close()
        self._meeting = None

    def _agree(self, meeting: Meeting) -> None:
        """Make all members of a new meeting commit the rounds that one of them has committed, and
        have the same state."""
        while self._open and self._open[0].agreed:
            self._commit(self._open[0])
        for one in self._open:
            if one.digest == _ABSENT:
                one.digest = NO_DIGEST
        told, furthest, sources = self._tell_status(meeting)
        known = any(each[2] for each in told)
        names, digests = list(self._model.alike()), [each[6] for each in told]
        check_alike(meeting.epoch, sources[0], names, digests, known)
        check_names(meeting, [each[2] for each in told])
        # A member may have all votes of a round that another lacks, but not of two.
        last = (furthest - 1, told[sources[0]][1])
        behind = [rank for rank, each in enumerate(told) if each[2] and (each[0], each[3]) == last]
        if behind:
            if meeting.epoch.rank in behind:
                self._commit(self._open[0])
            told, furthest, sources = self._tell_status(meeting)
        self._masks = None
        if self._rule is None:
            check_secure(meeting.epoch)
            self._masks = Masks.agree(meeting)
            if self._hand_result_over(meeting, told, furthest, sources):
                told, furthest, sources = self._tell_status(meeting)
        me = meeting.epoch.rank
        results = {told[rank][3] for rank in sources}
        all_have_it = len(results) == 1 and results != {NO_DIGEST}
        if all_have_it and me in sources:
            self._commit(self._open[0])
        self._take_state(meeting, sources)
        if me in sources:
            for one in self._open:
                self.retried += one is self._open[0]
                self._launch(one)
        else:
            source = told[sources[0]]
            self.committed = furthest + all_have_it
            self.begun, self._last = self.committed, NO_DIGEST
            self._open.clear()
            self._known = True
            self._model.follow(max(told[rank][4] for rank in sources), source[5])
        self._known = True

    def _tell_status(self, meeting: Meeting) -> tuple[list[tuple], int, list[int]]:
        """Return the status of each member, the largest number of committed rounds, and the members
        that have committed as many."""
        result = self._open[0].digest if self._open else NO_DIGEST
        mine = _STATUS.pack(
            self.committed, self._last, self._known, result, self.begun, self._model.since()
        )
        told = [
            (*_STATUS.unpack_from(each), each[_STATUS.size :])
            for each in meeting.tell("status", mine + digests_of(self._model.alike()))
        ]
        knowing = [rank for rank, each in enumerate(told) if each[2] and each[3] != _ABSENT]
        furthest = max((told[rank][0] for rank in knowing), default=0)
        return told, furthest, [rank for rank in knowing if told[rank][0] == furthest] or [0]

    def _hand_result_over(
        self, meeting: Meeting, told: list[tuple], furthest: int, sources: list[int]
    ) -> bool:
        """Send the result of the next round from members that have it to those that took part and
        lack it. Return whether any had it. The arguments are those that _tell_status() returns."""
        names, me = meeting.epoch.names, meeting.epoch.rank
        holders = [rank for rank in sources if told[rank][3] != NO_DIGEST]
        if not holders:
            return False
        if len({told[rank][3] for rank in holders}) > 1:
            raise errors.MismatchError(
                f"round {furthest}: members {[names[rank] for rank in holders]} have different "
                "results of it; find out why before they train on"
            )
        one, state = self._open[0] if self._open else None, b""
        if me in holders:
            told_of_it = [one.report.members, one.report.weights, one.report.measured]
            state = pack([one.result, one.keys.hex(), one.seen.hex(), *told_of_it])
        lengths = meeting.tell("result", len(state).to_bytes(8, "little"))
        length = max(int.from_bytes(each, "little") for each in lengths)
        taken = self._share(meeting, holders, state, length)
        if me in holders or me not in sources or one is None:
            return True
        result, keys, seen, members, weights, measured = unpack(taken)
        if bytes.fromhex(keys) != one.keys:
            one.digest = _ABSENT
            return True
        result = {name: result[name] for name in one.codec.sizes if name in result}
        digest = _digest_of(bytes.fromhex(seen), result)
        if digest != told[holders[0]][3]:
            raise errors.DataLossError(
                f"member {me}: the result of round {furthest} that members "
                f"{[names[rank] for rank in holders]} sent has another digest than they told; one "
                "of them is not to be trusted, or its memory is damaged"
            )
        one.result, one.seen, one.digest = result, bytes.fromhex(seen), digest
        one.report = Report(
            one.number, one.fragment, tuple(members), tuple(weights), (), (), digest.hex(),
            time.monotonic() - one.begun, self.sent_bytes(), tuple(map(tuple, measured)),
        )  # fmt: skip
        return True

    def _take_state(self, meeting: Meeting, sources: list[int]) -> None:
        """Give the state of most of `sources` to members that have another one, in slices from all
        members that have it."""
        me = meeting.epoch.rank
        state = self._model.dump()
        digest = hashlib.sha256(state).digest()[:_DIGEST]
        told = [_SIZE.unpack(e) for e in meeting.tell("state", _SIZE.pack(len(state), digest))]
        good, _ = Counter(told[rank] for rank in sources).most_common(1)[0]
        holders = [rank for rank in range(len(told)) if told[rank] == good]
        if len(holders) == len(told):
            return
        diverged = [meeting.epoch.names[rank] for rank in sources if told[rank] != good]
        if diverged:
            _log.warning("%s: another state than most members; it is replaced", diverged)
        taken = self._share(meeting, holders, state, good[0])
        if me in holders:
            return
        if hashlib.sha256(taken).digest()[:_DIGEST] != good[1]:
            raise errors.DataLossError(
                f"member {me}: the state that members "
                f"{[meeting.epoch.names[rank] for rank in holders]} sent has another digest than "
                "they told; one of them is not to be trusted, or its memory is damaged"
            )
        self._model.load(taken, self._known and not diverged)

    def _share(self, meeting: Meeting, holders: list[int], state: bytes, length: int) -> bytes:
        """Send `state`, of which all `holders` have the same bytes, to the other members. Return it
        there, and nothing on holders."""
        me = meeting.epoch.rank
        part = -(-length // len(holders))
        size = min(_SLICE, -(-part // 2)) or 1  # two or more, so that none is predicted
        begin = holders.index(me) * part if me in holders else 0
        mine = state[begin : begin + part] if me in holders else b""
        pieces: list[list[bytes]] = [[] for _ in range(meeting.epoch.size)]
        padded = -(-size // 4) * 4
        for at in range(0, max(part, 2 * size), size):
            rows = meeting.start("state", [mine[at : at + size].ljust(padded, b"\0")])
            if me not in holders:
                for rank, row in enumerate(rows.rows()):
                    pieces[rank].append(bytes(row[: max(0, min(size, part - at))]))
            else:
                rows.rows()
        return b"".join(b"".join(pieces[rank]) for rank in holders)[:length]


class _Pieces:
    """The Gather of a chunk that was sent in pieces."""

    def __init__(self, gathers: list[Gather]) -> None:
        self._gathers = gathers

    def is_there(self) -> bool:
        return all(each.is_there() for each in self._gathers)

    def rows(self) -> list[memoryview]:
        sent = zip(*(each.rows() for each in self._gathers), strict=True)
        return [memoryview(b"".join(pieces)) for pieces in sent]


def _start_in_pieces(meeting: Meeting, name: str, chunk: bytes, small: int) -> Gather | _Pieces:
    """Start the exchange of a chunk. Its first `small` pieces are small messages, which leave while
    larger messages still wait."""
    if small == 0:
        return meeting.start(name, [chunk])
    cuts = [*range(0, min(len(chunk), small * _SMALL_BYTES + 1), _SMALL_BYTES), len(chunk)]
    return _Pieces(
        [
            meeting.start(f"{name} {begin}", [chunk[begin:end]])
            for begin, end in itertools.pairwise(cuts)
            if begin < end
        ]
    )


def _kept(pieces: Iterable[bytes], kept: list[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        kept.append(piece)
        yield piece


def _chunks(
    gathers: Sequence[Gather | _Pieces], seen: list, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[list[memoryview]]:
    """Yield the bytes of each member, chunk by chunk, and add them to `seen`. meanwhile: runs while
    a chunk is in flight."""
    for gather in gathers:
        if not gather.is_there():
            meanwhile()
        rows = gather.rows()
        for each, row in zip(seen, rows, strict=True):
            each.update(row)
        yield rows


def _add(update: Callable[[bytes], object], result: Values) -> None:
    for values in result.values():
        update(memory_of(values))


def _digest_of(seen: bytes, result: Values) -> bytes:
    digest = hashlib.sha256()
    _add(digest.update, result)
    digest.update(seen)
    return digest.digest()[:_DIGEST]


def _check_heads(heads: list[tuple], epoch: Epoch) -> None:
    mine = heads[epoch.rank]
    for rank, head in enumerate(heads):
        if head[:2] != mine[:2]:
            raise errors.MismatchError(
                f"member {rank} ('{epoch.names[rank]}') is in round {head[0]}, fragment {head[1]}; "
                f"expected round {mine[0]}, fragment {mine[1]}; use the same sync_every"
            )
        if not 0 <= head[3] <= MOST_WORK:
            raise errors.MismatchError(
                f"member {rank} ('{epoch.names[rank]}') has weight {head[3]}, expected 0 to "
                f"{MOST_WORK:g}; look at what it passes to saw()"
            )
    check_counts({
        f"member {rank} ('{epoch.names[rank]}')": head[6]
        for rank, head in enumerate(heads) if head[3] > 0
    })  # fmt: skip
