"""The tables of figures on the pages, made from the files of bench/results/.

    python -m bench.pages            # writes them
    python -m bench.pages --check    # names the pages whose tables differ from the files

A table stands between `<!-- figures: NAME (bench/pages.py) -->` and `<!-- end of figures -->`, and
says below itself which files it is from, with machine and commit. The text around it is written
by hand, and has no measured figures of its own. After a new measurement: put the file in its place,
and run this."""

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

PAGES = (
    "README.md", "SECURITY.md", "docs/explanation/benchmarks.md",
    "docs/explanation/error-feedback.md", "docs/explanation/robustness.md",
    "docs/explanation/scale.md", "docs/how-to/gpus.md", "docs/how-to/measure.md",
    "docs/how-to/parameter-server.md", "docs/how-to/sites.md",
)  # fmt: skip
_XEON, _EPYC, _H200 = "xeon-avx512-2cores", "epyc-zen4-2cores", "h200"
_MACHINES = {_XEON: "Intel(R) Xeon(R) Processor, 2 cores", _EPYC: "AMD EPYC, 2 cores",
             _H200: "NVIDIA H200"}  # fmt: skip
BLOCK = re.compile(
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
_INTERVAL = "{ratio:.2f} × [{ratio_low:.2f}, {ratio_high:.2f}]"


class Result:
    """A file of bench/results/."""

    def __init__(self, path: str, rows: str = "rows") -> None:
        """rows: the field that has them; a file that is a list is the rows, and of one that is no
        JSON they are the lines."""
        self._path = f"bench/results/{path}"
        text = (harness.ROOT / self._path).read_text()
        found = json.loads(text) if path.endswith(".json") else text.splitlines()
        self._fields = found if isinstance(found, dict) else {rows: found}
        self.rows: list[Any] = self._fields[rows]

    def find(self, **fields: Any) -> Row | None:
        return next((row for row in self.rows if fields.items() <= row.items()), None)

    def value(self, form: str, **fields: Any) -> str:
        """A row's fields in that form; "" if there is no such row."""
        row = self.find(**fields)
        return form.format_map(row) if row else ""

    def source(self) -> tuple[str, str]:
        """Return the file, and its machine and commit; the command is in the file."""
        place = self._fields.get("machine", _MACHINES[self._path.split("/")[2]])
        commit = self._fields.get("commit")  # both may be absent from files of before the harness
        if not isinstance(place, str):
            place = ", ".join(
                [place["processor"], f"{place['cores']} cores", *place.get("gpus", ())]
            )
        return f"`{self._path}`", f"{place}, commit {commit}" if commit else place


def _markdown(head: Iterable[str], body: Iterable[Iterable[str]], *sources: Result) -> str:
    files: dict[str, list[str]] = {}
    for source in sources:
        file, place = source.source()
        files.setdefault(place, []).append(file)
    places = (f"{', '.join(dict.fromkeys(names))} ({place})" for place, names in files.items())
    return f"{harness.markdown(head, body)}\n\nFrom {'; '.join(places)}."


def _gain(points: list[float]) -> str:
    """Mean and standard error of paired differences."""
    mean, error = report.mean_error(points)
    return f"{round(mean, 2) + 0.0:+.2f} ± {error:.2f}"


def _gains(*results: Result) -> dict[tuple[str, str], list[float]]:
    """Points of accuracy by method and task, over the method that a row names (else fp32), of pairs
    of one seed."""
    rows = [row for result in results for row in result.rows]
    accuracy = {(r["task"], r["method"], r["seed"]): r["accuracy"] for r in rows}
    gains: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        base = accuracy.get((row["task"], row.get("against", "fp32"), row["seed"]))
        if base is not None:
            gains.setdefault((row["method"], row["task"]), []).append(row["accuracy"] - base)
    return gains


def _accuracy(*results: Result) -> tuple[dict[str, float], dict[tuple[str, str], str]]:
    """How many times fewer bytes by method, and gains in words by method and task."""
    fewer: dict[str, list[float]] = {}
    for result in results:
        for row in result.rows:
            fewer.setdefault(row["method"], []).append(row["ratio"])
    means = {method: statistics.mean(ratios) for method, ratios in fewer.items()}
    return means, {key: _gain(points) for key, points in _gains(*results).items()}


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


def _ddp_steps(result: Result, ways: Iterable[str], links: Iterable[str] = _DDP_LINKS) -> str:
    form = "{ms:.1f} [{low_ms:.0f}, {high_ms:.0f}], {ratio:.2f} ×"
    body = [
        [_WAYS[way], *(result.value(form, link=link, subject=way) for link in links)]
        for way in ways
    ]
    return _markdown(["", *(_LINKS[link] for link in links)], body, result)


def ddp() -> str:
    return _ddp_steps(Result(f"{_XEON}/ddp.json"), _WAYS)


def ddp_of_four() -> str:
    result = Result(f"{_XEON}/ddp-4.json")
    return _ddp_steps(result, ("plain", "int4", "alone"), ("1gbit", "10gbit"))


def ddp_on_a_gpu() -> str:
    result = Result(f"{_H200}/ddp_step.json")
    return _ddp_steps(result, ("plain", "bf16 hook", "int8", "int4", "adaptive", "alone"))


def never_slower_map() -> str:
    """Counts the cells that are within 5 % of the best codec, and those of the others that had
    taken it."""
    files = {_XEON: ("map", "map-fsdp2", "map-fsdp2-long", "map-more", "map-long"),
             _EPYC: ("map-2-1gbit", "map-2-10gbit", "map-2-none")}  # fmt: skip
    sources, body = [], []
    for place, names in files.items():
        results = [Result(f"{place}/{name}.json") for name in names]
        cells = never_slower.cells_of(result.rows for result in results)
        ratios = [cell["ratio"] for cell in cells]
        far = [cell for cell in cells if cell["over_best"] < never_slower.NEAR_BEST]
        figures = [min(ratios), statistics.median(ratios), max(ratios)]
        kinds = " and ".join(dict.fromkeys(cell["kind"].upper() for cell in cells))
        worlds = ", ".join(str(n) for n in sorted({cell["world"] for cell in cells}))
        widths = ", ".join(str(n) for n in sorted({cell["width"] for cell in cells}))
        body.append([
            kinds, worlds, widths, str(len(cells)), *(f"{figure:.2f} ×" for figure in figures),
            str(sum(ratio < 1 for ratio in ratios)), str(len(cells) - len(far)),
            str(sum(cell.get("chosen") == cell["best"] for cell in far)),
        ])  # fmt: skip
        sources += results
    head = ["step", "ranks", "widths", "cells", "over the uncompressed step: least", "median",
            "most", "slower", "within 5 % of the best codec",
            "not, though auto took that codec"]  # fmt: skip
    return _markdown(head, body, *sources)


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
            line.append(result.value(_INTERVAL, **{key: value}, subject=way))
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
    results = [Result(f"{place}/accuracy/drift/drift.json") for place in (_H200, _XEON)]
    names = {"gpt AdamW": "GPT, AdamW", "charlm": "LSTM, SGD"}
    body = [
        [names[row["task"]], row["method"], str(row["seeds"]),
         f"{row['drift_percent']:+.2f} ± {row['standard_error']:.2f} %"]
        for result in results for row in result.rows
    ]  # fmt: skip
    return _markdown(["model", "codec", "seeds", "training loss over fp32's"], body, *results)


def precision() -> str:
    result = Result(f"{_EPYC}/ratio/ratio.json")
    sources = {"mlp": "MLP", "cnn": "CNN", "charlm": "LSTM", "gpt AdamW": "GPT"}
    body = []
    for codec in ("int8", "int4", "adaptive:bits=4", "adaptive:bits=2", "adaptive:bits=1"):
        errors = [result.value("{error:.2g}", source=source, codec=codec) for source in sources]
        body.append([codec, result.value("{bits:.2f}", source="mlp", codec=codec), *errors])
    return _markdown(["", "bits sent", *sources.values()], body, result)


def precision_of_means() -> str:
    result = Result(f"{_EPYC}/ratio/ratio.json")
    sources = {"mlp": "MLP", "cnn": "CNN", "charlm": "LSTM", "gpt AdamW": "GPT"}
    body = []
    for codec in ("adaptive:bits=3", "int4", "adaptive:bits=4", "adaptive:bits=5", "int8"):
        for workers in (4, 8):
            key = {"codec": codec, "workers": workers}
            errors = [result.value("{error:.2g}", source=source, **key) for source in sources]
            bits = result.value("{bits:.2f}", source="mlp", **key)
            body.append([codec, str(workers), bits, *errors])
    return _markdown(["", "workers", "bits sent", *sources.values()], body, result)


def rates_by_method() -> str:
    files = [Result(f"{_EPYC}/accuracy/{name}/accuracy.json")
             for name in ("mlp", "cnn", "cnn-warm-up", "full")]  # fmt: skip
    tasks = {"mlp": "MLP", "cnn": "CNN", "cnn warm-up": "CNN, warm-up", "charlm": "LSTM",
             "charlm AdamW": "LSTM, AdamW"}  # fmt: skip
    gains: dict[tuple[str, str], list[float]] = {}
    for file in reversed(files):  # `full` has the MLP and the CNN with fewer seeds, too
        gains |= _gains(file)
    methods = dict.fromkeys(row["method"] for row in files[0].rows if row["method"] != "fp32")
    body = [
        [method, *(_gain(gains[method, task]) if (method, task) in gains else "" for task in tasks)]
        for method in methods
    ]
    return _markdown(["codec", *tasks.values()], body, *files)


def one_word_accuracy() -> str:
    result = Result(f"{_EPYC}/accuracy/one_word.json")
    form = ("{program}", "{mean_0:.2f}", "{mean_1:.2f}", "{mean_2:.2f}",
            "{difference:+.2f} ± {standard_error:.2f}", "{same_bits} of {seeds}")  # fmt: skip
    body = [[cell.format_map(row) for cell in form] for row in result.rows]
    head = ["program", "`gloo`", "`compress()`", "`thinwire`", "backend minus `compress()`",
            "same bits"]  # fmt: skip
    return _markdown(head, body, result)


def order_of_layers() -> str:
    results = {"none": Result(f"{_EPYC}/priority.json")}
    results |= {f"{ms} ms": Result(f"{_XEON}/priority-{ms}ms.json") for ms in (5, 15)}
    orders = {"fifo": "fifo", "p3": "p3, announced", "p3 planned": "p3, predicted",
              "alone": "computing alone"}  # fmt: skip
    form = "{step_ms:.0f} ms, {over_fifo:.2f} ×"
    body = [
        [name, *(result.value(form, policy=policy) for result in results.values())]
        for policy, name in orders.items()
    ]
    return _markdown(["latency, one way", *results], body, *results.values())


def p3_or_fsdp2() -> str:
    result = Result(f"{_EPYC}/overlap.json")
    names = {"p3": "p3", "fsdp2": "FSDP2", "alone": "computing alone"}
    form = ("{ms:.0f} [{low_ms:.0f}, {high_ms:.0f}]", _INTERVAL)
    body = [[name, *(result.value(cell, subject=subject) for cell in form)]
            for subject, name in names.items()]  # fmt: skip
    return _markdown(["", "ms a step", "over p3"], body, result)


def kernels() -> str:
    """adaptive is in chunks, which an exchange plans side by side."""
    result = Result(f"{_H200}/kernels.json", "benchmarks")
    codecs = ("int8", "int4", "onebit", "topk")
    names = (("encode, with feedback", "encode_ef", "encode_chunks"),
             ("decode", "decode", "decode_chunks"), ("decode, add", "decode_add", ""))  # fmt: skip
    form = "{ratio_to_twin:.2f} × ({terabytes_per_second:.2f})"
    body = [
        [what, *(result.value(form, name=f"{of_one}/{codec}/{512 << 20}") for codec in codecs),
         result.value(form, name=f"{of_chunks}/adaptive/{4 << 20}")]
        for what, of_one, of_chunks in names
    ]  # fmt: skip
    return _markdown(["", *codecs, "adaptive"], body, result)


def between_sites() -> str:
    result = Result(f"{_XEON}/sites.json")
    theirs = {"torchft fp32", "hivemind fp16", "flwr FedAvg fp32"}
    base, body = result.find(subject="torchft fp32"), []
    for row in result.rows:
        name, formula = row["subject"], row["formula_bytes"]
        body.append([
            name.replace("flwr", "Flower") if name in theirs else f"thinwire {name}",
            "{seconds:.3f} [{fastest:.3f}, {slowest:.3f}]".format_map(row),
            f"{base['seconds'] / row['seconds']:.1f} ×", f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['sent_bytes'] / formula:.3f}" if formula else "",
        ])  # fmt: skip
    head = ["", "seconds a round [least, most]", "over torchft", "sent, MB", "of the formula"]
    return _markdown(head, body, result)


