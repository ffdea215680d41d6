"""The measured figures on the pages, made from the files of bench/results/.

    python -m bench.pages    writes those that differ from the files, and names their pages

A table is between `<!-- figures: NAME (bench/pages.py) -->` and `<!-- end of figures -->`, and is
followed by its source files, with machine and commit. A figure in a sentence is between
`<!-- figure: NAME -->` and `<!-- end -->`. All other text is written by hand, and has no measured
figures. After a new measurement put the file in its place, and run this."""

# ruff: noqa: RUF001 - tables have the multiplication sign

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, groupby
from operator import itemgetter

from bench import harness, never_slower
from bench.accuracy.report import summarise
from bench.figures import Column, Fields, Lines, Table, by, each, every, filled, named, own, same
from bench.harness import Row

PAGES = (
    "README.md", "SECURITY.md", "docs/explanation/benchmarks.md",
    "docs/explanation/error-feedback.md", "docs/explanation/robustness.md",
    "docs/explanation/scale.md", "docs/how-to/choose.md", "docs/how-to/gpus.md",
    "docs/how-to/measure.md", "docs/how-to/parameter-server.md", "docs/how-to/sites.md",
)  # fmt: skip
_XEON, _EPYC, _H200 = "xeon-avx512-2cores", "epyc-zen4-2cores", "h200"


# Rows that are computed from those of the files.


def methods(rows: list[Row]) -> Lines:
    return [line for line in every("method")(rows) if line[0] != "fp32"]


def accuracy(rows: list[Row]) -> list[Row]:
    """Return a row for each task and method, with its paired differences."""
    found = summarise(rows)
    subjects = {"fp32": "plain", "bf16": "bf16 hook", "topk 1 %": "topk:density=0.01"}
    for row in found:
        method, against = row["method"], row["against"]
        row["subject"] = subjects.get(method, method)
        row["over"] = "DDP" if against == "fp32" else against
        row["fewer"] = statistics.mean(r["ratio"] for r in rows if r["method"] == method)
    return found


def accuracy_by_file(rows: list[Row]) -> list[Row]:
    """Like accuracy(), with pairs within one file. If several files have a task, the first one
    counts."""
    files = (list(group) for _, group in groupby(rows, itemgetter("file")))
    return [*chain.from_iterable(map(accuracy, files))]


def speeds_and_accuracy(rows: list[Row]) -> list[Row]:
    return rows + accuracy([row for row in rows if "accuracy" in row])


def delays(rows: list[Row]) -> list[Row]:
    found = [row for row in accuracy_by_file(rows) if row["method"] != "fp32"]
    for row in found:
        row["moved"] = "by `lr * gradient`" if "gradient" in row["method"] else "as here"
        row["model"] = _TASKS[row["task"]]
    order = list(_TASKS)
    return sorted(found, key=lambda r: (order.index(r["task"]), r["moved"], -r["steps"]))


def map_counts(rows: list[Row]) -> Iterable[Row]:
    """Yield a row for each machine."""
    for _, group in groupby(rows, lambda row: row["file"].split("/")[0]):
        files = (list(of_file) for _, of_file in groupby(group, itemgetter("file")))
        cells = never_slower.cells(files)
        yield never_slower.counts(cells) | {
            "kinds": " and ".join(dict.fromkeys(cell["kind"].upper() for cell in cells)),
            "worlds": ", ".join(map(str, sorted({cell["world"] for cell in cells}))),
            "widths": ", ".join(map(str, sorted({cell["width"] for cell in cells}))),
        }


def allreduces(rows: list[Row]) -> Iterable[Row]:
    """Add the speed of the limit relative to the baseline, if there is a limit."""
    for row in rows:
        limit = row.get("limit_ms")
        yield row | {"limit": f" ({row['gloo_ms'] / limit:.1f})" if limit else ""}


def kernels(rows: list[Row]) -> Iterable[Row]:
    """Yield the rows. Those of adaptive are in chunks, which an exchange plans together."""
    chunks = {"encode_chunks": "encode_ef", "decode_chunks": "decode"}
    for row in rows:
        op, codec, size = row["name"].split("/")
        if (op in chunks) == (codec == "adaptive"):
            yield row | {"op": chunks.get(op, op), "codec": codec, "MiB": int(size) >> 20}


