"""FORMAT.md is complete: a decoder written only from it decodes every golden file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import thinwire
from format_decoder import decode, parse

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
ELEMENTS = 2500


def _spec_of(path: Path) -> str:
    """Return the codec of a file: int8_block_128.bin holds int8:block=128."""
    name, *words = path.stem.split("_")
    pairs = zip(words[::2], words[1::2], strict=True)
    return ":".join(filter(None, [name, ",".join("=".join(pair) for pair in pairs)]))


SPECS = {_spec_of(path): path for path in sorted(GOLDEN.glob("*.bin"))}


def test_every_codec_has_a_golden_file() -> None:
    assert {parse(spec)[0] for spec in SPECS} == set(thinwire.codecs())


@pytest.mark.parametrize("spec", SPECS)
def test_a_golden_file_decodes(spec: str) -> None:
    """The decoder gives the library's values bit for bit. They are the input plus the old residual,
    less the new one, up to rounding."""
    data = SPECS[spec].read_bytes()
    wire, left = (
        data[: -4 * ELEMENTS],
        np.frombuffer(data, "<f4", ELEMENTS, len(data) - 4 * ELEMENTS),
    )
    decoded = decode(spec, wire, ELEMENTS)
    theirs = np.asarray(thinwire.decode(spec, wire, ELEMENTS))
    assert decoded.tobytes() == theirs.tobytes()
    i = np.arange(ELEMENTS)
    values = (i * 7919 % 2003 - 1001) * 2.0 ** (i // 256 % 9 - 4)
    residual = (i * 104729 % 511 - 255) / 256
    scale = np.abs(values) + np.abs(decoded) + 1
    assert (np.abs(decoded.astype(np.float64) + left - values - residual) < 1e-6 * scale).all()