def loss_between_sites() -> str:
    result = Result(f"{_EPYC}/sites_loss.json")
    base = result.rows[0]["seconds_to_target"]
    body = [
        [row["subject"], f"{row['seconds_to_target']:.1f}",
         f"{base / row['seconds_to_target']:.1f} ×"] for row in result.rows
    ]  # fmt: skip
    return _markdown(["", "seconds to the loss", "over DDP"], body, result)


def accuracy_between_sites() -> str:
    results = [Result(f"{_EPYC}/accuracy/{name}/accuracy.json") for name in ("sites", "sites-h8")]
    fewer, gains = _accuracy(*results)
    against = {row["method"]: row.get("against") for result in results for row in result.rows}
    body = [
        [method, f"{fewer[method]:.0f} ×", gains[method, "mlp"], "DDP" if base == "fp32" else base]
        for method, base in against.items() if base
    ]  # fmt: skip
    return _markdown(["method", "fewer bytes than DDP", "points", "over"], body, *results)


def fedavg() -> str:
    result = Result(f"{_XEON}/accuracy/fedavg/accuracy.json")
    _, gains = _accuracy(result)
    body = [[name.removeprefix("FedAvg "),
             *(gains[name, f"mlp Dirichlet {alpha}"] for alpha in (0.5, 0.1))]
            for name in ("FedAvg int4", "FedAvg adaptive 2")]  # fmt: skip
    return _markdown(["codec", "Dirichlet 0.5", "Dirichlet 0.1"], body, result)


