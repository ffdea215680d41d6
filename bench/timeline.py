"""Traces steps under fifo with a barrier and under p3, draws both on one clock, and says what
tracing costs.

    python bench/timeline.py [--link 200mbit] [--codec int4] [--batch 40] [--out build/bench]

Writes OUT/timeline.png, OUT/timeline.json (the merged trace of p3, for Perfetto) and OUT/trace.json
(the cost: p3 traced and not traced, in turns). Needs matplotlib."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab_ranks
from subjects import Subject
from thinwire import trace

SHOWN = 2  # steps in the picture
WARM_UP, TURN = 3, 6  # steps
TIMEOUT_S = 900.0
_SETTINGS = ("codec", "batch", "turns", "chunk_bytes")
_LANES = {"EXCHANGE": "first hop", "GATHER": "second hop"}
_COMPUTING = {"forward": "#4c9f70", "backward": "#2f6690"}
_TENSORS = ("#c0392b", "#e59866", "#f7dc6f", "#af7ac5", "#85929e")

Span = tuple[str, float, float]  # what, begin, end; microseconds of this rank's clock


def now() -> float:
    return 1e6 * time.perf_counter()


class Observed(Subject):
    """Notes when it computes. The hooks come after the optimizer's, so waiting is not in them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spans: list[Span] = []
        self.begins: list[float] = []  # of steps
        for module in self.model.children():
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._since = now()

    def _end(self, *_: Any) -> None:
        self.spans.append(("forward", self._since, now()))

    def run(self) -> None:
        self.begins.append(now())
        loss = self.loss()
        begin = now()
        loss.backward()
        self.spans.append(("backward", begin, now()))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"codec": arguments.codec, "chunk_bytes": arguments.chunk_bytes}
    fields = "vgg", arguments.batch
    folder = arguments.folder
    subjects = {
        "fifo": Observed(*fields, policy="fifo", trace=str(folder / "fifo.json"), **options),
        "p3": Observed(*fields, policy="p3", trace=str(folder / "p3.json"), **options),
        "p3 not traced": Observed(*fields, policy="p3", **options),
    }
    for subject in subjects.values():
        subject.train(WARM_UP)
    for _ in range(arguments.turns):
        for subject in subjects.values():
            subject.turn(TURN)
    rows = {
        name: {"spans": s.spans, "begins": s.begins, "turns": s.turns}
        for name, s in subjects.items()
    }
    for subject in subjects.values():
        subject.close()
    return rows


def merged_of(folder: Path, name: str) -> trace.Merged:
    """The communicators of a process count up in their files' names."""
    return trace.merge(sorted(folder.glob(f"{name}.*rank*.json")))


def lanes_of(merged: trace.Merged, rank: int, begin: float, end: float) -> Iterator[Any]:
    for event in merged.events:
        if event.get("name") in _LANES and event["pid"] == rank:
            start, stop = event["ts"], event["ts"] + event["dur"]
            if stop > begin and start < end:
                yield event["name"], event["tid"], start, stop, event["args"]["tensor"]


def colours_of(merged: trace.Merged) -> dict[str, str]:
    """By tensor, in forward order, which these models' names follow."""
    names = {event["args"]["tensor"] for event in merged.events if event["name"] in _LANES}
    ordered = sorted(names, key=lambda name: int(name.partition(".")[0]))
    return dict(zip(ordered, _TENSORS, strict=False))


def draw(folder: Path, rows: dict[str, Any], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(2, 1, figsize=(11, 5.2), sharex=True)
    colours = colours_of(merged_of(folder, "p3"))
    for axis, name in zip(axes, ("fifo", "p3"), strict=True):
        merged = merged_of(folder, name)
        shift = merged.offsets[0]
        begins = [begin + shift for begin in rows[name]["begins"]]
        first = WARM_UP + TURN * (len(rows[name]["turns"]) // 2) + 2  # in the middle of a turn
        begin, end = begins[first], begins[first + SHOWN]
        window = 1e-3 * (end - begin)
        for what, start, stop in rows[name]["spans"]:
            start, stop = start + shift, stop + shift
            if stop > begin and start < end:
                axis.barh(0, 1e-3 * (stop - start), left=1e-3 * (start - begin), height=0.8,
                          color=_COMPUTING[what])  # fmt: skip
        for stage, lane, start, stop, tensor in lanes_of(merged, 0, begin, end):
            axis.barh(1 + lane, 1e-3 * (stop - start), left=1e-3 * (start - begin), height=0.8,
                      color=colours[tensor], alpha=1.0 if stage == "EXCHANGE" else 0.5)  # fmt: skip
        step = statistics.median(rows[name]["turns"])
        barrier = " with a barrier" if name == "fifo" else ""
        axis.set_title(f"{name}{barrier}: {1000 * step:.0f} ms a step", loc="left", fontsize=10)
        axis.axvline(window, color="black", linewidth=1)
        axis.set_xlim(0, None)
        axis.set_yticks([0, 1, 2, 3, 4], ["computing", *(f"lane {lane}" for lane in range(4))])
        axis.invert_yaxis()
    axes[1].set_xlabel(f"milliseconds; the line ends {SHOWN} steps")
    handles = [Patch(color=colour, label=what) for what, colour in _COMPUTING.items()]
    handles += [Patch(color=colour, label=name) for name, colour in colours.items()]
    handles.append(Patch(color="#85929e", alpha=0.5, label="pale: second hop"))
    figure.legend(handles=handles, loc="lower center", ncols=7, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(out, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--chunk_bytes", type=int, default=1 << 20)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # set in the ranks
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        return lab_ranks.be_one(arguments, lambda: measure(arguments))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {key: getattr(arguments, key) for key in _SETTINGS} | {"folder": name}
        rows = lab_ranks.run(__file__, 2, arguments.link, options, TIMEOUT_S)
        if rows is None:
            return 0
        title = (
            f"A VGG-like model on 2 ranks at {arguments.link}, {arguments.codec}: rank 0. "
            "Colours are tensors, red the input layers'."
        )
        draw(folder, rows, title, arguments.out / "timeline.png")
        merged = merged_of(folder, "p3")
        trace.write(merged, arguments.out / "timeline.json")
    times = {name: statistics.median(row["turns"]) for name, row in rows.items()}
    pairs = zip(rows["p3"]["turns"], rows["p3 not traced"]["turns"], strict=True)
    ratios = sorted(traced / plain for traced, plain in pairs)
    cost = {
        "step_s": times,
        "traced_over_not": statistics.median(ratios),
        "p25": ratios[len(ratios) // 4],
        "p75": ratios[-1 - len(ratios) // 4],
        "clock_uncertainty_us": merged.uncertainty,
    }
    (arguments.out / "trace.json").write_text(json.dumps(cost, indent=1) + "\n")
    print(json.dumps(cost, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
