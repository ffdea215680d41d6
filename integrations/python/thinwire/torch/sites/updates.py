"""The encoding of a member's update since the last round, with error feedback, and the rules that
combine all members' updates into one.

With up to eight members each member sends its bytes to all others. With more, means of dense codecs
take two hops: each part of the update has an owner, which gets the part from all members and sends
its result to all.

Every member decodes the same bytes and computes the same rule in the same order, so all have the
same bits. A sum over members is a loop over ranks. Norms are sums in float64, rounded to 16 bits,
so that they do not depend on the order in which a CPU adds."""

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

_EXACT_BELOW = 1024  # tensors with fewer elements are sent in fp32; their bytes do not matter
_CUT = 32768  # elements of a part; with shorter parts the adaptive codec loses accuracy
_CHUNK_BYTES = 128 << 10
_MOST_CHUNKS = 8
_LAST_CHUNKS = 8  # the last chunk is this many times smaller: its decoding overlaps with nothing
_CACHED = 65536  # elements that are processed at once, so that they stay in a core's cache
_CLIP_ROUNDS = 3
TRIM = 0.2  # the fraction of members that is cut at each end

Values = dict[Any, torch.Tensor]  # flat float32 on the host, by parameter or number of a part


class Part(NamedTuple):
    """Elements of a tensor that are encoded together, and have one owner in two hops."""

    name: str  # of the parameter
    begin: int
    end: int
    up: str  # the codec of a member's update
    down: str  # of an owner's result


