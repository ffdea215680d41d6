"""Every cell of the map is saved once it is measured, and is then not measured again."""

import argparse
import contextlib
import json
import math
import types

import pytest

from bench import __main__ as bench
from bench import harness, lab
from bench.never_slower import FIELDS


@pytest.fixture
def measured(monkeypatch):
    """Return the list of cells measured, by a fake instead of ranks in a lab. A cell "20" fails."""
    found = []

    @contextlib.contextmanager
    def open_lab(world, link, *, delay_ms):
        yield types.SimpleNamespace(world=world, link=link, delay_ms=delay_ms)

    def run_ranks(place, argv, _timeout_s):
        if place.delay_ms == 20:
            raise RuntimeError("rank 1 failed")
        width = next(word for word in reversed(argv) if word.startswith("--width="))
        found.append((place.link, place.delay_ms, place.world, argv[0], int(width[8:])))
        row = {"ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "ratio": 1.0, "ratio_low": 1.0,
               "ratio_high": 1.0, "turns": 5}  # fmt: skip
        return [{"subject": way} | row for way in ("plain", "auto")]

    monkeypatch.setattr(lab, "open_lab", open_lab)
    monkeypatch.setattr(lab, "can_shape", lambda: "")
    monkeypatch.setattr(harness, "run_ranks", run_ranks)
    monkeypatch.setattr(harness, "commit", lambda: "c0ffee")
    return found


def arguments(**changed) -> argparse.Namespace:
    given = {
        "kind": "map", "links": "1gbit", "delays_ms": "0,5", "worlds": "2,4", "frameworks": "",
        "widths": "256", "width": 1024, "minutes": math.inf, "resume": True,
    }  # fmt: skip
    return argparse.Namespace(**(given | changed))


def test_every_cell_has_its_own_rows(measured, tmp_path):
    out = tmp_path / "map.json"
    rows = bench.run(arguments(widths="256,1024"), out)
    assert len(set(measured)) == len(measured) == 2 * 2 * 2 * 2
    assert [tuple(row[field] for field in FIELDS) for row in rows[::2]] == measured
    assert json.loads(out.read_text())["rows"] == rows


def test_it_goes_on_where_it_was_stopped(measured, tmp_path):
    out = tmp_path / "map.json"
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        bench.run(arguments(delays_ms="0,20"), out)
    stopped = list(measured)
    assert [(delay, world, kind) for _, delay, world, kind, _ in stopped] == [
        (0.0, world, kind) for world in (2, 4) for kind in ("ddp", "fsdp2")
    ]
    bench.run(arguments(), out)  # cells with other delays, in the same file
    again = measured[len(stopped) :]
    assert {delay for _, delay, _, _, _ in again} == {5.0} and len(again) == len(stopped)
    assert len(json.loads(out.read_text())["rows"]) == 2 * len(measured)


def test_no_cell_begins_after_the_last_minute(measured, tmp_path, capsys):
    out = tmp_path / "map.json"
    assert bench.run(arguments(minutes=-1.0), out) == []
    assert not measured and capsys.readouterr().out.count("skipped") == 8


def test_a_file_has_the_cells_of_one_commit(measured, tmp_path, monkeypatch):
    out = tmp_path / "map.json"
    bench.run(arguments(worlds="2"), out)
    before = list(measured)
    monkeypatch.setattr(harness, "commit", lambda: "decade")
    with pytest.raises(SystemExit, match="is of commit c0ffee"):
        bench.run(arguments(), out)
    assert measured == before
    bench.run(arguments(worlds="2", resume=False), out)  # all cells are measured again
    assert measured == before * 2 and json.loads(out.read_text())["commit"] == "decade"