def site_rounds(rows: list[Row]) -> Iterable[Row]:
    theirs = {"torchft fp32", "hivemind fp16", "flwr FedAvg fp32"}
    base = next(row["seconds"] for row in rows if row["subject"] == "torchft fp32")
    for row in rows:
        name, formula = row["subject"], row["formula_bytes"]
        yield row | {
            "name": name.replace("flwr", "Flower") if name in theirs else f"thinwire {name}",
            "over": base / row["seconds"], "MB": row["sent_bytes"] / 1e6,
            "of_formula": f"{row['sent_bytes'] / formula:.3f}" if formula else "",
        }  # fmt: skip


def over_first(key: str) -> Callable[[list[Row]], Iterable[Row]]:
    return lambda rows: (row | {"over": rows[0][key] / row[key]} for row in rows)


def soaks(rows: list[Row]) -> Iterable[Row]:
    for row in rows:
        yield row | {
            key: f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else ""
            for key, seconds in row.items()
            if key in ("kill_to_commit_s", "stop_to_commit_s", "with_a_stop_s")
        }


def leaks(rows: list[Row]) -> Iterable[Row]:
    for row in rows:
        yield row | {"shown": "{psnr_db} ({above_guess:.0%})".format_map(row)}
        yield {"codec": _GUESS, "local_steps": row["local_steps"], "shown": row["guess_db"]}


def store_places(rows: list[Row]) -> Iterable[Row]:
    for row in rows:
        link = row["server_link"]
        apart = "" if link == "200mbit" else f" with a link of {_LINKS[link]}"
        yield row | {"place": f"{row['workers']}, {row['servers']}{apart}"}


def simulator_errors(rows: list[Row]) -> Iterable[Row]:
    for key, name in (("error", "processor time"), ("wall_error", "the wall's clock")):
        errors = [abs(row[key]) for row in rows if row["held_out"]]
        middle = statistics.median(errors)
        yield {"what": name, "runs": len(errors), "median": middle, "most": max(errors)}


def advice(rows: list[Row]) -> Iterable[Row]:
    """Yield one row that sums up the settings and predictions in advise/report.txt. It leaves out
    the errors of calibrated settings, because their steps were used to fit the model."""
    taken, errors, calibrated = [], [], False
    for line in (row["line"] for row in rows):
        if found := re.search(r"advice \S+: ([\d.]+) of the best", line):
            taken.append(float(found[1]))
            calibrated = "calibrated" in line
        elif not calibrated and (found := re.search(r"predicted .*\(([-+][\d.]+) %\)", line)):
            errors.append(abs(float(found[1])))
    yield {
        "settings": len(taken), "near": sum(one <= 1.03 for one in taken), "steps": len(errors),
        "median": statistics.median(errors), "most": max(errors),
    }  # fmt: skip


# The tables.

_LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "10gbit": "10 Gb/s",
          "loopback": "unshaped"}  # fmt: skip
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
_TASKS = {"mlp": "MLP", "cnn": "CNN", "charlm": "character LSTM"}
_DRIFTING = {"gpt AdamW": "GPT, AdamW", "charlm": "LSTM, SGD"}
_SOURCES = {"mlp": "MLP", "cnn": "CNN", "charlm": "LSTM", "gpt AdamW": "GPT"}
_RATES = {"mlp": "MLP", "cnn": "CNN", "cnn warm-up": "CNN, warm-up", "charlm": "LSTM",
          "charlm AdamW": "LSTM, AdamW"}  # fmt: skip
