"""The tables of figures on the pages, made from the files of bench/results/.

    python -m bench.pages            # writes them
    python -m bench.pages --check    # names the pages whose tables differ from the files

A table stands between `<!-- figures: NAME (bench/pages.py) -->` and `<!-- end of figures -->`, and
says below itself which files it is from, with machine and commit. The text around it is written
by hand. After a new measurement: put the file in its place, and run this."""

# ruff: noqa: RUF001 - tables have the multiplication sign

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench import harness, never_slower
from bench.accuracy import report

Row = dict[str, Any]

PAGES = ("README.md", "docs/explanation/benchmarks.md", "docs/how-to/gpus.md")
_XEON, _EPYC, _H200 = "xeon-avx512-2cores", "epyc-zen4-2cores", "h200"
_BLOCK = re.compile(
    r"(<!-- figures: ([\w-]+) \(bench/pages\.py\) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
_LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "10gbit": "10 Gb/s",
          "loopback": "unshaped"}  # fmt: skip
_DDP_LINKS = ("1gbit", "10gbit", "loopback")
_WAYS = {
    "plain": "plain DDP, fp32",
    "bf16 hook": "bf16",
    "int8": "int8",
    "int4": "**int4**, the default",
    "adaptive": "adaptive, 2 bits",
    "onebit": "onebit, with momentum",
    "onebit:down=onebit": "onebit both ways, with momentum",
    "topk:density=0.01": "topk 1 %, with momentum",
    "alone": "no exchange at all",
}
_METHODS = {"plain": "fp32", "bf16 hook": "bf16", "onebit:down=onebit": "onebit both ways",
            "topk:density=0.01": "topk 1 %"}  # fmt: skip
_TASKS = {"mlp": "MLP", "cnn": "CNN", "charlm": "character LSTM"}


class Result:
    """A file of bench/results/."""

    def __init__(self, path: str) -> None:
        self._path = f"bench/results/{path}"
        self._fields = json.loads((harness.ROOT / self._path).read_text())
        self.rows: list[Row] = self._fields["rows"]

    def find(self, **fields: Any) -> Row | None:
        return next((row for row in self.rows if fields.items() <= row.items()), None)

    def value(self, form: str, **fields: Any) -> str:
        """A row's fields in that form; "" if there is no such row."""
        row = self.find(**fields)
        return form.format_map(row) if row else ""

    def source(self) -> str:
        """Return the file with its machine and commit; the command is in the file."""
        place, commit = self._fields["machine"], self._fields.get("commit")
        if not isinstance(place, str):  # as of before the harness
            place = ", ".join(
                [place["processor"], f"{place['cores']} cores", *place.get("gpus", ())]
            )
        return f"`{self._path}` ({place}{f', commit {commit}' if commit else ''})"


def _markdown(head: Iterable[str], body: Iterable[Iterable[str]], *sources: Result) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, body)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\nFrom {'; '.join(source.source() for source in sources)}."


def _gain(points: list[float]) -> str:
    """Mean and standard error of paired differences."""
    mean, error = report.mean_error(points)
    return f"{round(mean, 2) + 0.0:+.2f} ± {error:.2f}"


def _accuracy(result: Result) -> tuple[dict[str, float], dict[tuple[str, str], str]]:
    """How many times fewer bytes by method, and points over fp32's by method and task, of pairs of
    one seed."""
    exact = {(r["task"], r["seed"]): r["accuracy"] for r in result.rows if r["method"] == "fp32"}
    fewer: dict[str, list[float]] = {}
    gains: dict[tuple[str, str], list[float]] = {}
    for row in result.rows:
        points = row["accuracy"] - exact[row["task"], row["seed"]]
        fewer.setdefault(row["method"], []).append(row["ratio"])
        gains.setdefault((row["method"], row["task"]), []).append(points)
    means = {method: statistics.mean(ratios) for method, ratios in fewer.items()}
    return means, {key: _gain(points) for key, points in gains.items()}


