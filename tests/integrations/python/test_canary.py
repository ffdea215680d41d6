"""`thinwire doctor --canary` passes on a sound group; a fault is found and named."""

import struct

import pytest
import thinwire
import torch
from ranks import run, torchrun
from thinwire import canary, cli, config, error_limits, launch
from thinwire.codec import codec_info, decode, encode
from thinwire.error_limits import CODECS

ALL = (*CODECS, canary.RAW)
LONG = 600.0  # seconds: even a slow machine skips no case


def checked(_rank, codecs, topologies=("flat",), seconds=LONG, **settings):
    return canary.check_group(codecs, topologies, seconds, settings=config.resolve(**settings))


def test_every_codec_has_its_cases():
    assert {codec_info(spec).name for spec in CODECS} == set(thinwire.codecs())


@pytest.mark.parametrize("world", [2, 3])
def test_all_cases_of_a_sound_group_are_ok(world):
    verdicts, *others = run(checked, ALL, world=world, timeout_s=300)
    assert all(other == verdicts for other in others)
    collectives = {(v.case.codec, v.case.collective, v.case.op) for v in verdicts}
    for spec in CODECS:
        assert {(spec, "encode", ""), (spec, "all_reduce", "sum"), (spec, "all_reduce", "mean")} < (
            collectives
        )
        dense = {(spec, "reduce_scatter", "mean"), (spec, "all_gather", "")}
        assert dense <= collectives or (spec == "topk" and not dense & collectives)
    for verdict in verdicts:
        assert not verdict.faults and 0 <= verdict.error <= 1 and 0 <= verdict.lost <= 1
        if verdict.case.codec not in ("fp32", canary.RAW):  # the limits are close
            assert verdict.error > 0.02, verdict


def test_a_grid_and_nodes_are_ok_where_the_ranks_form_them():
    codecs = ("int8", "onebit", "adaptive", "topk", "fp32")
    verdicts, *_ = run(everywhere, codecs, world=4, timeout_s=300)
    assert not [verdict for verdict in verdicts if verdict.faults]
    for topology in ("flat", "grid", "hierarchical"):
        ran = {v.case.codec for v in verdicts if v.case.topology == topology}
        assert ran == set(codecs), topology


def everywhere(rank, codecs):
    return checked(rank, codecs, ("flat", "grid", "hierarchical"), local_size=2)


def test_a_topology_that_the_ranks_do_not_form_is_left_out():
    verdicts, _ = run(checked, ("int8",), ("flat", "grid", "hierarchical"))
    assert {verdict.case.topology for verdict in verdicts} == {"", "flat"}


def test_no_case_begins_after_the_end():
    verdicts, _ = run(checked, ("int8",), ("flat",), -1.0)
    assert verdicts and all(verdict.error is None for verdict in verdicts)


# Cases with faults.

COUNT = canary._CHUNK + 1


def spoil(collective, count, change, *, every=False):
    """From now on change the third result of this case."""
    finish = canary._Use.finish

    def spoiled(use, pending):
        finish(use, pending)
        here = use.case[1:3] == collective and use.count == count
        if here and (every or len(use.results) == 3):
            change(use.results[-1])

    canary._Use.finish = spoiled


def flipped(rank, victim, bit, codec, collective, count):
    def flip(result):
        result.view(torch.int32)[7] ^= 1 << bit

    if rank == victim:
        spoil(collective, count, flip)
    return checked(rank, (codec,))


SUM, SCATTER, GATHER = ("all_reduce", "sum"), ("reduce_scatter", "mean"), ("all_gather", "")


@pytest.mark.parametrize(
    "codec, bit", [("int8", 0), ("int8", 30), ("onebit", 30), ("topk", 0), ("fp32", 0)]
)
def test_a_flipped_bit_of_one_rank_is_named(codec, bit):
    """A mantissa's lowest bit stays within every limit; only comparison with other ranks finds
    it."""
    for verdicts in run(flipped, 1, bit, codec, SUM, COUNT, world=3):
        (wrong,) = [verdict for verdict in verdicts if verdict.faults]
        assert wrong.case[:3] == (codec, *SUM)
        (fault,) = wrong.faults
        assert fault.startswith(f"rank 1, {codec} all_reduce sum flat, {COUNT} elements")
        assert "element 7 is " in fault and "expected " in fault
        assert ("as rank 0 has it" in fault) == (bit == 0)


