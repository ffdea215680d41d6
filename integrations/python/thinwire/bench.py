"""`thinwire bench`: measures codecs, link and allreduces of this machine or cluster, without a
model."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import thinwire
import thinwire.torch
from thinwire import _library, encoded_bytes, launch
from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError
from thinwire.torch.agree import from_rank_0, worst_of_ranks
from thinwire.torch.forecast import probe

GLOO = "gloo fp32"
_NUMEL = 1 << 22  # 16 MiB of fp32: more than a core's caches
_ROUNDS = 5
_MOST_KIB = 1 << 22  # of one tensor; each rank has several

Row = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status. Without a launcher, it starts ranks on this
    machine."""
    _check(arguments)
    if not launch.launched():
        return launch.start_here(arguments.ranks)
    with launch.gloo_group():
        result = _measure(arguments)
        if dist.get_rank() == 0:
            print(table(result), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        return 0


def _check(arguments: argparse.Namespace) -> None:
    for spec in arguments.codecs:
        codec_info(spec)
    file = arguments.json
    if file is not None and not file.parent.is_dir():
        raise InvalidArgumentError(f"'{file}': there is no folder '{file.parent}'; make it")
    if file is not None and file.is_dir():
        raise InvalidArgumentError(f"--json is '{file}', which is a folder; name a file")
    if max(arguments.sizes) > _MOST_KIB:
        raise InvalidArgumentError(
            f"--sizes is {arguments.sizes}, expected at most {_MOST_KIB} KiB (4 GiB) each"
        )
    counts = arguments.rounds >= 1 and arguments.ranks >= 2 and min(arguments.sizes) >= 1
    if not (counts and 0 <= arguments.seconds < math.inf):  # also refuses NaN
        raise InvalidArgumentError(
            f"--rounds is {arguments.rounds}, --ranks {arguments.ranks}, --sizes {arguments.sizes} "
            f"and --seconds {arguments.seconds}, expected at least 1 round, 2 ranks and 1 KiB, and "
            "a finite number of seconds from 0 on"
        )


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    specs = arguments.codecs
    link = probe((), torch.device("cpu")).link
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rows = measure_allreduces(
        specs, [size << 10 for size in arguments.sizes], arguments.rounds, arguments.seconds
    )
    # Only rank 0 measures codecs, so that ranks on one machine do not share memory bandwidth.
    alone = measure_codecs(specs) if dist.get_rank() == 0 else []
    dist.barrier()
    return {
        "version": thinwire.version(),
        "simd": thinwire.simd_target(),
        "ranks": dist.get_world_size(),
        "hosts": len(set(hosts)),
        "link": {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s},
        "codecs": alone,
        "allreduces": rows,
    }


def measure_codecs(specs: Sequence[str], numel: int = _NUMEL) -> list[Row]:
    """Measure how fast one thread of this machine encodes (with a residual, as in training) and
    decodes. Return a row for each codec: the median GB/s of fp32, and its fraction of memcpy's,
    measured in the same rounds."""
    library, size = _library.load(), 4 * numel
    x, y = torch.randn(numel), torch.empty(numel)

    def calls_of(spec: str) -> dict[tuple[str, str], Callable[[], Any]]:
        name, bytes_ = spec.encode(), encoded_bytes(spec, numel)
        wire, residual = ctypes.create_string_buffer(max(bytes_, 1)), torch.zeros(numel)

        def encode() -> None:
            kept = residual.data_ptr()
            _library.check(library.tw_encode(name, x.data_ptr(), numel, kept, wire, bytes_, None))

        def decode() -> None:
            _library.check(library.tw_decode(name, wire, bytes_, y.data_ptr(), numel))

        return {(spec, "encode"): encode, (spec, "decode"): decode}

    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("memcpy", "copy"): lambda: ctypes.memmove(y.data_ptr(), x.data_ptr(), size)
    }
    for spec in specs:
        calls |= calls_of(spec)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(_ROUNDS + 1):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    # The first round does not count, because it touches memory for the first time.
    typical = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}
    rows = []
    for spec in specs:
        row: Row = {"codec": spec, "bits": 8 * encoded_bytes(spec, numel) / numel}
        for what in ("encode", "decode"):
            seconds = typical[spec, what]
            row[f"{what}_gb_s"] = 1e-9 * size / seconds
            row[f"{what}_of_memcpy"] = typical["memcpy", "copy"] / seconds
        rows.append(row)
    return rows


def measure_allreduces(
    codecs: Sequence[str], sizes: Sequence[int], least_rounds: int, seconds: float
) -> list[Row]:
    """Measure allreduces. All ranks call it. Return a row for each size (in bytes of fp32) and way:
    milliseconds, and the speedup over Gloo, as the median over the rounds of the ratio within a
    round.

    seconds: the time for the rounds of a size; there are at least `least_rounds`."""
    rows = []
    for size in sizes:
        ways = _ways(codecs, torch.randn(size // 4))
        times: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():  # connects, and allocates residuals
            _time(call)
        end, going = time.perf_counter() + seconds, True
        while going:
            for way, call in ways.items():
                times[way].append(_time(call))
            enough = len(times[GLOO]) >= least_rounds and time.perf_counter() > end
            going = from_rank_0(not enough, None)
        for way, found in times.items():
            ratios = [plain / mine for plain, mine in zip(times[GLOO], found, strict=True)]
            rows.append({
                "way": way, "bytes": size, "rounds": len(found),
                "ms": 1000 * statistics.median(found), "speedup": statistics.median(ratios),
            })  # fmt: skip
    return rows


def _ways(codecs: Sequence[str], tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def ours(codec: str) -> Callable[[], Any]:
        name = f"bench {codec} {tensor.numel()}"
        return lambda: thinwire.torch.all_reduce(tensor, codec=codec, name=name)

    return {GLOO: lambda: dist.all_reduce(tensor)} | {codec: ours(codec) for codec in codecs}


def _time(call: Callable[[], Any]) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return worst_of_ranks([time.perf_counter() - start], None)[0]


def table(result: dict[str, Any]) -> str:
    """Return the figures as text: codecs, link, allreduces."""
    codecs = [["codec", "bits", "encode GB/s", "x memcpy", "decode GB/s", "x memcpy"]]
    codecs += [
        [row["codec"], f"{row['bits']:.2f}", f"{row['encode_gb_s']:.2f}",
         f"{row['encode_of_memcpy']:.2f}", f"{row['decode_gb_s']:.2f}",
         f"{row['decode_of_memcpy']:.2f}"]
        for row in result["codecs"]
    ]  # fmt: skip
    rows = result["allreduces"]
    sizes = [_size(size) for size in dict.fromkeys(row["bytes"] for row in rows)]
    allreduces = [["allreduce, ms (x gloo)", *sizes]]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        allreduces.append([way, *(f"{row['ms']:.2f} ({row['speedup']:.2f})" for row in mine)])
    link = result["link"]
    between = (
        f"link: {8e-9 * link['bytes_per_s']:.2f} Gb/s, latency {1e3 * link['latency_s']:.3f} ms; "
        f"{result['ranks']} ranks on {result['hosts']} hosts"
    )
    after = "`thinwire advise` predicts a training step"
    return "\n\n".join([_grid(codecs), between, _grid(allreduces), after])


def _grid(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _size(size: int) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