def speed_and_accuracy() -> str:
    steps = Result(f"{_XEON}/ddp.json")
    runs = Result(f"{_XEON}/accuracy/accuracy.json")
    fewer, gains = _accuracy(runs)
    body = []
    for way in ("plain", "bf16 hook", "int8", "int4", "onebit", "topk:density=0.01"):
        method = _METHODS.get(way, way)
        speeds = [steps.value("{ratio:.2f} ×", link=link, subject=way) for link in _DDP_LINKS]
        points = ["0" if way == "plain" else gains[method, task] for task in _TASKS]
        body.append([_WAYS[way], f"{fewer[method]:.1f} ×", *speeds, *points])
    first, *others = _TASKS.values()
    links = [_LINKS[link] for link in _DDP_LINKS]
    head = ["codec", "fewer bytes", *links, f"accuracy: {first}", *others]
    return _markdown(head, body, steps, runs)


def _ddp_steps(result: Result, ways: Iterable[str]) -> str:
    form = "{ms:.1f} [{low_ms:.0f}, {high_ms:.0f}], {ratio:.2f} ×"
    body = [
        [_WAYS[way], *(result.value(form, link=link, subject=way) for link in _DDP_LINKS)]
        for way in ways
    ]
    return _markdown(["", *(_LINKS[link] for link in _DDP_LINKS)], body, result)


def ddp() -> str:
    return _ddp_steps(Result(f"{_XEON}/ddp.json"), _WAYS)


def ddp_of_four() -> str:
    result = Result(f"{_XEON}/ddp-4.json")
    body = [
        [_LINKS[link], *(result.value(form, link=link, subject="int4") for form in
         ("{ratio:.2f} ×", "{ratio_low:.2f} to {ratio_high:.2f}"))]
        for link in ("1gbit", "10gbit")
    ]  # fmt: skip
    return _markdown(["link", "int4 over plain, 4 ranks", "95 % interval"], body, result)


def ddp_on_a_gpu() -> str:
    result = Result(f"{_H200}/ddp_step.json")
    return _ddp_steps(result, ("plain", "bf16 hook", "int8", "int4", "adaptive", "alone"))


def never_slower_map() -> str:
    files = ("map", "map-fsdp2", "map-fsdp2-long")
    results = [Result(f"{_XEON}/{file}.json") for file in files]
    cells = never_slower.cells_of(result.rows for result in results)
    ratios = [cell["ratio"] for cell in cells]
    near = sum(cell["over_best"] >= never_slower.NEAR_BEST for cell in cells)
    head = ["cells", "over the uncompressed step: least", "median", "most",
            "within 5 % of the best codec"]  # fmt: skip
    figures = [min(ratios), statistics.median(ratios), max(ratios)]
    body = [[str(len(cells)), *(f"{figure:.2f} ×" for figure in figures), str(near)]]
    return _markdown(head, body, *results)


def allreduce() -> str:
    result, size = Result(f"{_XEON}/allreduce.json"), 16 << 20
    ways = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4",
            "onebit:down=onebit": "onebit both ways", "adaptive": "adaptive"}  # fmt: skip

    def cell(link: str, way: str) -> str:
        row = result.find(link=link, subject=way, bytes=size)
        if row is None:
            return ""
        limit = f" ({row['gloo_ms'] / row['limit_ms']:.1f})" if row.get("limit_ms") else ""
        return f"{row['ratio']:.2f}{limit}"

    links = ("1gbit", "5gbit", "10gbit", "loopback")
    body = [[_LINKS[link], *(cell(link, way) for way in ways)] for link in links]
    return _markdown(["link", *ways.values()], body, result)


def latency() -> str:
    result = Result(f"{_XEON}/latency.json")
    body = [
        [str(world), str(size), *(result.value(form, world=world, bytes=size, subject="fp32")
         for form in ("{us:.0f}", "{ratio:.1f} ×"))]
        for world in (2, 4, 8)
        for size in (64, 4096)
    ]  # fmt: skip
    return _markdown(["ranks", "bytes", "µs", "over Gloo's"], body, result)


