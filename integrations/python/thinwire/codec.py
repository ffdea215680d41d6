"""Codecs without a process group: encode() and decode() of one shard of compress/FORMAT.md, and
information about the codecs."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Sequence
from ctypes import byref, c_size_t
from dataclasses import dataclass
from typing import Any, Literal

from thinwire import _library, config, errors
from thinwire.arguments import as_int, is_text

_FLOAT_BYTES = 4

MomentumNeed = Literal["unused", "helps", "advised", "required"]
_MOMENTUM_NEEDS: tuple[MomentumNeed, ...] = ("unused", "helps", "advised", "required")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a codec.

    Attributes:
        key: its name in a spec.
        range: text that completes "expected ...".
        help: one sentence.
        default: the default value, as text.
        value: the value in the spec, as text.
    """

    key: str
    default: str
    value: str
    range: str
    help: str


@dataclass(frozen=True)
class CodecInfo:
    """A codec and one spec of it.

    Attributes:
        name: of the first hop's codec.
        help: one line about it.
        spec: the canonical spec.
        up: the canonical spec of the first hop.
        down: the canonical spec of the second hop.
        up_bits: bits of one element of a large shard on the first hop, including scales.
        down_bits: the same on the second hop.
        entries: every rank gets the largest elements of every rank, and there is no second hop.
        uses_feedback: it keeps residuals (error feedback).
        has_kernels: it runs on GPUs, too.
        momentum: how much the accuracy depends on compressing the momentum in place of the
            gradient: "unused"; "helps"; "advised": without it accuracy is lost; "required": without
            it training diverges. It is the stronger need of the two hops.
    """

    name: str
    help: str
    spec: str
    up: str
    down: str
    up_bits: float
    down_bits: float
    entries: bool
    uses_feedback: bool
    has_kernels: bool
    momentum: MomentumNeed
    parameters: tuple[Parameter, ...]


