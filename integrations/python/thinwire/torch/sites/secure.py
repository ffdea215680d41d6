"""Secure sums: members learn the sum of their updates, and nothing more about any single update.

Each member writes its weighted update as whole numbers on a common scale, and adds a mask for each
other member. The two members of a pair derive the same mask, and one of them subtracts what the
other adds, so the masks cancel in the sum modulo 2^8 (2^16 for small tensors). This is the pairwise
masking of arXiv 1611.04482 without its shares of secrets: if a member drops out, the attempt fails,
and the next one has new keys.

A round has two exchanges:

1. The scale: for each tensor the power of two above the largest element of any member. There is a
   place for each power; a member puts random numbers into the places up to its own, under masks.
   The highest place that is not zero in the sum is the scale, and does not reveal which member has
   it. A place has two numbers of 16 bits: a single one would be zero in one of 65,536 sums, and the
   scale would then be too small by chance.
2. The codes, under other masks.

Keys: X25519, new ones for each meeting; HKDF-SHA256 derives one ChaCha20 key for each pair, and the
round's number is in the nonce. SECURITY.md says what this protects, and what it does not."""

from __future__ import annotations

import hashlib
import importlib
import math
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire import errors
from thinwire.torch.sites.meeting import Meeting
from thinwire.torch.sites.state import raw_bytes
from thinwire.torch.sites.updates import Values

FEWEST = 3  # least number of members, so that the sum hides each member from the others
MOST = 18  # largest number of members with which codes are no coarser than those of int4
SCALE, CODES = 0, 1  # the exchanges of a round

_WIDE_BELOW = 1024  # smaller tensors have codes of 16 bits, because their bytes do not matter
_PLACES = 64  # number of powers of two; the last one means that an update is not finite
_NUMBERS = 2  # numbers of 16 bits in a place
_LOWEST = -32  # the power of the first place
_NONCE = struct.Struct("<IQI")  # ChaCha20's block counter, the round, the exchange
_PRIMITIVES = "cryptography.hazmat.primitives."


def check_available() -> None:
    """UnavailableError unless `cryptography` is installed."""
    _part("ciphers")


def check_arguments(members: object, codec: object, aggregate: str) -> None:
    """InvalidArgumentError for arguments that are not allowed with secure=True."""
    if codec is not None:
        raise errors.InvalidArgumentError(
            f"codec is {codec!r} with secure=True, which sends sums of one byte a parameter on a "
            "common scale: codes of other codecs cannot be added; leave codec= out"
        )
    if aggregate != "mean":
        raise errors.InvalidArgumentError(
            f"aggregate is {aggregate!r} with secure=True, which shows no single update that a "
            "rule could compare; leave aggregate= out, or train without secure="
        )
    fewest = getattr(members, "min_members", FEWEST)
    if fewest < FEWEST:
        raise errors.InvalidArgumentError(
            f"min_members is {fewest} with secure=True, expected {FEWEST} or more, since each of "
            f"two knows the other's update from the sum; pass min_members={FEWEST} to join()"
        )
    check_available()


def _part(name: str) -> Any:
    try:
        return importlib.import_module(_PRIMITIVES + name)
    except ImportError as error:
        raise errors.UnavailableError(
            f"secure=True needs the package cryptography ({error}); pip install thinwire[secure]"
        ) from None


def new_key() -> Any:
    """Return a new X25519 key, for one meeting."""
    return _part("asymmetric.x25519").X25519PrivateKey.generate()