class UpdateCodec:
    """Encodes the update of some parameters, part by part. The caller keeps the residual of each
    parameter."""

    def __init__(self, codec: Codec, sizes: Mapping[str, int], structure: Structure) -> None:
        """sizes: elements by parameter name. InvalidArgumentError for a wrong codec or rule."""
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
        # Entries (topk) of different members mostly differ, so their mean has as many bytes.
        self.may_take_two_hops = not any(info.entries for info in infos.values())
        self.parts = [
            Part(name, begin, min(begin + cut, numel), infos[name].up, infos[name].down)
            for name, numel in sizes.items()
            for cut in [numel or 1 if infos[name].entries else _CUT]
            for begin in range(0, numel, cut)
        ]
        lengths = [encoded_bytes(part.up, part.end - part.begin) for part in self.parts]
        self._at = list(itertools.accumulate(lengths, initial=0))  # the first byte of each part
        self.size = -(-self._at[-1] // 4) * 4
        self.chunks = self._cut(max(_CHUNK_BYTES, self.size // _MOST_CHUNKS))

    def encode(
        self, update: Callable[[str, int, int], torch.Tensor], kept: Values, decay: float,
        lost: Values,
    ) -> Iterator[bytes]:  # fmt: skip
        """Yield pieces of `size` bytes. Each is computed when it is requested, so that the first
        ones are in flight before the last ones are computed.

        Args:
            update: (name, begin, end) -> these elements of the update, flat float32 on the host.
            kept: the residuals of earlier rounds; `decay` times them are added.
            lost: gets the new residuals by name; complete after the last piece.
        """
        for name, begin, end, up, _ in self.parts:
            if begin == 0:
                lost[name] = tensors.empty(self.sizes[name])
            residual = lost[name][begin:end]
            torch.mul(kept[name][begin:end], decay, out=residual)
            yield encode(up, update(name, begin, end), residual)
        yield bytes(self.size - self._at[-1])

    def nothing(self) -> list[bytes]:
        """Return as many bytes for a member without an update."""
        return [bytes(self.size)]

    # Chunks: runs of parts that are sent one after another, so that each is processed while the
    # next ones are in flight.

    def _cut(self, most: int) -> list[range]:
        """Return chunks of at most `most` bytes. The first one is small, so that it leaves soon,
        and the last ones become smaller and smaller."""
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
        """Yield the bytes of each chunk from the pieces of encode(). Their number is a multiple of
        4 and not 0."""
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
        """Return uninitialized memory for an update."""
        return {name: tensors.empty(numel) for name, numel in self.sizes.items()}

    def runs(self, parts: range) -> list[tuple[str, int, int]]:
        """Return the parameters of a chunk: (name, first element, end)."""
        return [
            (self.parts[first].name, self.parts[first].begin, self.parts[last - 1].end)
            for first, last in self._runs(parts)
        ]

    def _runs(self, parts: range) -> list[tuple[int, int]]:
        """Return, for each parameter of a chunk, its first part and the part after its last one."""
        found: list[tuple[int, int]] = []
        for at in parts:
            again = found and self.parts[found[-1][0]].name == self.parts[at].name
            found.append((found.pop()[0] if again else at, at + 1))
        return found

    def decode(self, data: memoryview) -> Values:
        """Return the update that encode() has turned into these bytes."""
        values = self.empty()
        self.decode_chunk(data, range(len(self.parts)), values)
        return values

    def decode_chunk(self, data: memoryview, parts: range, out: Values) -> None:
        """Decode a chunk into its place in `out`."""
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
        """Decode a chunk of several members, and write the weighted sum by factors to its place.
        products: as decode_mean() takes them."""
        at = self._at[parts.start] if parts else 0
        for first, last in self._runs(parts):
            name, begin, _, up, _ = self.parts[first]
            end = self.parts[last - 1].end
            piece = slice(self._at[first] - at, self._at[last] - at)
            shard = self.parts[first].end - begin or 1
            decode_mean(up, [row[piece] for row in rows], factors, shard, out[name][begin:end],
                        products)  # fmt: skip

    # Two hops: each member owns some parts; it gets all updates of these and computes the result.

    def owned(self, owner: int, members: int) -> range:
        """Return the parts of an owner; all owners have about the same number of bytes."""
        first, last = (
            bisect.bisect_left(self._at, self._at[-1] * at / members, hi=len(self.parts))
            for at in (owner, owner + 1)
        )
        return range(first, len(self.parts) if owner == members - 1 else last)

    def slices(self, pieces: Sequence[bytes], members: int) -> list[bytes]:
        """Return the bytes for each owner from the pieces of encode(), all of the same length above
        0."""
        whole = b"".join(pieces)
        cut = [self._bounds(self.owned(owner, members)) for owner in range(members)]
        length = -(-max(end - begin for begin, end in cut) // 4) * 4 or 4
        return [whole[begin:end].ljust(length, b"\0") for begin, end in cut]

    def _bounds(self, parts: range) -> tuple[int, int]:
        return self._at[parts.start], self._at[max(parts.start, parts.stop)]

    def decode_owned(self, data: memoryview, parts: range) -> dict[int, torch.Tensor]:
        """Return a member's update of an owner's parts, by number of the part."""
        return self._decoded(data, parts, [self.parts[at].up for at in parts])

    def encode_result(
        self, result: Mapping[int, torch.Tensor], members: int
    ) -> tuple[bytes, dict[int, torch.Tensor]]:
        """Encode an owner's parts of the result. Return the bytes, of the same length for all
        owners, and the residuals."""
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
        """Return the result from the bytes of all owners."""
        found: dict[int, torch.Tensor] = {}
        for owner, row in enumerate(rows):
            parts = self.owned(owner, len(rows))
            found.update(self._decoded(row, parts, [self.parts[at].down for at in parts]))
        return self._joined(found)

    def owed(self, lost: Mapping[int, torch.Tensor], factor: float) -> Values:
        """Return the residuals of an owner's result by parameter, times a factor."""
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
    """Return the rule with this name: (updates, their weights, the last round's update) ->
    update."""
    if aggregate not in _RULES:
        raise InvalidArgumentError(
            f"aggregate is {aggregate!r}, expected one of {', '.join(map(repr, _RULES))}"
        )
    return _RULES[aggregate]


def mean(updates: Sequence[Values], weights: Sequence[float], _before: Values) -> Values:
    """Return the weighted mean; with samples as weights that of FedAvg (arXiv 1602.05629)."""
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
    """Return the median of each element; with an even number of members, the mean of the middle
    two."""
    return trimmed(updates, _weights, _before, cut=(len(updates) - 1) // 2)


def trimmed(
    updates: Sequence[Values],
    _weights: Sequence[float],
    _before: Values,
    cut: int | None = None,
) -> Values:
    """Return the mean of each element without the `cut` largest and smallest ones, by default a
    fifth of the members at each end (arXiv 1803.01498). Weights are ignored."""
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
    """Centered clipping (arXiv 2012.10333) of updates that are mixed with their nearest ones (NNM,
    arXiv 2302.01772), so that members with different data do not look like poisoners. It starts
    from the last round's update as the centre, and moves the centre three times by the mean of the
    differences to it, each clipped to the median of their norms. Weights are ignored, because a
    poisoner would choose its own. Updates with an element that is not finite are left out, unless
    all have one."""
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
    """Return, for each update, the sorted indices of its nearest updates, including itself: all but
    a fifth, rounded up."""
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
    """Return the Euclidean norm over all parameters, rounded to 16 bits; infinite if an element is
    not finite."""
    return length_of(math.fsum(dot(values, values) for values in update.values()))


def distance(a: Values, b: Values) -> float:
    """Return the Euclidean distance, rounded to 16 bits."""
    away = (x.sub_(y) for name in a for x, y in doubles(a[name], b[name]))
    return length_of(math.fsum(float(each @ each) for each in away))


def length_of(squares: float) -> float:
    """Return the root of a sum of squares, rounded to 16 bits; infinite if an element is not
    finite."""
    return _rounded(math.sqrt(squares)) if math.isfinite(squares) else math.inf


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the sum of products in float64."""
    return math.fsum(float(x @ y) for x, y in doubles(a, b))


def doubles(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield pieces of several tensors of the same length in float64, one piece of each at a
    time."""
    for pieces in zip(*(each.split(_CACHED) for each in tensors), strict=True):
        yield [each.double() for each in pieces]


def _rounded(value: float) -> float:
    """Round to 16 bits, so that sums in another order are equal."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 65536), exponent - 16)
