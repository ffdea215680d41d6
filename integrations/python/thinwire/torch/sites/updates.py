"""The update of a member since the last round, as bytes with error feedback, and the rules that
make one update of all members' ones.

With up to eight members everybody's bytes go to everybody. With more, means of dense codecs take
two hops: each part of the update has an owner, to whom all send it and who sends all its result.

Every member decodes the same bytes and computes the same rule in the same order, so all have the
same bits. A sum over members is a loop over ranks; norms are sums in float64, rounded to 16 bits,
so that the order in which a CPU adds them does not show."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.codec import codec_info, decode, decode_mean, encode, encoded_bytes
from thinwire.errors import InvalidArgumentError
from thinwire.torch import tensors
from thinwire.torch.exchange.rules import Codec, Rules, Structure

_EXACT_BELOW = 1024  # elements of a tensor that goes in fp32, whose bytes do not count
_CUT = 32768  # elements of a part; shorter ones cost adaptive codecs accuracy
_CHUNK_BYTES = 128 << 10
_MOST_CHUNKS = 8
_LAST_CHUNKS = 8  # times smaller the last chunk is: nothing is under way while it is worked on
_CACHED = 65536  # elements that are worked on at once, so that they stay in a core's cache
_CLIP_ROUNDS = 3
TRIM = 0.2  # of the members, at each end

Values = dict[Any, torch.Tensor]  # flat float32 on the host, by parameter or number of a part


class Part(NamedTuple):
    """Elements of a tensor that are encoded together, and have one owner in two hops."""

    name: str  # of the parameter
    begin: int
    end: int
    up: str  # the codec of a member's update
    down: str  # of an owner's result


class UpdateCodec:
    """Encodes the update of some parameters, part by part. One residual for each parameter is the
    caller's."""

    def __init__(self, codec: Codec, sizes: Mapping[str, int], structure: Structure) -> None:
        """sizes: elements by parameter name. InvalidArgumentError for a codec or rule that cannot
        be."""
        rules = Rules(codec, structure)
        rules.check_specs()
        rules.check_names(sizes)
        self.sizes = dict(sizes)
        infos = {
            name: codec_info(
                "fp32" if numel < _EXACT_BELOW else rules.by_pattern[rules.rule_of(name)]
            )
            for name, numel in sizes.items()
        }
        self.specs = {name: info.spec for name, info in infos.items()}
        # Entries of several members are mostly different ones, so their mean is no smaller.
        self.may_take_two_hops = not any(info.entries for info in infos.values())
        self.parts = [
            Part(name, begin, min(begin + cut, numel), infos[name].up, infos[name].down)
            for name, numel in sizes.items()
            for cut in [numel or 1 if infos[name].entries else _CUT]
            for begin in range(0, numel, cut)
        ]
        lengths = [encoded_bytes(part.up, part.end - part.begin) for part in self.parts]
        self._at = list(itertools.accumulate(lengths, initial=0))  # where each part begins
        self.size = -(-self._at[-1] // 4) * 4
        self.chunks = self._cut(max(_CHUNK_BYTES, self.size // _MOST_CHUNKS))

    def encode(
        self, update: Callable[[str, int, int], torch.Tensor], kept: Values, decay: float,
        lost: Values,
    ) -> Iterator[bytes]:  # fmt: skip
        """Yields the pieces of `size` bytes, each as soon as it is asked for, so that the first
        ones are on their way before the last ones are computed.

        Args:
            update: (name, begin, end) -> these elements of the update, flat float32 on the host.
            kept: what earlier rounds have lost; `decay` times it is added.
            lost: gets what this one loses, by name; whole with the last piece.
        """
        for name, begin, end, up, _ in self.parts:
            if begin == 0:
                lost[name] = tensors.empty(self.sizes[name])
            residual = lost[name][begin:end]
            torch.mul(kept[name][begin:end], decay, out=residual)
            yield encode(up, update(name, begin, end), residual)
        yield bytes(self.size - self._at[-1])

    def nothing(self) -> list[bytes]:
        """Return as many bytes of a member that has nothing to say."""
        return [bytes(self.size)]

    # Chunks: runs of parts that travel one after another, so that each is worked on while the
    # next ones are on their way.

    def _cut(self, most: int) -> list[range]:
        """Chunks of that many bytes, the first one small, so that it leaves soon, and the last ones
        smaller and smaller."""
        chunks, first, least = [], 0, most // _LAST_CHUNKS
        for at in range(len(self.parts)):
            left, rest = self._at[-1] - self._at[first], self._at[-1] - self._at[at + 1]
            enough = least if rest >= most and not chunks else min(most, max(least, left // 2))
            last = least if left < 2 * least else min(least, left // 3)
            if left - rest >= enough and (rest >= last or rest == 0):
                chunks.append(range(first, at + 1))
                first = at + 1
        if first < len(self.parts) or not chunks:
            chunks.append(range(first, len(self.parts)))
        return chunks

    def cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the bytes of each chunk, a multiple of 4 above 0, of what encode() yields."""
        source, held = iter(pieces), b""
        for begin, end in map(self._bounds, self.chunks):
            taken, length = [held], len(held)
            while length < end - begin:
                taken.append(next(source))
                length += len(taken[-1])
            whole = b"".join(taken)
            chunk, held = whole[: end - begin], whole[end - begin :]
            yield chunk + bytes(-len(chunk) % 4) or bytes(4)

    def empty(self) -> Values:
        """Return memory for an update."""
        return {name: tensors.empty(numel) for name, numel in self.sizes.items()}

    def runs(self, parts: range) -> list[tuple[str, int, int]]:
        """Return what a chunk has of each parameter: its name, first element and end."""
        return [
            (self.parts[first].name, self.parts[first].begin, self.parts[last - 1].end)
            for first, last in self._runs(parts)
        ]

    def _runs(self, parts: range) -> list[tuple[int, int]]:
        """The first part of each parameter of a chunk, and the one behind its last."""
        found: list[tuple[int, int]] = []
        for at in parts:
            again = found and self.parts[found[-1][0]].name == self.parts[at].name
            found.append((found.pop()[0] if again else at, at + 1))
        return found

    def decode(self, data: memoryview) -> Values:
        """Return an update, of the bytes that encode() returned."""
        values = self.empty()
        self.decode_chunk(data, range(len(self.parts)), values)
        return values

    def decode_chunk(self, data: memoryview, parts: range, out: Values) -> None:
        """Decodes a chunk into its place."""
        begin = 0
        for at in parts:
            name, first, last, up, _ = self.parts[at]
            end = begin + encoded_bytes(up, last - first)
            decode(up, data[begin:end], last - first, out[name][first:last])
            begin = end

    def mean_chunk(
        self, rows: Sequence[memoryview], parts: range, factors: Sequence[float], out: Values,
        products: ctypes.Array[ctypes.c_double],
    ) -> None:  # fmt: skip
        """Decodes a chunk of several members, and puts the mean by factor in its place. products:
        decode_mean()'s."""
        at = self._at[parts.start] if parts else 0
        for first, last in self._runs(parts):
            name, begin, _, up, _ = self.parts[first]
            end = self.parts[last - 1].end
            piece = slice(self._at[first] - at, self._at[last] - at)
            shard = self.parts[first].end - begin or 1
            decode_mean(up, [row[piece] for row in rows], factors, shard, out[name][begin:end],
                        products)  # fmt: skip

    # Two hops: each member owns some parts, of which it gets all updates and makes the result.

    def owned(self, owner: int, members: int) -> range:
        """Return the parts of an owner; all owners have about as many bytes."""
        first, last = (
            bisect.bisect_left(self._at, self._at[-1] * at / members, hi=len(self.parts))
            for at in (owner, owner + 1)
        )
        return range(first, len(self.parts) if owner == members - 1 else last)

    def slices(self, pieces: Sequence[bytes], members: int) -> list[bytes]:
        """Return the bytes for each owner, all of one length above 0, of what encode() returned."""
        whole = b"".join(pieces)
        cut = [self._bounds(self.owned(owner, members)) for owner in range(members)]
        length = -(-max(end - begin for begin, end in cut) // 4) * 4 or 4
        return [whole[begin:end].ljust(length, b"\0") for begin, end in cut]

    def _bounds(self, parts: range) -> tuple[int, int]:
        return self._at[parts.start], self._at[max(parts.start, parts.stop)]

    def decode_owned(self, data: memoryview, parts: range) -> dict[int, torch.Tensor]:
        """Return a member's update of an owner's parts, by number."""
        return self._decoded(data, parts, [self.parts[at].up for at in parts])

    def encode_result(
        self, result: Mapping[int, torch.Tensor], members: int
    ) -> tuple[bytes, dict[int, torch.Tensor]]:
        """Return an owner's bytes of its parts of the result, as long as every other owner's, and
        what they have lost."""
        lost = {at: torch.zeros_like(values) for at, values in result.items()}
        mine = b"".join(encode(self.parts[at].down, result[at], lost[at]) for at in result)
        lengths = [
            sum(self._down_bytes(at) for at in self.owned(owner, members))
            for owner in range(members)
        ]
        return mine.ljust(-(-max(lengths) // 4) * 4 or 4, b"\0"), lost

    def _down_bytes(self, at: int) -> int:
        part = self.parts[at]
        return encoded_bytes(part.down, part.end - part.begin)

    def decode_results(self, rows: Sequence[memoryview]) -> Values:
        """Return the result, of the bytes of all owners."""
        found: dict[int, torch.Tensor] = {}
        for owner, row in enumerate(rows):
            parts = self.owned(owner, len(rows))
            found.update(self._decoded(row, parts, [self.parts[at].down for at in parts]))
        return self._joined(found)

    def owed(self, lost: Mapping[int, torch.Tensor], factor: float) -> Values:
        """Return what owners' results have lost, as residuals by parameter, times a factor."""
        found: Values = {}
        for at, values in lost.items():
            name, begin, end, _, _ = self.parts[at]
            whole = found.setdefault(name, tensors.zeros(self.sizes[name]))
            whole[begin:end] = values * factor
        return found

    def _decoded(
        self, data: memoryview, parts: range, specs: Sequence[str]
    ) -> dict[int, torch.Tensor]:
        values, begin = {}, 0
        for at, spec in zip(parts, specs, strict=True):
            numel = self.parts[at].end - self.parts[at].begin
            end = begin + encoded_bytes(spec, numel)
            values[at] = torch.frombuffer(decode(spec, data[begin:end], numel), dtype=torch.float32)
            begin = end
        return values

    def _joined(self, found: Mapping[int, torch.Tensor]) -> Values:
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in self.sizes}
        for at, part in enumerate(self.parts):
            pieces[part.name].append(found[at])
        return {
            name: each[0] if len(each) == 1 else torch.cat(each) if each else tensors.zeros(0)
            for name, each in pieces.items()
        }


Rule = Callable[[Sequence[Values], Sequence[float], Values], Values]


def rule_of(aggregate: str) -> Rule:
    """The rule of that name: (updates, their weights, the update before) -> update."""
    if aggregate not in _RULES:
        raise InvalidArgumentError(
            f"aggregate is {aggregate!r}, expected one of {', '.join(map(repr, _RULES))}"
        )
    return _RULES[aggregate]


def mean(updates: Sequence[Values], weights: Sequence[float], _before: Values) -> Values:
    """The mean by weight: FedAvg's (arXiv 1602.05629), where weights are samples."""
    result = {name: torch.empty_like(values) for name, values in updates[0].items()}
    total = math.fsum(weights)
    for name, whole in result.items():
        for at in range(0, whole.numel(), _CACHED):
            piece = slice(at, at + _CACHED)
            torch.mul(updates[0][name][piece], weights[0] / total, out=whole[piece])
            for update, weight in zip(updates[1:], weights[1:], strict=True):
                whole[piece].add_(update[name][piece] * (weight / total))
    return result


def median(updates: Sequence[Values], _weights: Sequence[float], _before: Values) -> Values:
    """The median of each element; of an even number of members, the mean of the middle two."""
    return trimmed(updates, _weights, _before, cut=(len(updates) - 1) // 2)


def trimmed(
    updates: Sequence[Values],
    _weights: Sequence[float],
    _before: Values,
    cut: int | None = None,
) -> Values:
    """The mean of each element without the `cut` largest and smallest ones, a fifth of the members
    at each end (arXiv 1803.01498). Weights do not count."""
    cut = int(TRIM * len(updates)) if cut is None else cut
    result = {}
    for name in updates[0]:
        ordered = torch.stack([update[name] for update in updates]).sort(0).values
        kept = ordered[cut : len(updates) - cut]
        total = kept[0].clone()
        for row in kept[1:]:
            total.add_(row)
        result[name] = total.div_(len(kept))
    return result


def centered_clip(updates: Sequence[Values], _weights: Sequence[float], before: Values) -> Values:
    """Centered clipping (arXiv 2012.10333) of updates that were mixed with their nearest ones (NNM,
    arXiv 2302.01772), so that members who have learned unlike things do not look like poisoners.
    From the last round's update as the centre it goes three times a step to the mean of the
    differences, each shortened to the median of their norms. Weights do not count: a poisoner would
    choose its own. An update with an element that is not finite is left out if others are not."""
    heard = [update for update in updates if norm(update) < math.inf] or updates
    mixes = Counter(_nearest(heard))
    mixed = [mean([heard[at] for at in mix], [1.0] * len(mix), {}) for mix in mixes]
    counts = list(mixes.values())
    centre = {name: before.get(name, torch.zeros_like(v)).clone() for name, v in heard[0].items()}
    for _ in range(_CLIP_ROUNDS):
        away = [{name: each[name] - centre[name] for name in centre} for each in mixed]
        norms = [norm(each) for each in away]
        of_all = [n for n, count in zip(norms, counts, strict=True) for _ in range(count)]
        radius = statistics.median_low(of_all)
        shorter = [1.0 if n <= radius else _rounded(radius / n) for n in norms]
        for each, factor in zip(away, shorter, strict=True):
            for values in each.values():
                values.mul_(factor)
        for name, step in mean(away, counts, {}).items():
            centre[name].add_(step)
    return centre


def _nearest(updates: Sequence[Values]) -> list[tuple[int, ...]]:
    """For each update the places, in order, of the nearest ones with itself, that are all but a
    fifth, rounded up."""
    members = len(updates)
    apart = [[0.0] * members for _ in updates]
    for a, b in itertools.combinations(range(members), 2):
        apart[a][b] = apart[b][a] = distance(updates[a], updates[b])
    kept = max(1, members * 4 // 5)
    return [
        tuple(sorted(sorted(range(members), key=lambda at: (row[at], at))[:kept])) for row in apart
    ]


_RULES: dict[str, Rule] = {
    "mean": mean, "centered_clip": centered_clip, "trimmed": trimmed, "median": median,
}  # fmt: skip


def norm(update: Values) -> float:
    """The Euclidean norm over all parameters, in 16 bits; infinite if an element is not finite."""
    return length_of(math.fsum(dot(values, values) for values in update.values()))


def distance(a: Values, b: Values) -> float:
    """The Euclidean distance, in 16 bits."""
    away = (x.sub_(y) for name in a for x, y in doubles(a[name], b[name]))
    return length_of(math.fsum(float(each @ each) for each in away))


def length_of(squares: float) -> float:
    """The root of a sum of squares, in 16 bits; infinite if an element is not finite."""
    return _rounded(math.sqrt(squares)) if math.isfinite(squares) else math.inf


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """The sum of products in float64."""
    return math.fsum(float(x @ y) for x, y in doubles(a, b))


def doubles(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yields pieces of tensors of one length in float64, that of each tensor side by side."""
    for pieces in zip(*(each.split(_CACHED) for each in tensors), strict=True):
        yield [each.double() for each in pieces]


def _rounded(value: float) -> float:
    """To 16 bits, in which sums in another order agree."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 65536), exponent - 16)