class Masks:
    """One member's masks in one meeting. No byte of a keystream is used twice: each meeting has new
    keys, and each exchange of a round happens once in a meeting."""

    def __init__(self, key: Any, publics: Sequence[bytes], rank: int) -> None:
        """key: of new_key(). publics: the members' public keys, by rank."""
        self._rank, self._last = rank, {SCALE: -1, CODES: -1}
        self.digest = hashlib.sha256(b"".join(publics)).digest()[:16]  # of the meeting's keys
        self._keys = {
            peer: _pair_key(key, publics, rank, peer)
            for peer in range(len(publics))
            if peer != rank
        }

    @classmethod
    def agree(cls, meeting: Meeting) -> Masks:
        """Exchange public keys with the members of a new meeting."""
        key = new_key()
        gather = meeting.start("keys", [key.public_key().public_bytes_raw()])
        return cls(key, [bytes(row) for row in gather.rows()], meeting.epoch.rank)

    def hide(self, numbers: torch.Tensor, wide: int, round_number: int, exchange: int) -> bytes:
        """Return the numbers with this member's masks added, as bytes. numbers: uint8, of which the
        first `wide` bytes are numbers of 16 bits."""
        if round_number <= self._last[exchange]:
            raise errors.Error(
                f"masks of round {round_number} were used before, expected a round after "
                f"{self._last[exchange]}; fresh masks come with a new meeting"
            )
        self._last[exchange] = round_number
        nonce = _NONCE.pack(0, round_number, exchange)
        for peer, key in self._keys.items():
            mask = torch.frombuffer(
                bytearray(keystream(key, nonce, len(numbers))), dtype=torch.uint8
            )
            add(numbers, mask, wide, 1 if self._rank < peer else -1)
        return raw_bytes(numbers)


def _pair_key(key: Any, publics: Sequence[bytes], rank: int, peer: int) -> bytes:
    """Return the ChaCha20 key that two members share."""
    first, second = sorted((rank, peer))
    hkdf = _part("kdf.hkdf").HKDF(
        algorithm=_part("hashes").SHA256(), length=32, salt=None,
        info=b"thinwire sites masks" + struct.pack("<II", first, second)
        + publics[first] + publics[second],
    )  # fmt: skip
    try:
        public = _part("asymmetric.x25519").X25519PublicKey.from_public_bytes(publics[peer])
        return hkdf.derive(key.exchange(public))
    except ValueError:
        raise errors.MismatchError(
            f"member {peer} sent {publics[peer].hex()}, expected an X25519 public key; find out "
            "why before it takes part again"
        ) from None


def keystream(key: bytes, nonce: bytes, length: int) -> bytes:
    """Return `length` bytes of ChaCha20's keystream."""
    ciphers = _part("ciphers")
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, nonce), None).encryptor().update(
        bytes(length)
    )  # fmt: skip


def add(total: torch.Tensor, numbers: torch.Tensor, wide: int, sign: int = 1) -> None:
    """Add in place, modulo 2^16 in the first `wide` bytes and 2^8 in the others."""
    total[:wide].view(torch.int16).add_(numbers[:wide].view(torch.int16), alpha=sign)
    rest, other = total[wide:], numbers[wide:]
    if sign > 0:
        rest.add_(other)
    else:
        rest.sub_(other)


def sum_of(rows: Sequence[memoryview], wide: int) -> torch.Tensor:
    """Return the sum of the members' rows, in which their masks cancel."""
    total = torch.zeros(len(rows[0]), dtype=torch.uint8)
    for row in rows:
        add(total, torch.frombuffer(row, dtype=torch.uint8), wide)
    return total


