"""One rank of the bench: measures with the others; rank 0 reports."""

from __future__ import annotations

import argparse
import json
import socket
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.bench import allreduce, codecs, report
from thinwire.torch.forecast.probe import probe


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    specs = arguments.codecs.split(",")
    link = probe((), torch.device("cpu")).link
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rows = allreduce.measure(
        specs, [size << 10 for size in arguments.sizes], arguments.rounds, arguments.seconds
    )
    # Alone, so that ranks on one machine do not share its memory's bandwidth.
    alone = codecs.measure(specs) if dist.get_rank() == 0 else []
    dist.barrier()
    return {
        "version": thinwire.version(),
        "simd": thinwire.simd_target(),
        "ranks": dist.get_world_size(),
        "hosts": len(set(hosts)),
        "link": {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s},
        "codecs": alone,
        "allreduces": rows,
        "recommendation": allreduce.recommend(rows),
    }


def main(arguments: argparse.Namespace) -> int:
    """Needs torchrun's variables; rank 0 prints and writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = _measure(arguments)
        if dist.get_rank() == 0:
            print(report.table(result), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(result, indent=2) + "\n")
            if arguments.plot is not None:
                report.plot(arguments.plot, result)
        return 0
    finally:
        dist.destroy_process_group()