def codecs() -> tuple[str, ...]:
    """Return the names of all codecs."""
    library, names = _library.load(), []
    while (name := library.tw_codec_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def specs_in(text: str) -> list[str]:
    """Split a command line's specs, which are separated by commas or semicolons. A comma before
    `key=` belongs to a spec: "int4,topk:density=0.01,warmup=9,int8" are three specs."""
    return re.split(r";|,(?![^,;:=]*=)", text)


def codec_info(spec: str) -> CodecInfo:
    """Return information about a codec.

    Args:
        spec: such as "int4", "topk:density=0.01" or "int8:down=int4".

    Raises:
        InvalidArgumentError: the spec is not valid.
    """
    _text_of(spec)  # first, because other types may not be hashable
    try:
        return _info(spec)
    except errors.InvalidArgumentError as error:
        if spec != config.codec_variable():
            raise
        raise errors.InvalidArgumentError(f"THINWIRE_CODEC: {error}") from None


@functools.lru_cache(maxsize=256)
def _info(spec: str) -> CodecInfo:
    codec = _library.Codec(struct_size=ctypes.sizeof(_library.Codec))
    _library.check(_library.load().tw_codec_info(_text_of(spec), byref(codec)))
    return CodecInfo(
        name=codec.name.decode(),
        help=codec.help.decode(),
        spec=codec.spec.decode(),
        up=codec.up.decode(),
        down=codec.down.decode(),
        up_bits=codec.up_bits,
        down_bits=codec.down_bits,
        entries=bool(codec.entries),
        uses_feedback=bool(codec.uses_feedback),
        has_kernels=bool(codec.has_kernels),
        momentum=_MOMENTUM_NEEDS[codec.momentum],
        parameters=tuple(_parameter(spec, index) for index in range(codec.num_parameters)),
    )


def _parameter(spec: str, index: int) -> Parameter:
    one = _library.Parameter(struct_size=ctypes.sizeof(_library.Parameter))
    _library.check(_library.load().tw_codec_parameter(_text_of(spec), index, byref(one)))
    texts = (one.key, one.default_value, one.value, one.range, one.help)
    return Parameter(*(text.decode() for text in texts))


class _Floats:
    """The address of contiguous fp32 host memory, and the object that keeps it alive."""

    def __init__(self, address: Any, numel: int, owner: object) -> None:
        self.address, self.numel, self.owner = address, numel, owner


def _wrong(what: str, expected: str, got: object) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(f"{what}: expected {expected}, got {got}")


def _floats_of_tensor(x: Any, what: str, in_place: bool) -> _Floats:
    if str(x.dtype) != "torch.float32" or x.device.type != "cpu" or "strided" not in str(x.layout):
        got = f"{x.dtype} on {x.device} ({x.layout})"
        raise _wrong(what, "a dense float32 tensor on the CPU; convert it with .float().cpu()", got)
    if not x.is_contiguous():
        if in_place:
            raise _wrong(what, "contiguous memory, since it is updated in place", "strides")
        x = x.contiguous()
    return _Floats(x.data_ptr(), x.numel(), x)


def _floats_of_buffer(x: Any, what: str, in_place: bool) -> _Floats:
    try:
        view = memoryview(x)
    except TypeError as error:
        raise _wrong(what, "a float32 array, tensor or buffer", type(x).__name__) from error
    if view.format.lstrip("@=<") != "f":
        raise _wrong(what, "float32 elements (format 'f')", f"format {view.format!r}")
    numel = view.nbytes // _FLOAT_BYTES
    if in_place and (view.readonly or not view.c_contiguous):
        raise _wrong(what, "writable contiguous memory, since it is updated in place", type(x))
    if numel == 0:
        return _Floats(None, 0, view)
    if view.readonly or not view.c_contiguous:
        copy = view.tobytes()
        return _Floats(copy, numel, copy)
    flat = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
    return _Floats(ctypes.addressof(flat), numel, flat)


def _floats(x: Any, what: str, in_place: bool = False) -> _Floats:
    if hasattr(x, "data_ptr"):
        return _floats_of_tensor(x, what, in_place)
    return _floats_of_buffer(x, what, in_place)


def _text_of(spec: object) -> bytes:
    if not is_text(spec):
        raise _wrong("spec", "a codec's spec such as 'int4'", repr(spec))
    return spec.encode()


def encoded_bytes(spec: str, n: int) -> int:
    """Return the exact size in bytes of `n` encoded elements.

    Raises:
        InvalidArgumentError: the spec is unknown, or `n` is not a count.
    """
    n = as_int("n", n, 0, sys.maxsize)
    size = c_size_t()
    _library.check(_library.load().tw_encoded_bytes(_text_of(spec), n, byref(size)))
    return size.value


def encode(spec: str, x: Any, residual: Any = None) -> bytes:
    """Encode `x` as one shard.

    Args:
        spec: the codec.
        x: any shape, float32, on the host: a numpy array, a torch tensor, or a buffer of format
            'f'.
        residual: as many float32 as x, writable and contiguous, or None. It is added to x before
            encoding, and holds the encoding's error afterwards (error feedback).

    Returns:
        encoded_bytes(spec, n) bytes.

    Raises:
        InvalidArgumentError: the spec is unknown, or a type or size is wrong.
    """
    source = _floats(x, "x")
    kept = None if residual is None else _floats(residual, "residual", in_place=True)
    if kept is not None and kept.numel != source.numel:
        raise _wrong("residual", f"{source.numel} elements, as x has", kept.numel)
    size = encoded_bytes(spec, source.numel)
    out = ctypes.create_string_buffer(max(size, 1))
    _library.check(
        _library.load().tw_encode(
            _text_of(spec), source.address, source.numel, kept.address if kept else None,
            out, size, None,
        )
    )  # fmt: skip
    return out.raw[:size]


def decode(spec: str, data: Any, n: int, out: Any = None) -> Any:
    """Decode a shard of `n` elements from bytes or a buffer.

    Args:
        spec: the codec.
        data: encoded_bytes(spec, n) bytes.
        n: the number of elements.
        out: for the values: `n` float32 on the host, writable and contiguous. None: a new
            one-dimensional numpy array; without numpy, an array.array of type 'f'.

    Returns:
        `out`, or the new array.

    Raises:
        InvalidArgumentError: a size or type is wrong.
    """
    encoded_bytes(spec, n)  # checks spec and n
    try:
        raw = bytes(memoryview(data))
    except TypeError as error:
        raise _wrong("data", "bytes or a buffer", type(data).__name__) from error
    out = _new_floats(n) if out is None else out
    target = _floats(out, "out", in_place=True)
    if target.numel != n:
        raise _wrong("out", f"{n} elements", target.numel)
    status = _library.load().tw_decode(_text_of(spec), raw, len(raw), target.address, n)
    _library.check(status)
    return out


def decode_mean(
    spec: str, rows: Sequence[memoryview], factors: Sequence[float], shard: int, out: Any,
    products: ctypes.Array[ctypes.c_double],
) -> None:  # fmt: skip
    """Decode the updates of several members and compute their weighted sum, in one pass.

    Args:
        spec: the codec.
        rows: for each member, the bytes of shards of `shard` elements one after another, of which
            the last may be shorter.
        factors: the weights, by member.
        shard: elements of a shard.
        out: for the sum: float32 on the host, writable and contiguous. Products and sums are
            rounded one after another, in the order of members.
        products: 2 * members + 1 numbers in float64. Added to them are the sum of squares of each
            member's values, the inner product of each member's values and the result, and the sum
            of squares of the result.

    Raises:
        InvalidArgumentError: a size or type is wrong, or a shard is malformed.
    """
    target, count = _floats(out, "out", in_place=True), len(rows)
    if len(factors) != count or len(products) != 2 * count + 1:
        got = f"{len(factors)} and {len(products)}"
        raise _wrong("factors and products", f"{count} and {2 * count + 1}", got)
    sizes = set(map(len, rows))
    if len(sizes) != 1:
        raise _wrong("rows", "as many bytes of each member", sorted(sizes))
    flat = [
        ctypes.create_string_buffer(bytes(row), len(row)) if row.readonly
        else (ctypes.c_char * len(row)).from_buffer(row)
        for row in rows
    ]  # fmt: skip
    _library.check(
        _library.load().tw_decode_mean(
            _text_of(spec), (ctypes.c_void_p * count)(*map(ctypes.addressof, flat)),
            sizes.pop(), (ctypes.c_float * count)(*factors), count, shard,
            target.address, target.numel, products,
        )
    )  # fmt: skip


def _new_floats(n: int) -> Any:
    try:
        import numpy
    except ImportError:
        import array

        return array.array("f", bytes(n * _FLOAT_BYTES))
    return numpy.empty(n, dtype=numpy.float32)
