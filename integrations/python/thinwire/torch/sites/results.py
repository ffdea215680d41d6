"""The result of a round's attempt: of everybody's whole updates, of this owner's parts in two hops,
or of sums under masks. In all functions `rows` are the bytes that each member sent behind its
header, and `weights` theirs, by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.torch.sites.meeting import Meeting
from thinwire.torch.sites.round import Round
from thinwire.torch.sites.secure import CODES, FEWEST, Masks, sum_of
from thinwire.torch.sites.updates import Rule, Values, norm


def combine(
    one: Round, rows: Sequence[memoryview], weights: Sequence[float], rule: Rule, before: Values
) -> tuple[list[float], list[float]]:
    """Makes the round's result of everybody's update. Return norms and cosines by rank."""
    speakers = [rank for rank, weight in enumerate(weights) if weight > 0]
    updates = [one.codec.decode(rows[rank]) for rank in speakers]
    if updates:
        one.result = rule(updates, [weights[rank] for rank in speakers], before)
    norms, cosines = [0.0] * len(rows), [0.0] * len(rows)
    for rank, update in zip(speakers, updates, strict=True):
        norms[rank], cosines[rank] = norm(update), _cosine(update, one.result)
    return norms, cosines


def reduce_owned(
    meeting: Meeting,
    one: Round,
    rows: Sequence[memoryview],
    weights: Sequence[float],
    rule: Rule,
    seen: list,
) -> None:
    """Makes this owner's parts of the result, and takes those of all. rows: what each member
    sent to this owner. seen: hashes of what each member told everybody, which go on here."""
    speakers = [rank for rank, weight in enumerate(weights) if weight > 0]
    if not speakers:
        return
    codec, me, members = one.codec, meeting.epoch.rank, len(rows)
    parts = codec.owned(me, members)
    updates = [codec.decode_owned(rows[rank], parts) for rank in speakers]
    result = rule(updates, [weights[rank] for rank in speakers], {})
    mine, lost = codec.encode_result(result, members)
    # In this member's next update it counts by its weight.
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
    """Makes the round's result of the sum of all updates. Return the weights that count. With
    too few who have something to say nobody sends anything, no weight counts, and the updates
    wait for the next round. seen: hashes of what each member sent, which go on here."""
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


def _cosine(update: Values, result: Values) -> float:
    dot = sum(float((update[name].double() * result[name].double()).sum()) for name in update)
    length = norm(update) * norm(result)
    return round(dot / length, 3) if 0 < length < math.inf else 0.0
