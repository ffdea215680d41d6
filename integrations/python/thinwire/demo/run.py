"""`thinwire demo`: starts the ranks in the lab, and reports."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from thinwire.demo import lab, report

_TIMEOUT_S = 1800.0
_WAYS = "plain bf16 int8 int4 adaptive onebit topk:density=0.01,masking=0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of the report")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--link", default="1gbit", help="rate of each rank's link, or loopback")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images a step and rank")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=_WAYS, help="what to compare; the first is the baseline")


def main(arguments: argparse.Namespace) -> int:
    """The exit status. Without root, it starts over in namespaces where we are, if it may."""
    lab.check_link(arguments.link)
    missing = [name for name in ("tqdm", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return 1
    if arguments.link != lab.LOOPBACK:
        lab.become_root_of_namespaces()
    link = _choose_link(arguments.link)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows_file = arguments.out.resolve() / "rows.json"
    start = time.monotonic()
    with lab.open_lab(arguments.world, link) as place:
        place.run(_command(arguments, rows_file), _TIMEOUT_S)
    rows = json.loads(rows_file.read_text())
    rows_file.unlink()
    report.finish(rows)
    report.write_json(arguments.out / "report.json", link, arguments.world, rows)
    report.plot(arguments.out / "report.png", link, arguments.world, rows)
    print(
        f"\nFashion-MNIST, MLP of 1.9 M parameters, DDP over {arguments.world} ranks, link: {link}"
    )
    print(report.table(rows))
    print(f"\n{time.monotonic() - start:.0f} s; {arguments.out}/report.json and report.png")
    return 0


def _choose_link(wanted: str) -> str:
    if wanted == lab.LOOPBACK:
        return wanted
    refusal = lab.can_shape()
    if not refusal:
        return wanted
    print(f"no {wanted} link here, so the ranks talk over loopback: {refusal}")
    return lab.LOOPBACK


def _command(arguments: argparse.Namespace, rows_file: Path) -> list[str]:
    options = {
        "--ways": arguments.ways,
        "--epochs": arguments.epochs,
        "--batch": arguments.batch,
        "--lr": arguments.lr,
        "--seed": arguments.seed,
        "--rows": rows_file,
    }
    flat = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "thinwire.demo.train", *flat]
