"""The demo's parts. `make demo` runs all of it."""

import gzip
import json
import struct
import subprocess
import sys

import pytest
from ranks import run_program

from bench import lab
from demo import data, run, train

ROWS = [
    {"codec": "plain", "accuracy": 88.14, "loss": 0.3, "step_ms": 80.0, "wire_bytes": 4e6,
     "raw_bytes": 4e6, "ratio": 1.0},
    {"codec": "int4", "accuracy": 87.92, "loss": 0.31, "step_ms": 20.0, "wire_bytes": 5e5,
     "raw_bytes": 4e6, "ratio": 8.0},
]  # fmt: skip


def test_accuracy_is_a_difference_to_the_first_line():
    head = train.table_head().splitlines()[0].split()
    plain, int4 = (train.table_line(row, ROWS[0]).split() for row in ROWS)
    assert plain == ["plain", "88.1", "%", "0.300", "80.0", "1.00", "x", "4", "1.0", "x"]
    assert int4 == ["int4", "-0.2", "0.310", "20.0", "4.00", "x", "0", "8.0", "x"]
    assert head[:3] == ["codec", "test", "accuracy"]


FEW_IMAGES = """
from demo import data, train

whole = data.load
data.load = lambda *which: data.Images(whole(*which).pixels[:8000], whole(*which).labels[:8000])
train.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not data.FOLDER.is_dir(), reason="needs dataset-fashion-mnist")
def test_a_short_demo(tmp_path, monkeypatch, capsys):
    """Run all but the demo's network and most of the images."""
    program, printed = tmp_path / "few.py", []
    program.write_text(FEW_IMAGES)

    def start(place, command, _timeout_s):
        assert command[:3] == [sys.executable, "-m", "demo.train"]
        printed.append(run_program(program, *command[3:], world=place.world))

    monkeypatch.setattr(lab.Lab, "run", start)
    wanted = ("--link loopback --epochs 1 --batch 500 --ways", "plain int4", "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["demo.run", *wanted[0].split(), *wanted[1:]])
    assert run.main() == 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert [row["codec"] for row in written["rows"]] == ["plain", "int4"]
    assert written["rows"][1]["ratio"] > 7
    lines = [line for line in printed[0].splitlines() if line.startswith(("plain ", "int4 "))]
    assert lines == [train.table_line(row, written["rows"][0]) for row in written["rows"]]
    assert "2 times 1 epoch(s)" in capsys.readouterr().out


def test_idx_files(tmp_path):
    pixels = bytes(range(256)) * 49  # 16 images
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, 16, 28, 28)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels))
    header = struct.pack(">BBBBI", 0, 0, 8, 1, 16)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes(16)))
    images = data.load("train", tmp_path)
    assert images.pixels.shape == (16, 784) and len(images) == 16
    assert images.pixels[1, 0] == 784 % 256
    with pytest.raises(SystemExit, match="apt-get install"):
        data.load("t10k", tmp_path)


def test_a_failing_rank_is_reported_and_nothing_stays():
    with lab.open_lab(2, lab.LOOPBACK) as place:
        with pytest.raises(RuntimeError, match="rank 1 ended with 3"):
            place.run(["sh", "-c", '[ "$RANK" = 0 ] && exec sleep 60; exit 3'], 30)
        place.run(["sh", "-c", '[ "$WORLD_SIZE" = 2 ]'], 30)


def test_shaped_links_come_and_go():
    refusal = lab.can_shape()
    if refusal:
        pytest.skip(refusal)
    with lab.open_lab(2, "100mbit") as place:
        shown = subprocess.run(
            ["tc", "-n", place.namespaces[0], "qdisc", "show", "dev", "eth0"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "tbf" in shown and "100Mbit" in shown
        place.run(["sh", "-c", "ip addr show dev eth0 | grep -q 10.88.0.$((RANK + 1))"], 30)
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in place.namespaces)
