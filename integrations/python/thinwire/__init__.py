"""thinwire: gradient compression that makes data-parallel training fast on slow links.

`thinwire.torch` compresses the gradients of PyTorch models; this module has the codecs."""

from __future__ import annotations

from thinwire import _library
from thinwire.codec import CodecInfo, Parameter, codec_info, codecs, decode, encode, encoded_bytes
from thinwire.errors import (
    DataLossError,
    Error,
    InvalidArgumentError,
    MismatchError,
    OutOfMemoryError,
    PeerLostError,
    TimeoutError,
    UnavailableError,
)

__all__ = [
    "CodecInfo",
    "DataLossError",
    "Error",
    "InvalidArgumentError",
    "MismatchError",
    "OutOfMemoryError",
    "Parameter",
    "PeerLostError",
    "TimeoutError",
    "UnavailableError",
    "codec_info",
    "codecs",
    "decode",
    "encode",
    "encoded_bytes",
    "simd_target",
    "version",
]


def version() -> str:
    """Return the C library's version, such as "0.1.0"."""
    return _library.load().tw_version().decode()


def simd_target() -> str:
    """Return the instruction set that the codecs use on this machine: "AVX3", "AVX2", ..."""
    return _library.load().tw_simd_target().decode()
