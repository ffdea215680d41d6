"""encode() and decode() of Python arrays. The C++ tests cover the bytes themselves."""

import array
import ctypes

import numpy
import pytest
import thinwire
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinwire import codec
from thinwire.codec import decode_mean

SPECS = ("fp32", "bf16", "int8", "int4", "int4:block=128", "topk:density=0.1")
# Their residuals may be rounded: the codes may not be the nearest ones.
ROUNDED = ("onebit", "int4:hadamard=1", "int8:rounding=stochastic,seed=4", "onebit:down=onebit")


# Slowness of a busy machine is no fault of the tested code.
SLOWLY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def noise(n: int, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).standard_normal(n, dtype=numpy.float32)


@settings(max_examples=200, **SLOWLY)
@given(st.sampled_from(SPECS), st.integers(0, 4097), st.integers(0, 2**32 - 1))
def test_decoded_and_residual_add_up(spec, n, seed):
    x, residual = noise(n, seed), noise(n, seed + 1) / 8
    total = x + residual
    data = thinwire.encode(spec, x, residual)
    assert len(data) == thinwire.encoded_bytes(spec, n)
    decoded = thinwire.decode(spec, data, n)
    assert decoded.dtype == numpy.float32 and decoded.shape == (n,)
    numpy.testing.assert_array_equal(decoded + residual, total)


@settings(max_examples=100, **SLOWLY)
@given(st.sampled_from(ROUNDED), st.integers(0, 4097), st.integers(0, 2**32 - 1))
def test_decoded_and_residual_add_up_to_a_rounding(spec, n, seed):
    x, residual = noise(n, seed), noise(n, seed + 1) / 8
    total = x + residual
    decoded = thinwire.decode(spec, thinwire.encode(spec, x, residual), n)
    numpy.testing.assert_allclose(decoded + residual, total, atol=2e-6)


def test_the_library_lists_its_codecs():
    assert {"fp32", "bf16", "int8", "int4", "onebit", "topk"} <= set(thinwire.codecs())
    for name in thinwire.codecs():
        info = thinwire.codec_info(name)
        assert (info.name, info.spec, info.up) == (name, name, name) and info.help
        for parameter in info.parameters:
            assert parameter.value == parameter.default and parameter.range and parameter.help
            thinwire.encoded_bytes(f"{name}:{parameter.key}={parameter.default}", 1)


@pytest.mark.parametrize("text, specs", [
    ("int8,int4", ["int8", "int4"]),
    ("int4,topk:density=0.01,warmup=9,int8", ["int4", "topk:density=0.01,warmup=9", "int8"]),
    ("int8:block=128,down=int4:block=512,hadamard=1,topk:density=0.02,bf16",
     ["int8:block=128,down=int4:block=512,hadamard=1", "topk:density=0.02", "bf16"]),
    ("int8;topk:density=0.02,warmup=9;raw", ["int8", "topk:density=0.02,warmup=9", "raw"]),
    ("int8,", ["int8", ""]),
])  # fmt: skip
def test_a_comma_before_a_key_belongs_to_the_spec(text, specs):
    assert codec.specs_in(text) == specs


def test_a_codecs_info_is_that_of_its_spec():
    info = thinwire.codec_info("onebit:block=512")
    assert (info.up, info.down) == ("onebit:block=512", "int4:block=512")
    assert info.momentum == "required" and info.uses_feedback and not info.entries
    assert info.parameters == (
        thinwire.Parameter(
            "block", "256", "512", "a power of two from 128 to 4096",
            "Elements that share one scale.",
        ),
    )  # fmt: skip
    assert thinwire.codec_info("int8:down=onebit").momentum == "required"
    sparse = thinwire.codec_info("topk:density=0.001")
    assert sparse.entries and sparse.has_kernels and sparse.momentum == "advised"
    assert thinwire.codec_info("topk").momentum == "helps"
    assert thinwire.codec_info("int4").momentum == "unused"
    assert thinwire.codec_info("int4").up_bits == pytest.approx(4.0625)
    with pytest.raises(thinwire.InvalidArgumentError, match="nearest is 'int"):
        thinwire.codec_info("int5")


# Any bytes of the right length decode or are refused; nothing crashes.
@settings(max_examples=200, **SLOWLY)
@given(st.sampled_from((*SPECS, *ROUNDED)), st.integers(1, 600), st.data())
def test_arbitrary_bytes_are_decoded_or_refused(spec, n, data):
    size = thinwire.encoded_bytes(spec, n)
    wire = data.draw(st.binary(min_size=size, max_size=size))
    try:
        assert thinwire.decode(spec, wire, n).shape == (n,)
    except thinwire.InvalidArgumentError as error:
        assert spec.startswith("topk"), error


@pytest.mark.parametrize("spec", SPECS)
def test_all_kinds_of_arrays_give_the_same_bytes(spec):
    x = noise(1000, 1)
    expected = thinwire.encode(spec, x)
    read_only = x.copy()
    read_only.flags.writeable = False
    wide = numpy.zeros((1000, 2), numpy.float32)
    wide[:, 0] = x
    for same in (
        torch.from_numpy(x), array.array("f", x), memoryview(x), x.reshape(10, 100), read_only,
        wide[:, 0], torch.from_numpy(wide)[:, 0],
    ):  # fmt: skip
        assert thinwire.encode(spec, same) == expected
    for residual in (torch.zeros(1000), numpy.zeros(1000, "f"), array.array("f", bytes(4000))):
        assert thinwire.encode(spec, x, residual) == expected
        lost = numpy.asarray(residual)
        numpy.testing.assert_array_equal(lost, x - thinwire.decode(spec, expected, 1000))


