"""Rounds: exchanges of what members have learned, each of which all members commit or none.

A round, of one fragment of the model:

1. Each member encodes its update once, with its residual, and hands the bytes to everybody, after
   a header with its weight and in chunks, so that each is encoded while the one before it is under
   way, and decoded while the next one is. All decode the same bytes, and apply the same rule. With
   more than eight members each hands every owner its part of the bytes, and owners hand all the
   result. What an owner's result loses joins the owner's own residual, so that its next update says
   it, whoever owns the part then.
2. All tell one another digests of what they received from each. A member commits when it has those
   of all, and they agree. So if one member has committed, every other one has the result. Where the
   caller waits for the round, the result is applied while bytes and votes are under way, and taken
   back bit for bit if one is missing or differs, before the caller goes on.
3. After a failure the members that are left meet again and tell how far they are. If one has
   committed the round, or all have its result, all commit it; else none does, and each sends the
   bytes that it still has to those who are left. No local step is lost.

With secure sums a retry without one member would give its update away to those who have the sum of
the attempt before, as the difference. So members that have a result hand it to those who took part
and lack it, and all commit it.

Members commit rounds in the order of their numbers. A newcomer, or one whose state has another
digest, takes the state in slices from all that have it, and checks the digest."""

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

# Round, fragment, whether somebody waits to come in, weight, seconds of a round and of a step, and
# what the weight is, as an index into WEIGHTS.
_HEADER = struct.Struct("<QIIdddB23x")
# Rounds committed, digest of the last one, whether it has the group's state, digest of the next
# round's result (zeros: not there), rounds begun, steps since. digests_of() follow.
_STATUS = struct.Struct("<Q16sI16sQQ")
_SIZE = struct.Struct("<Q16s")  # of a state, and its digest
_DIGEST = 16
_ABSENT = b"\xff" * _DIGEST  # in a status: others made the next round without this member
_MEETINGS = 5  # that fail in a row, until a member gives up
_SLICE = 4 << 20  # bytes of a state that one member sends at once
# A message of more bytes waits for its receiver's notice, which is a latency, and of these so many,
# to all others together, leave at once (transport/gloo/gloo_links.cc): what 100 Mb/s send in 20 ms.
_SMALL_BYTES = 16 << 10
_SMALL_PIECES = 15
# Notices wait behind the pieces that were sent before. So this chunk goes whole, before most of
# the pieces, and its receiver's notice is here when they have left.
_WHOLE = 1
_SMALL_FROM = 1 << 20  # bytes of an update; each piece costs some 200 more


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
        """rule: None for secure sums, whose rounds begin with a SumCodec. fragments: the first one
        follows the last one. background: rounds end on a thread of their own, while the caller
        trains."""
        self._members, self._settings, self._rule, self._model = members, settings, rule, model
        self._fragments = fragments
        self._masks: Masks | None = None  # of this meeting
        self._worker = ThreadPoolExecutor(1, "thinwire sites") if background else None
        self._meeting: Meeting | None = None
        self._open: deque[Round] = deque()
        self._sent_before = 0  # by meetings that are over
        self._known = False  # this member has the group's state
        self._last = NO_DIGEST
        self.committed = self.begun = 0  # rounds
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
        """Meets the others, and takes the group's state, unless that was done. It blocks until they
        have come."""
        if self._meeting is None:
            self._meet(None)

    def resume(self, committed: int) -> None:
        """Before meet(): this member has the group's state after that many rounds."""
        self.committed = self.begun = committed
        self._known = True

    def begin(
        self, fragment: int, codec: UpdateCodec | SumCodec, pieces: Iterable[bytes],
        residuals: Values, weight: float, counts: str,
    ) -> Round:  # fmt: skip
        """Begins a round with this member's encoded update; meet() comes before. pieces: asked for
        while those before are on their way; `residuals` are valid when it returns. counts: what
        the weight is, one of WEIGHTS."""
        now = time.monotonic()
        one = Round(self.begun, fragment, codec, [], residuals, weight, counts, now)
        self.begun += 1
        self._open.append(one)
        self._launch(one, pieces)
        return one

    def check(self) -> None:
        """Between steps: meets again at once if the oldest open round has failed, since the others
        wait for this member then."""
        if self.has_failed():
            self._again(self._open[0].attempt.exception())

    def has_failed(self) -> bool:
        """Return whether check() would meet again."""
        attempt = self._open[0].attempt if self._open else None
        return attempt is not None and attempt.done() and attempt.exception() is not None

    def interrupt(self, error: errors.Error) -> None:
        """This member leaves: the call that is under way on another thread raises an error, as do
        all later ones that would block."""
        self._interrupted = error
        meeting = self._meeting
        if meeting is not None:
            meeting.fail(error)
        self._members.close()

    def end(self, one: Round) -> None:
        """Blocks until the round, the oldest open one, is committed. A failure is followed by the
        next attempt, among those who are left."""
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
        """Leaves the group. May be called twice."""
        self._leave(None)
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._members.close()

    # One attempt.

    def _launch(self, one: Round, fresh: Iterable[bytes] = ()) -> None:
        """Sends a round's bytes in the meeting of now. A failure shows in the attempt. fresh: the
        pieces of a round that begins."""
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
            # On its own, since members of different codecs have chunks of different lengths.
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
                # Masks and results of owners have exchanges at other moments, which do not repeat.
                if self._masks is None and one.fragment == self._fragments - 1:
                    meeting.end_turn()
        except errors.InvalidArgumentError:
            raise
        except errors.Error as error:
            one.attempt = Future()
            one.attempt.set_exception(error)
        for _ in pieces:  # those that were not sent
            pass
        if one.attempt is None and self._worker is not None:
            one.attempt = self._worker.submit(self._attempt, meeting, one)

    def _takes_two_hops(self, one: Round, meeting: Meeting) -> bool:
        """Equal on all members. A rule that bears poisoners must not let owners make the result."""
        return (
            meeting.epoch.size > MOST_IN_ONE_HOP
            and one.codec.may_take_two_hops
            and self._rule is mean
        )

    def _attempt(self, meeting: Meeting, one: Round) -> None:
        """All of a round up to the moment before its commit."""
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
        """Makes the round's result. While bytes are under way, parameters whose result is whole are
        applied; return their names."""
        first, *rest = one.gathers
        rows = first.rows()
        heads = [_HEADER.unpack(row) for row in rows]
        _check_heads(heads, meeting.epoch)
        weights = [head[3] for head in heads]
        norms, cosines = [], []
        whole: Values = {}  # that are not applied
        applied: set[str] = set()
        seen = [hashlib.sha256(row) for row in rows]
        result = hashlib.sha256()

        def made(values: torch.Tensor) -> None:
            # Fast, and no defence: this member has made them itself, of the bytes in `seen`.
            result.update(digest_of(values).to_bytes(8, "little"))

        def meanwhile() -> None:
            if self._worker is None and whole:  # else the caller trains
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
        one.digest = digest  # from here on the round can be committed
        return applied

    def _vote(self, meeting: Meeting, one: Round, applied: set[str]) -> None:
        """applied: names of the parameters that need not be applied any more."""

        def meanwhile() -> None:
            rest = {name: values for name, values in one.result.items() if name not in applied}
            if self._worker is None and rest:  # else the caller trains
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
        """After a failure: meets the members that are left, and sends open rounds anew. An error
        that other members would not change is raised."""
        if isinstance(error, (errors.InvalidArgumentError, errors.MismatchError)):
            self._meeting.fail(error)
            raise errors.again(error)
        if not isinstance(error, errors.Error):
            raise error
        self._check_interrupted()
        _log.warning("round %d: %s", self.committed, error)
        self._meet(error)

    def _meet(self, why: errors.Error | None) -> None:
        """Ends the epoch and begins the next one; a failure meanwhile leads to one more."""
        for _ in range(_MEETINGS):
            if why is not None:
                self._leave(why)  # before meet(), so that the others hear of it
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
        """Returns when nothing of the meeting is under way."""
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
        """All members of a new meeting commit what one of them has, and take one state."""
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
        """Return what each member tells, how many rounds are committed, and by whom."""
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
        """Members that have the result of the next round give it to those who took part and lack
        it. Return whether any had it. The arguments are _tell_status's."""
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
        """Members that have another state than most of `sources` get it, in slices of all who have
        it."""
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
        """Hands `state`, of which `holders` have the same bytes, to all. Return it on the others,
        and nothing on holders."""
        me = meeting.epoch.rank
        part = -(-length // len(holders))
        size = min(_SLICE, -(-part // 2)) or 1  # two or more: an exchange that does not repeat
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
    """A Gather of a chunk that was started in pieces."""

    def __init__(self, gathers: list[Gather]) -> None:
        self._gathers = gathers

    def is_there(self) -> bool:
        return all(each.is_there() for each in self._gathers)

    def rows(self) -> list[memoryview]:
        sent = zip(*(each.rows() for each in self._gathers), strict=True)
        return [memoryview(b"".join(pieces)) for pieces in sent]


def _start_in_pieces(meeting: Meeting, name: str, chunk: bytes, small: int) -> Gather | _Pieces:
    """Starts a chunk, of which so many small pieces, which leave while larger messages still wait,
    go before the rest."""
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
    """Yields what each member sent, chunk by chunk, and adds it to `seen`. meanwhile: runs while a
    chunk is under way."""
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