class SumCodec:
    """Encodes a member's update as numbers for a sum over members. It takes the place of
    UpdateCodec, but the bytes and the residuals depend on the members of an attempt."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """sizes: elements by parameter name."""
        wide = [name for name, numel in sizes.items() if numel < _WIDE_BELOW]
        narrow = [name for name in sizes if name not in wide]
        self.sizes = {name: sizes[name] for name in [*wide, *narrow]}  # the order of the codes
        self.specs = {name: f"sum:bits={16 if name in wide else 8}" for name in sizes}
        self.may_take_two_hops = False
        self._wide = set(wide)
        self.wide_bytes = 2 * sum(sizes[name] for name in wide)
        used = self.wide_bytes + sum(sizes[name] for name in narrow)
        self._padding = -used % 4
        self.scale_bytes = 2 * _NUMBERS * _PLACES * len(sizes)

    def encode(
        self, update: Callable[[str, int, int], torch.Tensor], kept: Values, decay: float,
        _lost: Values,
    ) -> list[bytes]:  # fmt: skip
        """Return the update plus residuals, uncompressed (the arguments are those of
        UpdateCodec.encode). It is encoded when the scale is known, which gives the new
        residuals."""
        return [
            raw_bytes(update(name, 0, size) + kept[name] * decay)
            for name, size in self.sizes.items()
        ]

    def nothing(self) -> list[bytes]:
        """Return as many bytes for a member without an update."""
        return [bytes(4 * sum(self.sizes.values()))]

    def values(self, pieces: Sequence[bytes]) -> Values:
        """Return the update plus residuals from the pieces of encode()."""
        flat = torch.frombuffer(bytearray().join(pieces), dtype=torch.float32)
        parts = flat.split(list(self.sizes.values()))
        return dict(zip(self.sizes, parts, strict=True))

    def places(self, values: Values, weight: float) -> torch.Tensor:
        """Return the numbers of the first exchange: random ones up to the place of each tensor."""
        numbers = bytearray(secrets.token_bytes(self.scale_bytes))
        table = torch.frombuffer(numbers, dtype=torch.int16).view(-1, _PLACES, _NUMBERS)
        table[table == 0] = 1
        for row, each in zip(table, values.values(), strict=True):
            largest = float(each.abs().max()) if each.numel() else 0.0
            row[_place(largest * weight) + 1 :] = 0
        return table.view(-1).view(torch.uint8)

    def scales(self, total: torch.Tensor) -> dict[str, float]:
        """Return, for each tensor, the power of two above the largest element of any member: 0 if
        all are zero, infinite if one is not finite."""
        found = {}
        table = total.view(torch.int16).view(-1, _PLACES, _NUMBERS)
        for name, row in zip(self.sizes, table, strict=True):
            place = max((at for at, numbers in enumerate(row.tolist()) if any(numbers)), default=-1)
            last = place == _PLACES - 1
            found[name] = math.inf if last else 2.0 ** (place + _LOWEST) if place >= 0 else 0.0
        return found

    def step(self, name: str, scale: float, speakers: int) -> tuple[float, int]:
        """Return the size of a code's unit, and the largest code, whose sum over `speakers` members
        is below half of the modulus."""
        most = (32767 if name in self._wide else 127) // speakers
        return scale / most, most

    def codes(
        self, values: Values, weight: float, scales: Mapping[str, float], speakers: int
    ) -> tuple[torch.Tensor, Values]:
        """Return the numbers of the second exchange, and the new residuals."""
        parts, lost = [], {}
        for name, each in values.items():
            unit, most = self.step(name, scales[name], speakers)
            if weight > 0 and 0 < unit < math.inf:
                codes = (each * (weight / unit)).round_().clamp_(-most, most)
            else:
                codes = torch.zeros_like(each)
            if math.isfinite(unit) and weight > 0:
                lost[name] = each - codes * (unit / weight)
            else:
                lost[name] = torch.zeros_like(each)  # else it would never be finite again
            dtype = torch.int16 if name in self._wide else torch.int8
            parts.append(codes.to(dtype).view(torch.uint8))
        return torch.cat([*parts, torch.zeros(self._padding, dtype=torch.uint8)]), lost

    def mean(
        self, total: torch.Tensor, scales: Mapping[str, float], speakers: int, weight: float
    ) -> Values:
        """Return the weighted mean from the summed numbers and the summed weight."""
        result, at = {}, 0
        for name, numel in self.sizes.items():
            dtype, width = (torch.int16, 2) if name in self._wide else (torch.int8, 1)
            codes = total[at : at + numel * width].view(dtype).to(torch.float32)
            at += numel * width
            unit, _ = self.step(name, scales[name], speakers)
            if math.isfinite(unit):
                result[name] = codes.mul_(unit / weight)
            else:
                result[name] = codes.fill_(math.nan)
        return result


def _place(largest: float) -> int:
    """Return the place of a tensor with this largest element; -1 for none."""
    if not math.isfinite(largest):
        return _PLACES - 1
    if largest == 0:
        return -1
    return min(max(math.frexp(largest)[1] - _LOWEST, 0), _PLACES - 2)