@pytest.mark.parametrize("x", [
    [1.0], 1.0, None, b"abcd", numpy.zeros(4), numpy.zeros(4, "i4"), torch.zeros(4).double(),
    torch.zeros(4, device="meta"), torch.eye(2).to_sparse(),
])  # fmt: skip
def test_other_inputs_are_refused(x):
    with pytest.raises(thinwire.InvalidArgumentError, match="float32"):
        thinwire.encode("int4", x)


@pytest.mark.parametrize("residual", [
    numpy.zeros(9, "f"), numpy.zeros(20, "f")[::2], torch.zeros(20)[::2], torch.zeros(10).half(),
    numpy.zeros(10), memoryview(numpy.zeros(10, "f")).toreadonly(),
])  # fmt: skip
def test_other_residuals_are_refused(residual):
    with pytest.raises(thinwire.InvalidArgumentError, match="residual"):
        thinwire.encode("int4", numpy.zeros(10, "f"), residual)


@pytest.mark.parametrize("spec, nearest", [
    ("int5", "int"), ("in4", "int4"), ("int4:blok=256", "block"), ("int4:block=0", "block"),
    ("", "codec"),
])  # fmt: skip
def test_a_bad_spec_names_the_nearest(spec, nearest):
    with pytest.raises(thinwire.InvalidArgumentError, match=nearest):
        thinwire.encode(spec, numpy.zeros(1, "f"))


@pytest.mark.parametrize("size", [0, 1, 527, 529])
def test_bytes_of_another_size_are_refused(size):
    with pytest.raises(thinwire.InvalidArgumentError, match="528"):
        thinwire.decode("int4", bytes(size), 1000)


def test_negative_sizes_are_refused():
    with pytest.raises(thinwire.InvalidArgumentError, match="-1"):
        thinwire.decode("int4", b"", -1)


def test_a_block_with_nan_decodes_to_nan_and_keeps_its_residual():
    x, residual = noise(512, 3), noise(512, 4)
    x[5] = numpy.nan
    before = residual.copy()
    decoded = thinwire.decode("int4", thinwire.encode("int4", x, residual), 512)
    assert numpy.isnan(decoded[:256]).all() and numpy.isfinite(decoded[256:]).all()
    numpy.testing.assert_array_equal(residual[:256], before[:256])


def test_values_go_where_the_caller_says():
    x = numpy.random.default_rng(1).standard_normal(3000).astype(numpy.float32)
    data = thinwire.encode("int4", x)
    whole = numpy.full(5000, 7.0, numpy.float32)
    part = whole[1000:4000]
    assert thinwire.decode("int4", data, 3000, out=part) is part
    assert numpy.array_equal(part, thinwire.decode("int4", data, 3000))
    assert (whole[:1000] == 7).all() and (whole[4000:] == 7).all()
    for wrong in (
        numpy.zeros(2999, numpy.float32),
        numpy.zeros(3000),
        numpy.zeros(6000, numpy.float32)[::2],
    ):
        with pytest.raises(thinwire.InvalidArgumentError, match="out"):
            thinwire.decode("int4", data, 3000, out=wrong)


def test_a_mean_of_members_is_that_of_what_each_decodes_to():
    spec, n, shard = "adaptive:bits=0.5", 5000, 2048
    updates = [noise(n, seed) for seed in (1, 2, 3)]
    rows = [
        b"".join(thinwire.encode(spec, x[at : at + shard]) for at in range(0, n, shard))
        for x in updates
    ]
    decoded = []
    for row in rows:
        begin, values = 0, []
        for at in range(0, n, shard):
            count = min(shard, n - at)
            size = thinwire.encoded_bytes(spec, count)
            values.append(thinwire.decode(spec, row[begin : begin + size], count))
            begin += size
        decoded.append(numpy.concatenate(values))
    factors = [0.25, 0.5, 0.25]
    want = sum(x * numpy.float32(f) for x, f in zip(decoded, factors, strict=True))
    out, products = numpy.empty(n, numpy.float32), (ctypes.c_double * 7)()
    # The members' bytes lie in writable or read-only memory.
    views = [memoryview(rows[0]), memoryview(bytearray(rows[1])), memoryview(rows[2])]
    decode_mean(spec, views, factors, shard, out, products)
    numpy.testing.assert_array_equal(out, want)
    doubles = [x.astype(numpy.float64) for x in (*decoded, want)]
    expected = [*(x @ x for x in doubles[:3]), *(x @ doubles[3] for x in doubles)]
    numpy.testing.assert_allclose(list(products), expected, rtol=1e-12)
    for wrong in ([*views[:2], views[2][:-1]], [*views[:2], memoryview(bytes(len(rows[2]) - 16))]):
        with pytest.raises(thinwire.InvalidArgumentError, match="bytes"):
            decode_mean(spec, wrong, factors, shard, out, products)
    with pytest.raises(thinwire.InvalidArgumentError, match="factors"):
        decode_mean(spec, views, factors[:2], shard, out, products)


def test_a_codec_of_the_environment_is_refused_by_the_variables_name(monkeypatch):
    monkeypatch.setenv("THINWIRE_CODEC", " int4")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"^THINWIRE_CODEC: unknown codec"):
        thinwire.codec_info(" int4")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"^unknown codec 'int5'"):
        thinwire.codec_info("int5")
    with pytest.raises(thinwire.InvalidArgumentError, match="spec: expected"):
        thinwire.codec_info("\udc80")
