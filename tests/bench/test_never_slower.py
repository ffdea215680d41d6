"""The map's figures of a cell, and its picture."""

import json

from thinwire.torch import forecast

from bench import never_slower


def rows_of(link: str, milliseconds: dict[str, float]) -> list[dict]:
    plain = milliseconds["plain"]
    return [
        {"link": link, "delay_ms": 0.0, "world": 2, "kind": "ddp", "width": 256, "subject": way,
         "ms": ms, "ratio": plain / ms, "ratio_low": 0.9 * plain / ms,
         "ratio_high": 1.1 * plain / ms}
        for way, ms in milliseconds.items()
    ]  # fmt: skip


SLOW = rows_of("100mbit", {"plain": 100, "auto": 26, "int8": 40, "int4": 25, "adaptive": 20})
FAST = rows_of("none", {"plain": 10, "auto": 10.1, "int8": 12, "int4": 13})
SLOWER = rows_of("10gbit", {"plain": 10, "auto": 20, "int8": 12, "int4": 13})


def test_a_cell_has_autos_figures_and_the_best_fixed_way():
    far, near, bad = never_slower.cells([SLOW + FAST + SLOWER])
    assert (far["best"], near["best"]) == ("int4", "plain")
    assert far["over_best"] == 25 / 26 and near["over_best"] == 10 / 10.1
    assert far["best_of_all"] == "adaptive" and far["over_all"] == 20 / 26
    assert bad["over_best"] == 0.5
    counted = never_slower.counts([far, near, bad])
    assert [counted[name] for name in ("cells", "slower", "kept", "proven", "near", "taken")] == [
        3, 2, 2, 1, 2, 0,
    ]  # fmt: skip
    assert counted["least"] == 0.5 and counted["near_all"] == 1


def test_auto_may_take_what_the_adviser_recommends():
    assert never_slower.TAKEN[1:] == forecast.ACCURATE[1:]


def test_the_picture_is_drawn_from_files(tmp_path, capsys, monkeypatch):
    for name, rows in (("a", SLOW + FAST), ("b", SLOWER)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    (tmp_path / "later.json").write_text(
        json.dumps({"rows": rows_of("100mbit", {"plain": 8, "auto": 4})})
    )
    files.append(str(tmp_path / "later.json"))
    picture = tmp_path / "map.png"
    monkeypatch.setattr("sys.argv", ["never_slower", *files, "--plot", str(picture)])
    assert never_slower.main() == 0
    out = capsys.readouterr().out
    assert "| ddp, 256 | 2 | 10gbit | 0 | **0.50** |" in out
    assert "| ddp, 256 | 2 | 100mbit | 0 | **2.00** |" in out  # of the last file
    assert "| 3 | 0.5 |" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
