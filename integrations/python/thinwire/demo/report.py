"""The demo's table, report.json and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import thinwire

Row = dict[str, Any]

_COLOURS = ["#9aa5b1", "#7d8da1", "#3d7ea6", "#1f4e79", "#5b8c5a", "#b5651d", "#7a3e9d"]

_COLUMNS = (
    ("codec", "codec", "{}"),
    ("test accuracy", "accuracy", "{:.2f} %"),
    ("training loss", "loss", "{:.4f}"),
    ("ms per step", "step_ms", "{:.1f}"),
    ("speed-up", "speedup", "{:.2f} x"),
    ("bytes on the wire", "wire_bytes", "{:,}"),
    ("ratio", "ratio", "{:.2f}"),
    ("replicas identical", "replicas_identical", "{}"),
)


def finish(rows: list[Row]) -> None:
    """Adds each row's speed-up over the first one, which is plain DDP."""
    for row in rows:
        row["speedup"] = rows[0]["step_ms"] / row["step_ms"]


def table(rows: list[Row]) -> str:
    cells = [[title for title, _, _ in _COLUMNS]]
    for row in rows:
        values = {**row, "replicas_identical": "yes" if row["replicas_identical"] else "NO"}
        cells.append([form.format(values[key]) for _, key, form in _COLUMNS])
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = []
    for line in cells:
        padded = [
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_json(path: Path, link: str, world: int, rows: list[Row]) -> None:
    path.write_text(json.dumps({"link": link, "world": world, "rows": rows}, indent=2) + "\n")


def _short(way: str) -> str:
    return way if way == "plain" else thinwire.codec_info(way).name


def plot(path: Path, link: str, world: int, rows: list[Row]) -> None:
    """Three bars a codec: step time, bytes, accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [_short(row["codec"]) for row in rows]
    panels = (
        ("ms per step (median)", [row["step_ms"] for row in rows], "{:.1f}"),
        ("MB on the wire, per rank", [row["wire_bytes"] / 1e6 for row in rows], "{:,.0f}"),
        ("test accuracy, %", [row["accuracy"] for row in rows], "{:.2f}"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 3.8), layout="constrained")
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        bars = axis.bar(names, values, color=_COLOURS)
        axis.tick_params(axis="x", labelsize=8)
        axis.bar_label(bars, [form.format(value) for value in values], padding=2)
        axis.set_title(title)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[2].set_ylim(0, 110)
    where = "loopback" if link == "loopback" else f"{link} links"
    figure.suptitle(f"Fashion-MNIST, MLP of 1.9 M parameters, DDP over {world} ranks, {where}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
