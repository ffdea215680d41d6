"""Starts the ranks of `make demo` in the lab; they print a line of the table for each way."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench import lab
from demo.exchange import WAYS

_TIMEOUT_S = 1800.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder of report.json"
    )
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--link", default="1gbit", help="rate of each rank's link, or loopback")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=96, help="images a step and rank")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=" ".join(WAYS), help="the first is the baseline")
    return parser.parse_args()


def main() -> int:
    """Return the exit status. Without root, run again as root of a user namespace if allowed."""
    arguments = _arguments()
    lab.check_link(arguments.link)
    if arguments.link != lab.LOOPBACK:
        lab.become_root_of_namespaces()
    link = _choose_link(arguments.link)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out.resolve() / "report.json"
    ways = arguments.ways.split()
    print(
        f"{len(ways)} times {arguments.epochs} epoch(s) of Fashion-MNIST: an MLP of 1.9 M "
        f"parameters, DDP over {arguments.world} ranks, link: {link}, seed {arguments.seed}.\n"
        "On two cores the first line comes after less than a minute, and all after two.\n"
    )
    start = time.monotonic()
    with lab.open_lab(arguments.world, link) as place:
        place.run(_command(arguments, report), _TIMEOUT_S)
    rows = json.loads(report.read_text())
    written = {"link": link, "world": arguments.world, "seed": arguments.seed, "rows": rows}
    report.write_text(json.dumps(written, indent=2) + "\n")
    print(
        "\nAfter every way the replicas had equal bits. Accuracy is of one seed; other seeds give\n"
        "other differences, some tenths of a point either way (make accuracy has the spread)."
        f"\n{time.monotonic() - start:.0f} s; figures: {arguments.out}/report.json"
    )
    return 0


def _choose_link(wanted: str) -> str:
    if wanted == lab.LOOPBACK:
        return wanted
    refusal = lab.can_shape()
    if not refusal:
        return wanted
    print(f"no {wanted} link here, so the ranks talk over loopback: {refusal}")
    return lab.LOOPBACK


def _command(arguments: argparse.Namespace, report: Path) -> list[str]:
    options = {
        "--ways": arguments.ways,
        "--epochs": arguments.epochs,
        "--batch": arguments.batch,
        "--lr": arguments.lr,
        "--seed": arguments.seed,
        "--rows": report,
    }
    flat = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "demo.train", *flat]


if __name__ == "__main__":
    sys.exit(main())