def poisoned() -> str:
    results = [Result(f"{_XEON}/accuracy/{name}/accuracy.json")
               for name in ("poison", "poison-dirichlet")]  # fmt: skip
    names = {"sign": "its update, turned round and ten times as long",
             "noise": "noise, as long",
             "little": "a little is enough (arXiv 1902.06156)"}  # fmt: skip
    _, gains = _accuracy(*results)
    rows = {f"centered_clip {attack}": f"`centered_clip`, {what}" for attack, what in names.items()}
    rows["mean absent"] = "the mean of the other four alone"
    body = [[what, *(gains[method, task] for task in ("mlp", "mlp Dirichlet 0.5"))]
            for method, what in rows.items()]  # fmt: skip
    return _markdown(["", "equal splits", "Dirichlet 0.5"], body, *results)


def soak() -> str:
    result = Result(f"{_XEON}/sites_soak.json", "runs")

    def most(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else ""

    body = [
        [row["over"], "{killed}, {stopped}, {joined}".format_map(row), str(row["rounds"]),
         f"{row['round_s']:.2f}", most(row["kill_to_commit_s"]), most(row["stop_to_commit_s"]),
         most(row["with_a_stop_s"]), f"{row['growth_mb']:+.1f}", row["load"]]
        for row in result.rows
    ]  # fmt: skip
    head = ["members meet over", "killed, stopped, joined", "rounds", "a round, s",
            "kill to next commit: median, most, s", "the same of a stop",
            "the same of several at once", "growth, MB", "load"]  # fmt: skip
    return _markdown(head, body, result)


def leaks() -> str:
    result = Result(f"{_EPYC}/sites_leak.json")
    steps = (1, 4, 32)
    form = "{psnr_db} ({above_guess:.0%})"
    body = [[codec, *(result.value(form, codec=codec, local_steps=n) for n in steps)]
            for codec in dict.fromkeys(row["codec"] for row in result.rows)]  # fmt: skip
    guess = (result.value("{guess_db}", codec="fp32", local_steps=n) for n in steps)
    body.append(["nothing: the mean image of the class", *guess])
    head = ["what is sent", *(f"{n} local step{'s' * (n > 1)}" for n in steps)]
    return _markdown(head, body, result)


def store_speed() -> str:
    result = Result(f"{_EPYC}/store-formula.json")
    places = dict.fromkeys((r["workers"], r["servers"], r["server_link"]) for r in result.rows)
    body = []
    for workers, servers, link in places:
        key = {"workers": workers, "servers": servers, "server_link": link}
        apart = "" if link == "200mbit" else f" with a link of {_LINKS[link]}"
        cells = [result.value(f"{_INTERVAL} ({{formula:.2f}})", codec=codec, **key)
                 for codec in ("fp32", "int4")]  # fmt: skip
        body.append([f"{workers}, {servers}{apart}", *cells])
    return _markdown(["workers, servers", "fp32", "int4"], body, result)


def store_stragglers() -> str:
    results = [Result(f"{_EPYC}/store-{name}.json") for name in ("members", "simulated")]
    ways = {"ssp": "`dist_ssp:staleness=2`", "async": "`dist_async`"}
    body = [
        [what, *(result.value("{ratio:.2f} ×", what=what, subject=way)
                 for way in ways for result in results)]
        for what in dict.fromkeys(r["what"] for r in results[0].rows if "what" in r)
    ]  # fmt: skip
    head = [f"{name}{also}" for name in ways.values() for also in ("", ", simulated")]
    return _markdown(["workers", *head], body, *results)


def store_orders() -> str:
    measured, simulated = (Result(f"{_EPYC}/store-{name}.json") for name in ("order", "simulated"))
    names = {"p3 int4": "P3, int4", "fifo int4": "fifo, int4", "mxnet int4": "MXNet's, int4",
             "fifo fp32": "fifo, fp32", "alone": "computing alone"}  # fmt: skip
    body = [
        [name, measured.value("{ms:.0f} [{low_ms:.0f}, {high_ms:.0f}]", subject=subject),
         simulated.value("{ms:.0f}", subject=subject)]
        for subject, name in names.items()
    ]  # fmt: skip
    return _markdown(["order", "ms a step", "simulated, ms"], body, measured, simulated)


def store_kills() -> str:
    result = Result(f"{_EPYC}/store-members.json")
    words = {
        ("sync", "worker"): "`dist_sync`, a worker: ms to the others' errors",
        ("sync", "server"): "`dist_sync`, the server: ms to the workers' errors",
        ("async", "worker"): "`dist_async`, a worker: the others' rate after over before",
        ("ssp", "worker"): "`dist_ssp`, a worker: the same",
        ("sync, journal", "server"): "the server, with a journal: seconds until it is back",
    }
    form = ("{kills}", "{median:.3g}", "{low:.3g} to {high:.3g}")
    body = [[what, *(result.value(cell, mode=mode, victim=victim) for cell in form)]
            for (mode, victim), what in words.items()]  # fmt: skip
    return _markdown(["killed", "kills", "median", "least to most"], body, result)


def store_accuracy() -> str:
    result = Result(f"{_EPYC}/accuracy/store/accuracy.json")
    mean, error = report.mean_error([r["accuracy"] for r in result.rows
                                     if r["method"] == "store sync"])  # fmt: skip
    gains = _gains(result)["store ssp", "mlp"]
    return _markdown(["`sync`, test accuracy", "`ssp:staleness=2` minus it, points"],
                     [[f"{mean:.2f} ± {error:.2f} %", _gain(gains)]], result)  # fmt: skip


def delay() -> str:
    body, sources = [], []
    places = (f"{_XEON}/accuracy/delay/full", f"{_XEON}/accuracy/delay/full-half-rate",
              f"{_XEON}/accuracy/delay/third-half-rate",
              f"{_XEON}/accuracy/delay/third-double-rate", f"{_XEON}/accuracy/delay/third",
              f"{_EPYC}/accuracy/delay")  # fmt: skip
    for place in places:
        result = Result(f"{place}/accuracy.json")
        sources.append(result)
        for (method, task), points in _gains(result).items():
            if method != "fp32":
                row = result.find(method=method, task=task)
                moved = "by `lr * gradient`" if "gradient" in method else "as here"
                body.append([_TASKS[task], f"{row['steps']:,}", f"{row['rate']:g}", moved,
                             str(len(points)), _gain(points)])  # fmt: skip
    order = list(_TASKS.values())
    body.sort(key=lambda line: (order.index(line[0]), line[3], -int(line[1].replace(",", ""))))
    head = ["model", "steps", "rate", "weights moved", "pairs", "points over no delay"]
    return _markdown(head, body, *sources)


def efficiency() -> str:
    result = Result(f"{_EPYC}/scale/scale.json", "simulated")
    panels = dict.fromkeys(row["panel"] for row in result.rows)
    body = [
        [panel, *(result.value("{efficiency:.2f}", panel=panel, bucket=bucket, topology=topology,
                               ranks=1024)
                  for bucket in ("25 MiB", "256 MiB") for topology in ("flat", "grid"))]
        for panel in panels
    ]  # fmt: skip
    return _markdown(["link", "25 MiB: flat", "grid", "256 MiB: flat", "grid"], body, result)


def simulator() -> str:
    result, body = Result(f"{_EPYC}/scale/scale.json", "measured"), []
    held = [row for row in result.rows if row["held_out"]]
    for key, name in (("error", "processor time"), ("wall_error", "the wall's clock")):
        errors = [abs(row[key]) for row in held]
        figures = (statistics.median(errors), max(errors))
        body.append([name, str(len(errors)), *(f"{error:.0%}" for error in figures)])
    return _markdown(["the simulator's error", "runs", "median", "most"], body, result)


def hierarchy() -> str:
    result = Result(f"{_EPYC}/hierarchy-1gbit.json")
    names = {"flat": "flat", "hierarchical": "hierarchical, Gloo inside",
             "hierarchical+auto": "hierarchical, UCX inside"}  # fmt: skip
    flat, body = result.find(codec="int4+flat"), []
    for way, name in names.items():
        row = result.find(codec=f"int4+{way}")
        body.append([name, "{ms:.1f} [{low_ms:.1f}, {high_ms:.1f}]".format_map(row),
                     f"{flat['ms'] / row['ms']:.2f} ×"])  # fmt: skip
    return _markdown(["", "ms", "over flat"], body, result)


def advice() -> str:
    """Each setting's line and its predictions in advise/report.txt. A setting that is calibrated
    has steps of its own in the model, so its errors say nothing."""
    result = Result(f"{_XEON}/advise/report.txt")
    taken, errors, calibrated = [], [], False
    for line in result.rows:
        if found := re.search(r"advice \S+: ([\d.]+) of the best", line):
            taken.append(float(found[1]))
            calibrated = "calibrated" in line
        elif not calibrated and (found := re.search(r"predicted .*\(([-+][\d.]+) %\)", line)):
            errors.append(abs(float(found[1])))
    body = [[str(len(taken)), str(sum(each <= 1.03 for each in taken)), str(len(errors)),
             f"{statistics.median(errors):.1f} %", f"{max(errors):.1f} %"]]  # fmt: skip
    head = ["settings of model, link and ranks",
            "advice at most 3 % slower than the best of twelve", "predicted steps",
            "error: median", "most"]  # fmt: skip
    return _markdown(head, body, result)


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
    "precision-of-means": precision_of_means,
    "rates-by-method": rates_by_method,
    "one-word-accuracy": one_word_accuracy,
    "order-of-layers": order_of_layers,
    "p3-or-fsdp2": p3_or_fsdp2,
    "kernels": kernels,
    "sites": between_sites,
    "sites-loss": loss_between_sites,
    "sites-accuracy": accuracy_between_sites,
    "fedavg": fedavg,
    "poisoned": poisoned,
    "soak": soak,
    "leaks": leaks,
    "store": store_speed,
    "store-stragglers": store_stragglers,
    "store-orders": store_orders,
    "store-kills": store_kills,
    "store-accuracy": store_accuracy,
    "delay": delay,
    "scale": efficiency,
    "simulator": simulator,
    "hierarchy": hierarchy,
    "advice": advice,
}


def filled(text: str) -> str:
    """A page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return BLOCK.sub(table, text)


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