_FRAMEWORKS = {
    "DDP": "DDP", "FSDP2": "FSDP2",
    "FSDP2, reshard_after_forward=False": "FSDP2, `reshard_after_forward=False`",
    "FSDP2, gather=": "FSDP2, gathers in int4 too",
    **same("Lightning", "Accelerate", "Hugging Face's Trainer"),
    "Horovod's API": "Horovod's API, against its `Compression.none`",
}  # fmt: skip
_ATTACKS = {
    "centered_clip sign": "`centered_clip`, its update, turned round and ten times as long",
    "centered_clip noise": "`centered_clip`, noise, as long",
    "centered_clip little": "`centered_clip`, a little is enough (arXiv 1902.06156)",
    "mean absent": "the mean of the other four alone",
}
_GUESS = "nothing: the mean image of the class"
_ERRORS = [("bits sent", "{bits:.2f}", {"source": "mlp"}), *by("{error:.2g}", "source", _SOURCES)]
_INTERVAL = "{ratio:.2f} × [{ratio_low:.2f}, {ratio_high:.2f}]"
_STEP = "{ms:.0f} [{low_ms:.0f}, {high_ms:.0f}]"


def _links(*links: str) -> dict[str, str]:
    return {link: _LINKS[link] for link in links}


def _ways(*ways: str) -> list[tuple[str, Fields]]:
    return named("subject", {way: _WAYS[way] for way in ways})


_DDP_STEP = "{ms:.1f} [{low_ms:.0f}, {high_ms:.0f}], {ratio:.2f} ×"


def _ddp_steps(file: str, ways: Iterable[str], links: Mapping[str, str]) -> Table:
    return Table([file], "", _ways(*ways), by(_DDP_STEP, "link", links))


def _over_own(file: str, key: str, lines: Mapping[str, str], *ways: str) -> Table:
    shown: list[Column] = [("its own, ms", "{ms:.1f}", {"subject": "plain"})]
    for way in ways:
        fields = {"subject": way}
        shown += [(f"{way}, ms", "{ms:.1f}", fields), ("speed-up", _INTERVAL, fields)]
    return Table([file], key, named(key, lines), shown)


_DDP_LINKS = _links("1gbit", "10gbit", "loopback")
_MODES = {"ssp": "`dist_ssp:staleness=2`", "async": "`dist_async`"}
_STRAGGLING = {f"{_EPYC}/store-members.json": "", f"{_EPYC}/store-simulated.json": ", simulated"}

