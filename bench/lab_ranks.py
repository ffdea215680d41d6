"""Runs a benchmark's script once more as every rank of a network lab."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from far_wire import open_far_lab

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab

_OPTION = "rank_out"  # set in the ranks: where rank 0 writes what was measured


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(f"--{_OPTION}", type=Path, help=argparse.SUPPRESS)


def is_rank(arguments: argparse.Namespace) -> bool:
    return getattr(arguments, _OPTION) is not None


def be_one(arguments: argparse.Namespace, measure: Callable[[], Any]) -> int:
    """In a rank: measures, on one thread; rank 0's result goes to the parent, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure()
    if dist.get_rank() == 0:
        getattr(arguments, _OPTION).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run(
    script: str,
    world: int,
    link: str,
    options: Mapping[str, Any],
    timeout_s: float,
    delay_ms: float = 0.0,
) -> Any | None:
    """Rank 0's measurements; None, and a line that says why, where links can't be shaped. options:
    of the command line; True for one without a value, None or False to leave it out. delay_ms: one
    way, of a shaped link."""
    refusal = lab.can_shape()
    if link != lab.LOOPBACK and refusal:
        print(f"{link}: skipped, {refusal}")
        return None
    with tempfile.TemporaryDirectory() as folder, open_far_lab(world, link, delay_ms) as place:
        out = Path(folder) / "result.json"
        command = [sys.executable, script, f"--{_OPTION}", str(out)]
        for key, value in options.items():
            if value is True:
                command.append(f"--{key}")
            elif value is not None and value is not False:
                command += [f"--{key}", str(value)]
        place.run(command, timeout_s)
        return json.loads(out.read_text())
