"""Prints a digest of each codec's bytes and residuals at many lengths, using thinwire only: two
machines, or two builds, must print the same lines."""

from __future__ import annotations

import hashlib
import random
from array import array

import thinwire

LENGTHS = (*range(300), 511, 512, 513, 1023, 4096, 4097, 65535, 65536, 70001)
OPTIONS = ("int8:rounding=stochastic", "int4:hadamard=1", "int4:block=128", "onebit:down=onebit")


def elements(numel: int) -> array[float]:
    """Return exact products of small integers and powers of two, which depend on no libm."""
    draw = random.Random(numel).getrandbits
    return array("f", ((draw(20) - 2**19) * 2.0 ** -draw(5) for _ in range(numel)))


def digest(spec: str) -> str:
    seen = hashlib.sha256()
    for numel in LENGTHS:
        values, residual = elements(numel), array("f", bytes(4 * numel))
        for _ in range(2):  # with a residual of zeros, and then with the one left by encoding
            data = thinwire.encode(spec, values, residual)
            seen.update(data)
            seen.update(residual.tobytes())
        seen.update(bytes(memoryview(thinwire.decode(spec, data, numel))))
    return seen.hexdigest()


if __name__ == "__main__":
    for spec in (*thinwire.codecs(), *OPTIONS):
        print(spec, digest(spec), flush=True)
