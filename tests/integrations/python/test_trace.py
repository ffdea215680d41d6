"""Merging traces aligns clocks that differ by a known amount."""

import itertools
import json
from random import Random

import pytest
import thinwire
from models import data, make_mlp
from policies import Wrapped
from ranks import run
from thinwire import cli, trace

STAGES = {"QUEUE", "ENCODE", "EXCHANGE", "REDUCE", "GATHER", "DECODE"}


def traced(rank: int, path: str):
    import torch

    model = make_mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Wrapped(inner, model, codec="int4", min_bytes=0, trace=path)
    for step in range(10):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    optimizer.close()


def shift(file, microseconds: float) -> None:
    events = json.loads(file.read_text())
    for event in events:
        if "ts" in event:
            event["ts"] += microseconds
    file.write_text(json.dumps(events))


def test_clocks_come_together(tmp_path):
    run(traced, str(tmp_path / "run.json"))
    files = trace.files_of(tmp_path / "run.json")
    assert [file.name for file in files] == ["run.rank0.json", "run.rank1.json"]
    plain = trace.merge(files)  # one machine has one clock: the true offset is 0
    assert abs(plain.offsets[1] - plain.offsets[0]) <= plain.uncertainty + 1
    shift(files[1], 5e6)
    again = trace.merge(files)
    moved = again.offsets[1] - again.offsets[0] - (plain.offsets[1] - plain.offsets[0])
    assert moved == pytest.approx(-5e6, abs=1)
    assert again.uncertainty == pytest.approx(plain.uncertainty, abs=1)
    names = {event["name"] for event in again.events}
    assert names >= STAGES
    assert min(event["ts"] for event in again.events if "ts" in event) == 0


def test_the_command_writes_one_file(tmp_path, capsys):
    run(traced, str(tmp_path / "run.json"))
    out = tmp_path / "merged.json"
    assert cli.main(["trace", str(tmp_path / "run.json"), "--out", str(out)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert {event["pid"] for event in json.loads(out.read_text())} == {0, 1}


def test_what_is_no_trace_is_named(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"a\.json is no trace"):
        trace.merge([tmp_path / "a.json"])
    with pytest.raises(thinwire.InvalidArgumentError, match="at least one"):
        trace.merge([])
    event = {"name": "EXCHANGE", "ph": "X", "ts": 0, "dur": 1}
    for rank in (0, 1):
        args = {"tensor": f"of rank {rank}", "chunk": 0}
        file = tmp_path / f"b.rank{rank}.json"
        file.write_text(json.dumps([{**event, "pid": rank, "args": args}]))
    with pytest.raises(thinwire.InvalidArgumentError, match="no exchange in common"):
        trace.merge(trace.files_of(tmp_path / "b.json"))
    assert cli.main(["trace", str(tmp_path / "nothing.json")]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '[{"pid": 0, "ts": 1}, {"pid": 0, "ts": %s}]' % ("9" * 400), "", "[",
             '[{"pid": 0, "ts": NaN}]', '[{"pid": 0, "ts": 1e400}]'],
    ids=["deep", "long", "empty", "cut", "nan", "infinite"],
)  # fmt: skip
def test_text_that_is_no_trace_is_one_line(text, tmp_path, capsys):
    (tmp_path / "a.json").write_text(text)
    assert cli.main(["trace", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "a.json is no" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_trace_is_not_overwritten_by_what_is_merged(tmp_path, capsys):
    file = tmp_path / "a.rank0.json"
    file.write_text('[{"pid": 0, "ts": 5}]')
    assert cli.main(["trace", str(tmp_path / "a.json"), "--out", str(file)]) == 2
    assert "name another file" in capsys.readouterr().err
    assert json.loads(file.read_text())[0]["ts"] == 5


def mutated(value, random: Random):
    """Return the JSON value with a part replaced by something else."""
    if isinstance(value, list) and value and random.random() < 0.9:
        copy, place = list(value), random.randrange(len(value))
        copy[place] = mutated(value[place], random)
        return copy if random.random() < 0.8 else copy[:place]
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if random.random() < 0.3 else rest | {key: mutated(value[key], random)}
    others = [None, True, -1, 1e300, float("nan"), "X", "EXCHANGE", [], {}, [[]], {"ts": "now"}]
    return random.choice(others)


def test_a_damaged_trace_is_refused_or_read(tmp_path):
    random = Random(20240607)
    whole = []
    for rank in (0, 1):
        events = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": "rank"}}]
        for chunk, name in itertools.product(range(3), ("ENCODE", "EXCHANGE", "GATHER")):
            args = {"tensor": "t", "chunk": chunk}
            event = {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": chunk, "dur": 1}
            events.append(event | {"args": args})
        whole.append(events)
    files = [tmp_path / f"c.rank{rank}.json" for rank in (0, 1)]
    refused = 0
    for _ in range(2000):
        text = [json.dumps(mutated(events, random)) for events in whole]
        if random.random() < 0.2:
            text[0] = text[0][: random.randrange(len(text[0]))]
        for file, content in zip(files, text, strict=True):
            file.write_text(content)
        try:
            trace.merge(files)
        except thinwire.InvalidArgumentError:
            refused += 1
    assert 100 < refused < 2000