@pytest.mark.parametrize("collective, count", [(SCATTER, canary._CHUNK // 2 + 1), (GATHER, 257)])
def test_the_other_collectives_are_looked_at_as_well(collective, count):
    for verdicts in run(flipped, 1, 30, "int4", collective, count):
        (wrong,) = [verdict for verdict in verdicts if verdict.faults]
        assert wrong.case[1:3] == collective
        (fault,) = wrong.faults
        assert fault.startswith(f"rank 1, int4 {collective[0]}") and "element 7 is" in fault


def moved(rank, codec, by):
    spoil(SUM, COUNT, lambda result: result[7].add_(by), every=True)
    return checked(rank, (codec,))


def test_what_is_the_same_on_all_ranks_and_wrong_is_found():
    """The scale of this block is at most 2 ranks * 1 / 127, and 0.1 is six steps of that."""
    for verdicts in run(moved, "int8", 0.1):
        (wrong,) = [verdict for verdict in verdicts if verdict.faults]
        assert wrong.error > 1 and len(wrong.faults) == 2
        assert f"{COUNT} elements, sum of 1 result(s): element 7 is" in wrong.faults[0]


def test_what_is_within_the_limit_and_nowhere_kept_is_found():
    for verdicts in run(moved, "int8", 1e-4):
        (wrong,) = [verdict for verdict in verdicts if verdict.faults]
        assert wrong.error < 1 < wrong.lost and len(wrong.faults) == 2
        assert "less what residuals hold: element 7 is" in wrong.faults[0]


def forgetful(rank, codec):
    make = canary.Bucket

    def without_name(_name, *arguments, **options):
        return make(None, *arguments, **options)

    canary.Bucket = without_name
    return checked(rank, (codec,))


@pytest.mark.parametrize("codec", ["int8", "int4", "onebit", "adaptive"])
def test_feedback_that_is_off_is_found(codec):
    for verdicts in run(forgetful, codec):
        for verdict in verdicts:
            assert bool(verdict.faults) == (verdict.case.collective != "encode"), verdict.case
            assert (verdict.lost > 1) == bool(verdict.faults)
            if codec in ("int8", "int4") and verdict.faults:
                assert verdict.error > 1.5  # more than the error of one step


def other_encoder(rank):
    def other(spec, x):
        wire = bytearray(encode(spec, x))
        wire[-1] ^= rank == 1 and x.numel() == 257  # padding, which no decoder reads
        return bytes(wire)

    canary.encode = other
    return checked(rank, ("int4",))


def test_an_encoder_with_other_bytes_is_named():
    for verdicts in run(other_encoder, world=3):
        (wrong,) = [verdict for verdict in verdicts if verdict.faults]
        assert wrong.case.collective == "encode"
        assert wrong.faults[0].startswith("rank 1, int4 encode, 160 bytes: byte 159 is 1, expected")


# The limits.


@pytest.mark.parametrize(
    "spec",
    [*CODECS, "int8:rounding=stochastic", "int4:block=1024", "onebit:block=128"],
)
def test_no_encoding_loses_more_than_the_limit(spec):
    generator = torch.Generator().manual_seed(5)
    up = codec_info(spec).up
    for count in (1, 255, 256, 257, 5000):
        for power in (1, 3, 9):  # fewer and fewer elements carry the weight
            x = torch.randn(count, generator=generator).double() ** power
            x = x.float()
            lost = x.double() - torch.as_tensor(decode(up, encode(up, x), count)).double()
            limit = error_limits.loss(up, error_limits.size_of(x.abs().double(), None, count))
            assert (lost.abs() <= limit.element).all()
            assert (error_limits.blocks(lost).norm(dim=-1) <= limit.norm * (1 + 1e-12)).all()


def test_limits_of_feedback_do_not_grow_and_without_it_they_do():
    x = error_limits.size_of(torch.ones(1000).double(), None, 1000)
    for feedback, least, most in ((True, 1.0, 1.1), (False, error_limits.STEPS, 5.0)):
        route = error_limits.Route("int4", "int4", two_level=False, feedback=feedback)
        first, *_, last = error_limits.limits(route, x, x.times(2.0), 2, 0.5)
        ratio = (last.error.element / first.error.element).max().item()
        assert least < ratio < most


def test_inputs_are_exact_and_have_no_generator():
    (x,) = canary.values(1000, 1)
    assert x.dtype == torch.float32 and (x[768:1000].abs() == 0).all() and x[:768].all()
    # Golden: all ranks of a group draw these, with any version of torch.
    assert struct.pack("<2f", *x[:2].tolist()).hex() == "740af5bc62623b3d"


# The command.


def test_the_command_starts_ranks(monkeypatch):
    """It starts them as `thinwire bench` does; the tests of bench cover the rest."""
    monkeypatch.setattr(launch, "start_here", lambda ranks: 100 + ranks)
    assert cli.main(["doctor", "--canary", "--ranks", "3"]) == 103


def test_the_command_in_two_ranks_leaves_nothing(tmp_path):
    trace = {"THINWIRE_TRACE": str(tmp_path / "t.json"), "THINWIRE_FLIGHT": str(tmp_path / "f")}
    wanted = ("doctor", "--canary", "--codecs", "int8;raw", "--seconds", str(LONG))
    lines = torchrun("thinwire", *wanted, environment=trace).splitlines()
    assert lines[-1] == "2 ranks, 7 cases: 0 wrong"
    assert all(line.startswith("ok ") for line in lines[:-1]) and len(lines) == 8
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong, words",
    [
        (("--codecs", "int3"), "unknown codec 'int3'"),
        (("--ranks", "1"), "2 ranks"),
        (("--ranks", "9" * 20), "expected at most 256 on one machine"),
        (("--topologies", "star"), "'star'"),
        (("--seconds", "0"), "0 seconds"),
    ],
)
def test_a_wrong_argument_is_said(wrong, words, capsys):
    assert cli.main(["doctor", "--canary", *wrong]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_case_is_printed_with_its_rank(capsys):
    case = canary.Case("int8", "all_reduce", "sum", "flat")
    canary._print(canary.Verdict(case, 3.0, 0.5, ("rank 1, int8: element 7 is 1, expected 2",)))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("wrong ") and "error     3 of its limit" in first
    assert second.strip() == "rank 1, int8: element 7 is 1, expected 2"