TABLES = {
    "speed-and-accuracy": Table(
        [f"{_XEON}/ddp.json", f"{_XEON}/accuracy/accuracy.json"], "codec",
        _ways("plain", "bf16 hook", "int8", "int4", "onebit", "topk:density=0.01"),
        [("fewer bytes", "{fewer:.1f} ×", {"task": "mlp"}),
         *by("{ratio:.2f} ×", "link", _DDP_LINKS),
         *by("{gain}", "task", _TASKS | {"mlp": "accuracy: MLP"})],
        speeds_and_accuracy,
    ),
    "ddp": _ddp_steps(f"{_XEON}/ddp.json", _WAYS, _DDP_LINKS),
    "ddp-of-four": _ddp_steps(
        f"{_XEON}/ddp-4.json", ("plain", "int4", "alone"), _links("1gbit", "10gbit")
    ),
    "ddp-with-cores": Table(
        [f"{_H200}/ddp-cpu.json"], "", _ways("plain", "int4", "alone"),
        [(f"{world} ranks, {name}", _DDP_STEP, {"link": link, "world": world})
         for world in (2, 4) for link, name in _links("1gbit", "10gbit").items()],
    ),
    "ddp-on-a-gpu": _ddp_steps(
        f"{_H200}/ddp_step.json", ("plain", "bf16 hook", "int8", "int4", "adaptive", "alone"),
        _DDP_LINKS,
    ),
    "map": Table(
        [*(f"{_XEON}/map{part}.json" for part in ("", "-fsdp2", "-fsdp2-long", "-more", "-long")),
         f"{_H200}/map.json",
         f"{_EPYC}/map-2.json",
         *(f"{_EPYC}/map-8-fsdp2{part}.json" for part in ("", "-1024", "-2048"))],
        "step", each("{kinds}"),
        own("ranks = {worlds} | widths = {widths} | cells = {cells} | "
            "over the uncompressed step: least = {least:.2f} × | median = {median:.2f} × | "
            "most = {most:.2f} × | slower = {slower} | "
            "within 5 % of the best codec = {near} | "
            "not, though auto took that codec = {taken}"),
        map_counts,
    ),
    "allreduce": Table(
        [f"{_XEON}/allreduce.json"], "link",
        named("link", _links("1gbit", "5gbit", "10gbit", "loopback")),
        by("{ratio:.2f}{limit}", "subject",
           same("fp32", "bf16", "int8", "int4") | {"onebit:down=onebit": "onebit both ways"}
           | same("adaptive"), bytes=16 << 20),
        allreduces,
    ),
    "latency": Table(
        [f"{_XEON}/latency.json"], "ranks | bytes",
        [(f"{world} | {size}", {"world": world, "bytes": size, "subject": "fp32"})
         for world in (2, 4, 8) for size in (64, 4096)],
        own("µs = {us:.0f} | over Gloo's = {ratio:.1f} ×"),
    ),
    "frameworks": _over_own(f"{_XEON}/frameworks.json", "framework", _FRAMEWORKS, "int4"),
    "gathers": _over_own(
        f"{_EPYC}/fsdp2-gather.json", "link", _links("100mbit", "1gbit", "10gbit"), "int4",
        "adaptive",
    ),
    "accuracy": Table(
        [f"{_XEON}/accuracy/accuracy.json"], "codec",
        methods,
        [("fewer bytes", "{fewer:.1f} ×", {}), *by("{gain}", "task", _TASKS)], accuracy,
    ),
    "own-rates": Table(
        [f"{_H200}/accuracy/gpt/accuracy.json"], "optimizer",
        named("task", {"gpt AdamW": "AdamW",
                       "gpt Muon": "Muon, AdamW for what is no matrix inside"}),
        [("fp32, test accuracy", "{accuracy} %", {"method": "fp32"}),
         *by("{gain}", "method", same("int4", "adaptive 2", "adaptive 2 after int8"))],
        accuracy,
    ),
    "drift": Table(
        [f"{place}/accuracy/drift/drift.json" for place in (_H200, _XEON)]
        + [f"{place}/accuracy/drift-gradients/drift.json" for place in (_H200, _XEON, _EPYC)]
        + [f"{_EPYC}/accuracy/drift-gpt/drift.json"],
        "model | codec | seeds",
        each("{model} | {method} | {seeds}"),
        own("training loss over fp32's = {drift_percent:+.2f} ± {standard_error:.2f} %"),
        lambda rows: (row | {"model": _DRIFTING[row["task"]]} for row in rows),
    ),
    "precision": Table(
        [f"{_EPYC}/ratio/ratio.json"], "",
        named("codec", same("int8", "int4", *(f"adaptive:bits={bits}" for bits in (4, 2, 1)))),
        _ERRORS,
    ),
    "precision-of-means": Table(
        [f"{_EPYC}/ratio/ratio.json"], " | workers",
        [(f"{codec} | {workers}", {"codec": codec, "workers": workers})
         for codec in ("adaptive:bits=3", "int4", "adaptive:bits=4", "adaptive:bits=5", "int8")
         for workers in (4, 8)],
        _ERRORS,
    ),
    "rates-by-method": Table(
        [f"{_EPYC}/accuracy/{name}/accuracy.json"
         for name in ("mlp", "cnn", "cnn-warm-up", "full")],
        "codec", methods, by("{gain}", "task", _RATES), accuracy_by_file,
    ),
    "one-word-accuracy": Table(
        [f"{_EPYC}/accuracy/one_word.json"], "program", each("{program}"),
        own("`gloo` = {mean_0:.2f} | `compress()` = {mean_1:.2f} | "
            "`thinwire` = {mean_2:.2f} | "
            "backend minus `compress()` = {difference:+.2f} ± {standard_error:.2f} | "
            "same bits = {same_bits} of {seeds}"),
    ),
    "order-of-layers": Table(
        [f"{_EPYC}/priority.json"], "latency, one way",
        named("subject", {"fifo": "fifo", "p3": "p3, announced", "p3 planned": "p3, predicted",
                          "fsdp2": "FSDP2", "alone": "computing alone"}),
        by("{ms:.0f} ms, {ratio:.2f} ×", "delay_ms", {0.0: "none", 5.0: "5 ms", 15.0: "15 ms"}),
    ),
    "kernels": Table(
        [f"{_H200}/kernels.json"], "",
        named("op", {"encode_ef": "encode, with feedback", "decode": "decode",
                     "decode_add": "decode, add"}),
        [(codec, "{ratio_to_twin:.2f} × ({terabytes_per_second:.2f})",
          {"codec": codec, "MiB": 4 if codec == "adaptive" else 512})
         for codec in ("int8", "int4", "onebit", "topk", "adaptive")],
        kernels, "benchmarks",
    ),
    "sites": Table(
        [f"{_XEON}/sites.json"], "", each("{name}"),
        own("seconds a round [least, most] = {seconds:.3f} [{fastest:.3f}, {slowest:.3f}] | "
            "over torchft = {over:.1f} × | sent, MB = {MB:.2f} | of the formula = {of_formula}"),
        site_rounds,
    ),
    "sites-loss": Table(
        [f"{_EPYC}/sites_loss.json"], "", each("{subject}"),
        own("seconds to the loss = {seconds_to_target:.1f} | over DDP = {over:.1f} ×"),
        over_first("seconds_to_target"),
    ),
    "sites-accuracy": Table(
        [f"{_EPYC}/accuracy/{name}/accuracy.json" for name in ("sites", "sites-h8")], "method",
        methods,
        own("fewer bytes than DDP = {fewer:.0f} × | points = {gain} | over = {over}"),
        accuracy,
    ),
    "fedavg": Table(
        [f"{_XEON}/accuracy/fedavg/accuracy.json"], "codec",
        named("method", {f"FedAvg {codec}": codec for codec in ("int4", "adaptive 2")}),
        by("{gain}", "task", {f"mlp Dirichlet {a}": f"Dirichlet {a}" for a in (0.5, 0.1)}),
        accuracy,
    ),
    "poisoned": Table(
        [f"{_XEON}/accuracy/{name}/accuracy.json" for name in ("poison", "poison-dirichlet")], "",
        named("method", _ATTACKS),
        by("{gain}", "task", {"mlp": "equal splits", "mlp Dirichlet 0.5": "Dirichlet 0.5"}),
        accuracy,
    ),
    "soak": Table(
        [f"{_XEON}/sites_soak.json"], "members meet over", each("{over}"),
        own("killed, stopped, joined = {killed}, {stopped}, {joined} | rounds = {rounds} | "
            "a round, s = {round_s:.2f} | "
            "kill to next commit: median, most, s = {kill_to_commit_s} | "
            "the same of a stop = {stop_to_commit_s} | "
            "the same of several at once = {with_a_stop_s} | growth, MB = {growth_mb:+.1f} | "
            "load = {load}"),
        soaks, "runs",
    ),
    "leaks": Table(
        [f"{_EPYC}/sites_leak.json"], "what is sent",
        lambda rows: sorted(every("codec")(rows), key=lambda line: line[0] == _GUESS),
        by("{shown}", "local_steps", {1: "1 local step", 4: "4 local steps", 32: "32 local steps"}),
        leaks,
    ),
    "store": Table(
        [f"{_EPYC}/store-formula.json"], "workers, servers",
        every("place"),
        by(f"{_INTERVAL} ({{formula:.2f}})", "codec", same("fp32", "int4")), store_places,
    ),
    "store-stragglers": Table(
        list(_STRAGGLING), "workers",
        every("what", file=f"{_EPYC}/store-members.json"),
        [(name + also, "{ratio:.2f} ×", {"subject": way, "file": file})
         for way, name in _MODES.items() for file, also in _STRAGGLING.items()],
    ),
    "store-orders": Table(
        [f"{_EPYC}/store-{name}.json" for name in ("order", "simulated")], "order",
        named("subject", {"p3 int4": "P3, int4", "fifo int4": "fifo, int4",
                          "mxnet int4": "MXNet's, int4", "fifo fp32": "fifo, fp32",
                          "alone": "computing alone"}),
        [("ms a step", _STEP, {"file": f"{_EPYC}/store-order.json"}),
         ("simulated, ms", "{ms:.0f}", {"file": f"{_EPYC}/store-simulated.json"})],
    ),
    "store-kills": Table(
        [f"{_EPYC}/store-members.json"], "killed",
        [(name, {"mode": mode, "victim": victim}) for mode, victim, name in (
            ("sync", "worker", "`dist_sync`, a worker: ms to the others' errors"),
            ("sync", "server", "`dist_sync`, the server: ms to the workers' errors"),
            ("async", "worker", "`dist_async`, a worker: the others' rate after over before"),
            ("ssp", "worker", "`dist_ssp`, a worker: the same"),
            ("sync, journal", "server", "the server, with a journal: seconds until it is back"))],
        own("kills = {kills} | median = {median:.3g} | least to most = {low:.3g} to {high:.3g}"),
    ),
    "store-accuracy": Table(
        [f"{_EPYC}/accuracy/store/accuracy.json"], "`sync`, test accuracy",
        lambda rows: [(f"{row['accuracy']} %", {"task": "mlp"}) for row in rows
                      if row["method"] == "store sync"],
        [("`ssp:staleness=2` minus it, points", "{gain}", {"method": "store ssp"})], accuracy,
    ),
    "delay": Table(
        [*(f"{_XEON}/accuracy/delay/{name}/accuracy.json" for name in (
            "full", "full-cnn-lstm", "full-half-rate", "third-half-rate", "third-double-rate",
            "third")),
         f"{_EPYC}/accuracy/delay/accuracy.json"],
        "model", each("{model}"),
        own("steps = {steps:,} | rate = {rate:g} | weights moved = {moved} | "
            "pairs = {pairs} | points over no delay = {gain}"),
        delays,
    ),
    "scale": Table(
        [f"{_EPYC}/scale/scale.json"], "link",
        every("panel"),
        [(f"{bucket}: flat" if way == "flat" else way, "{efficiency:.2f}",
          {"bucket": bucket, "topology": way, "ranks": 1024})
         for bucket in ("25 MiB", "256 MiB") for way in ("flat", "grid")],
        field="simulated",
    ),
    "simulator": Table(
        [f"{_EPYC}/scale/scale.json"], "the simulator's error", each("{what}"),
        own("runs = {runs} | median = {median:.0%} | most = {most:.0%}"),
        simulator_errors, "measured",
    ),
    "hierarchy": Table(
        [f"{_EPYC}/hierarchy-1gbit.json"], "",
        named("codec", {"int4+flat": "flat", "int4+hierarchical": "hierarchical, Gloo inside",
                        "int4+hierarchical+auto": "hierarchical, UCX inside"}),
        own("ms = {ms:.1f} [{low_ms:.1f}, {high_ms:.1f}] | over flat = {over:.2f} ×"),
        over_first("ms"),
    ),
    "advice": Table(
        [f"{_XEON}/advise/report.txt"], "settings of model, link and ranks", each("{settings}"),
        own("advice at most 3 % slower than the best of twelve = {near} | "
            "predicted steps = {steps} | error: median = {median:.1f} % | most = {most:.1f} %"),
        advice,
    ),
}  # fmt: skip

# Figures of sentences, from the rows of a table.

_DRIFT = "{drift_percent:+.2f} ± {standard_error:.2f} %"

MADE: Mapping[str, Callable[[], str]] = TABLES | {
    f"drift of {method}": TABLES["drift"].figure(_DRIFT, task="gpt AdamW", method=method)
    for method in ("int4", "int4 after int8", "adaptive 2", "adaptive 2 after int8")
}


def main() -> int:
    for page in PAGES:
        path = harness.ROOT / page
        text = path.read_text()
        if (new := filled(text, MADE)) != text:
            path.write_text(new)
            print(f"{page}: written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