def _over_own(result: Result, ways: Mapping[str, str], by: Mapping[str, str], key: str) -> str:
    body = []
    for value, name in by.items():
        line = [name, result.value("{ms:.1f}", **{key: value}, subject="plain")]
        for way in ways:
            line.append(result.value("{ms:.1f}", **{key: value}, subject=way))
            form = "{ratio:.2f} × [{ratio_low:.2f}, {ratio_high:.2f}]"
            line.append(result.value(form, **{key: value}, subject=way))
        body.append(line)
    columns = [column for name in ways.values() for column in (f"{name}, ms", "speed-up")]
    return _markdown([key, "its own, ms", *columns], body, result)


def frameworks() -> str:
    result = Result(f"{_XEON}/frameworks.json")
    names = dict.fromkeys(row["framework"] for row in result.rows)
    shown = {name: re.sub(r"FSDP2, (.*)", r"FSDP2, `\1`", name) for name in names}
    shown["FSDP2, gather="] = "FSDP2, gathers in int4 too"
    shown["Horovod's API"] += ", against its `Compression.none`"
    return _over_own(result, {"int4": "int4"}, shown, "framework")


def gathers() -> str:
    result = Result(f"{_EPYC}/fsdp2-gather.json")
    links = {link: _LINKS[link] for link in ("100mbit", "1gbit", "10gbit")}
    return _over_own(result, {"int4": "int4", "adaptive": "adaptive"}, links, "link")


def accuracy() -> str:
    result = Result(f"{_XEON}/accuracy/accuracy.json")
    fewer, gains = _accuracy(result)
    body = [
        [method, f"{times:.1f} ×", *(gains[method, task] for task in _TASKS)]
        for method, times in fewer.items()
        if method != "fp32"
    ]
    return _markdown(["codec", "fewer bytes", *_TASKS.values()], body, result)


def own_rates() -> str:
    result = Result(f"{_H200}/accuracy/gpt/accuracy.json")
    tasks = {"gpt AdamW": "AdamW", "gpt Muon": "Muon, AdamW for what is no matrix inside"}
    methods = ("int4", "adaptive 2")
    _, gains = _accuracy(result)
    body = []
    for task, name in tasks.items():
        exact = [r["accuracy"] for r in result.rows if (r["task"], r["method"]) == (task, "fp32")]
        mean, error = report.mean_error(exact)
        line = [name, f"{mean:.2f} ± {error:.2f} %", *(gains[method, task] for method in methods)]
        body.append(line)
    return _markdown(["optimizer", "fp32, test accuracy", *methods], body, result)


def drift() -> str:
    result = Result(f"{_H200}/accuracy/drift/drift.json")
    body = [
        [row["method"], str(row["seeds"]),
         f"{row['drift_percent']:+.2f} ± {row['standard_error']:.2f} %"]
        for row in result.rows
    ]  # fmt: skip
    return _markdown(["codec", "seeds", "training loss over fp32's"], body, result)


def precision() -> str:
    result = Result(f"{_EPYC}/ratio/ratio.json")
    sources = {"mlp": "MLP", "cnn": "CNN", "charlm": "LSTM", "gpt AdamW": "GPT"}
    body = []
    for codec in ("int8", "int4", "adaptive:bits=4", "adaptive:bits=2", "adaptive:bits=1"):
        errors = [result.value("{error:.2g}", source=source, codec=codec) for source in sources]
        body.append([codec, result.value("{bits:.2f}", source="mlp", codec=codec), *errors])
    return _markdown(["", "bits sent", *sources.values()], body, result)


TABLES: Mapping[str, Callable[[], str]] = {
    "speed-and-accuracy": speed_and_accuracy,
    "ddp": ddp,
    "ddp-of-four": ddp_of_four,
    "ddp-on-a-gpu": ddp_on_a_gpu,
    "map": never_slower_map,
    "allreduce": allreduce,
    "latency": latency,
    "frameworks": frameworks,
    "gathers": gathers,
    "accuracy": accuracy,
    "own-rates": own_rates,
    "drift": drift,
    "precision": precision,
}


def filled(text: str) -> str:
    """A page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return _BLOCK.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.pages", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, differ = parser.parse_args().check, 0
    for page in PAGES:
        path = harness.ROOT / page
        text = path.read_text()
        if (new := filled(text)) != text:
            differ += 1
            print(f"{page}: {'differs from bench/results/' if check else 'written'}")
            if not check:
                path.write_text(new)
    return int(check and differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
