"""The update of a member since the last round, as bytes with error feedback, and the rules that
make one update of all members' ones.

Every member decodes the same bytes and computes the same rule in the same order, so all have the
same bits. A sum over members is a loop over ranks; norms are sums in float64, rounded to 16 bits,
so that the order in which a CPU adds them does not show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from thinwire.codec import codec_info, decode, encode, encoded_bytes
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.rules import Codec, Rules, Structure

_EXACT_BELOW = 1024  # elements of a tensor that goes in fp32, whose bytes do not count
_CLIP_ROUNDS = 3
_TRIM = 0.2  # of the members, at each end

Values = dict[str, torch.Tensor]  # flat float32 on the host, by parameter


class UpdateCodec:
    """Encodes the update of some parameters. One residual for each parameter is the caller's."""

    def __init__(self, codec: Codec, sizes: Mapping[str, int], structure: Structure) -> None:
        """sizes: elements by parameter name. InvalidArgumentError for a codec or rule that cannot
        be."""
        rules = Rules(codec, structure)
        rules.check_specs()
        rules.check_names(sizes)
        self.sizes = dict(sizes)
        self.specs = {
            name: "fp32" if numel < _EXACT_BELOW else codec_info(
                rules.by_pattern[rules.rule_of(name)]
            ).up
            for name, numel in sizes.items()
        }  # fmt: skip
        self._bytes = {name: encoded_bytes(self.specs[name], n) for name, n in sizes.items()}
        self.size = -(-sum(self._bytes.values()) // 4) * 4

    def encode(self, update: Values, residuals: Values) -> list[bytes]:
        """Return the pieces of `size` bytes. residuals: added to the update, and replaced by what
        the encoding lost."""
        pieces = [encode(spec, update[n], residuals[n]) for n, spec in self.specs.items()]
        return [*pieces, bytes(self.size - sum(map(len, pieces)))]

    def nothing(self) -> list[bytes]:
        """Return as many bytes of a member that has nothing to say."""
        return [bytes(self.size)]

    def decode(self, data: memoryview) -> Values:
        values, at = {}, 0
        for name, spec in self.specs.items():
            piece = data[at : at + self._bytes[name]]
            values[name] = torch.frombuffer(
                decode(spec, piece, self.sizes[name]), dtype=torch.float32
            )
            at += self._bytes[name]
        return values


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
    total = math.fsum(weights)
    result: Values = {}
    for update, weight in zip(updates, weights, strict=True):
        for name, values in update.items():
            scaled = values * (weight / total)
            result[name] = scaled if name not in result else result[name].add_(scaled)
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
    cut = int(_TRIM * len(updates)) if cut is None else cut
    result = {}
    for name in updates[0]:
        ordered = torch.stack([update[name] for update in updates]).sort(0).values
        kept = ordered[cut : len(updates) - cut]
        total = kept[0].clone()
        for row in kept[1:]:
            total.add_(row)
        result[name] = total.div_(len(kept))
    return result


def centered_clip(updates: Sequence[Values], weights: Sequence[float], before: Values) -> Values:
    """Centered clipping (arXiv 2012.10333): from the last round's update as the centre, three times
    a step to the weighted mean of the differences, each shortened to the median of their norms."""
    centre = {name: before.get(name, torch.zeros_like(v)).clone() for name, v in updates[0].items()}
    for _ in range(_CLIP_ROUNDS):
        away = [{name: u[name] - centre[name] for name in centre} for u in updates]
        norms = [norm(each) for each in away]
        radius = sorted(norms)[(len(norms) - 1) // 2]
        shorter = [1.0 if n <= radius else _rounded(radius / n) for n in norms]
        for each, factor in zip(away, shorter, strict=True):
            for values in each.values():
                values.mul_(factor)
        for name, step in mean(away, weights, {}).items():
            centre[name].add_(step)
    return centre


_RULES: dict[str, Rule] = {
    "mean": mean, "centered_clip": centered_clip, "trimmed": trimmed, "median": median,
}  # fmt: skip


def norm(update: Values) -> float:
    """The Euclidean norm over all parameters, in 16 bits; infinite if an element is not finite."""
    total = math.fsum(float(values.double().square().sum()) for values in update.values())
    return _rounded(math.sqrt(total)) if math.isfinite(total) else math.inf


def _rounded(value: float) -> float:
    """To 16 bits, in which sums in another order agree."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 65536), exponent - 16)
