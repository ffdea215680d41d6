"""`thinwire bench`: what it measures is there, and its advice follows from the figures."""

import json

import pytest
from ranks import run
from test_cli import command
from thinwire.bench import allreduce, codecs, report


def row(way: str, size: int, speedup: float) -> dict:
    return {"way": way, "bytes": size, "rounds": 1, "ms": 10 / speedup, "speedup": speedup}


@pytest.mark.parametrize(
    "speedups, codec",
    [
        ({"int8": 0.5, "int4": 0.9}, None),
        ({"int8": 3.0, "int4": 6.0}, "int4"),
        ({"int8": 3.0, "int4": 3.02}, "int8"),  # as fast, and more accurate
    ],
)
def test_the_recommendation_follows_from_the_largest_size(speedups, codec):
    rows = [row(allreduce.GLOO, size, 1.0) for size in (1024, 1 << 20)]
    rows += [row(way, 1024, 9.0) for way in speedups]
    rows += [row(way, 1 << 20, speedup) for way, speedup in speedups.items()]
    found = allreduce.recommend(rows)
    assert found["codec"] == codec and found["bytes"] == 1 << 20
    assert found["speedup"] == pytest.approx(speedups.get(codec, 1.0))
    text = report.advice({"recommendation": found})
    assert text.startswith("do not compress") if codec is None else f"codec='{codec}'" in text


@pytest.mark.parametrize(
    "spec, loss",
    [("onebit", "diverges"), ("onebit:down=onebit", "diverges"), ("topk:density=0.001", "is lost"),
     ("int4", None), ("adaptive", None)],
)  # fmt: skip
def test_the_advice_says_what_a_codec_needs_beside_its_name(spec, loss):
    best = {"codec": spec, "bytes": 1 << 20, "speedup": 2.0}
    first, *more = report.advice({"recommendation": best}).splitlines()
    assert f"codec='{spec}'" in first
    assert bool(more) == (loss is not None)
    if loss is not None:
        (line,) = more
        assert line.startswith(f"{spec} needs momentum that the exchange owns") and loss in line
        assert f"compress(ddp, codec='{spec}', optimizer=optimizer)" in line


def test_codecs_are_measured_beside_memcpy():
    rows = codecs.measure(("int8", "int4"), 1 << 14)
    assert [row["codec"] for row in rows] == ["int8", "int4"]
    assert rows[1]["bits"] == pytest.approx(4.06, abs=0.01)
    for found in rows:
        copied, again = (
            found[f"{what}_gb_s"] / found[f"{what}_of_memcpy"] for what in ("encode", "decode")
        )
        assert copied == pytest.approx(again) and copied > 0


def take_turns(_rank: int) -> list[dict]:
    return allreduce.measure(("int4",), (1024, 400_000), least_rounds=3, seconds=0.0)


def test_all_ranks_have_the_same_figures():
    first, second = run(take_turns)
    assert [(r["way"], r["bytes"], r["ms"]) for r in first] == [
        (r["way"], r["bytes"], r["ms"]) for r in second
    ]
    assert {(r["way"], r["bytes"], r["rounds"]) for r in first} == {
        (way, size, 3) for way in (allreduce.GLOO, "int4") for size in (1024, 400_000)
    }
    assert all(r["speedup"] == 1 for r in first if r["way"] == allreduce.GLOO)


@pytest.mark.slow
def test_the_command_starts_two_ranks_and_reports(tmp_path):
    wanted = ("--codecs", "int4", "--sizes", "512", "--rounds", "1", "--seconds", "0")
    files = ("--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png"))
    done = command("-m", "thinwire", "bench", *wanted, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["ranks"] == 2 and result["link"]["bytes_per_s"] > 0
    assert done.stdout.rstrip() == report.table(result)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (("--codecs", "int3"), "unknown codec 'int3'"),
        (("--ranks", "1"), "2 ranks"),
        (("--link", "1xbit"), "--link is '1xbit', expected 'loopback', or a rate"),
        (("--link", "0gbit"), "--link is '0gbit'"),
        (("--json", "/no/such/folder.json"), "there is no folder '/no/such'; make it"),
    ],
)
def test_a_wrong_argument_is_said(wrong, words, capsys):
    from thinwire import cli

    assert cli.main(["bench", *wrong]) == 1
    assert words in capsys.readouterr().err
