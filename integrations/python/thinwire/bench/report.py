"""The bench's table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.codec import MomentumNeed, codec_info

Result = dict[str, Any]


def _grid(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _size(size: int) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"


def _codecs(rows: Sequence[Result]) -> str:
    lines = [["codec", "bits", "encode GB/s", "x memcpy", "decode GB/s", "x memcpy"]]
    lines += [
        [row["codec"], f"{row['bits']:.2f}", f"{row['encode_gb_s']:.2f}",
         f"{row['encode_of_memcpy']:.2f}", f"{row['decode_gb_s']:.2f}",
         f"{row['decode_of_memcpy']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return _grid(lines)


def _allreduces(rows: Sequence[Result]) -> str:
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    lines = [["allreduce, ms (x gloo)", *map(_size, sizes)]]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        lines.append([way, *(f"{row['ms']:.2f} ({row['speedup']:.2f})" for row in mine)])
    return _grid(lines)


# What a codec does to a bare gradient, where a momentum that the exchange owns keeps it from that.
_WITHOUT_MOMENTUM: dict[MomentumNeed, str] = {
    "required": "training diverges", "advised": "accuracy is lost",
}  # fmt: skip


def _on_momentum(spec: str) -> str:
    """A line about what trains well with the codec alone; empty where it needs nothing else."""
    loss = _WITHOUT_MOMENTUM.get(codec_info(spec).momentum)
    if loss is None:
        return ""
    return (
        f"\n{spec} needs momentum that the exchange owns, else {loss}: "
        f"compress(ddp, codec='{spec}', optimizer=optimizer)"
    )


def advice(result: Result) -> str:
    """What to take, in a line; another one where that takes more than its name."""
    best = result["recommendation"]
    if best["codec"] is None:
        return "do not compress: no codec is faster than Gloo's fp32 between these ranks"
    return (
        f"recommended: codec='{best['codec']}', {best['speedup']:.2f} x Gloo's fp32 at "
        f"{_size(best['bytes'])}; `thinwire advise` says what a training step gains"
        f"{_on_momentum(best['codec'])}"
    )


def table(result: Result) -> str:
    link = result["link"]
    between = (
        f"link: {8e-9 * link['bytes_per_s']:.2f} Gb/s, latency {1e3 * link['latency_s']:.3f} ms; "
        f"{result['ranks']} ranks on {result['hosts']} hosts"
    )
    parts = [_codecs(result["codecs"]), between, _allreduces(result["allreduces"]), advice(result)]
    return "\n\n".join(parts)


def plot(path: Path, result: Result) -> None:
    """Speed-up over Gloo by size, a line for each codec; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for way in dict.fromkeys(row["way"] for row in result["allreduces"]):
        mine = [row for row in result["allreduces"] if row["way"] == way]
        axis.plot([row["bytes"] for row in mine], [row["speedup"] for row in mine], "o-", label=way)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("bytes of fp32")
    axis.set_ylabel("times as fast as Gloo's fp32")
    rate = 8e-9 * result["link"]["bytes_per_s"]
    axis.set_title(f"allreduce between {result['ranks']} ranks, {rate:.2f} Gb/s")
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
