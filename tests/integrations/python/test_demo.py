"""The demo's parts; the whole of it is `make demo`."""

import gzip
import json
import struct
import subprocess

import pytest
from thinwire.demo import data, lab, report

ROWS = [
    {"codec": "plain", "accuracy": 88.1, "loss": 0.3, "step_ms": 80.0, "wire_bytes": 1000,
     "raw_bytes": 1000, "ratio": 1.0, "replicas_identical": True},
    {"codec": "int4", "accuracy": 88.0, "loss": 0.3, "step_ms": 20.0, "wire_bytes": 125,
     "raw_bytes": 1000, "ratio": 8.0, "replicas_identical": False},
]  # fmt: skip


def test_report(tmp_path):
    rows = [dict(row) for row in ROWS]
    report.finish(rows)
    report.write_json(tmp_path / "report.json", "1gbit", 2, rows)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["link"] == "1gbit" and written["world"] == 2
    assert [row["speedup"] for row in written["rows"]] == [1.0, 4.0]
    text = report.table(rows)
    assert "4.00 x" in text and "NO" in text.splitlines()[-1]


def test_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [dict(row) for row in ROWS]
    report.finish(rows)
    report.plot(tmp_path / "report.png", "1gbit", 2, rows)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


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
