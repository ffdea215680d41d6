"""The command line: `thinwire doctor`, `demo`, `bench`, `advise`, `run` and `trace`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire import errors


def _trace(arguments: argparse.Namespace) -> int:
    from thinwire import trace

    files = [file for path in arguments.files for file in trace.files_of(path) or [path]]
    merged = trace.merge(files)
    trace.write(merged, arguments.out)
    print(
        f"{arguments.out}: {len(merged.offsets)} ranks, {len(merged.events)} events, clocks equal "
        f"to within {merged.uncertainty:.0f} microseconds; open it in ui.perfetto.dev"
    )
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    from thinwire.torch.advise import command

    return command.main(arguments.make, arguments.codecs)


def _demo(arguments: argparse.Namespace) -> int:
    from thinwire.demo import run

    return run.main(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from thinwire.bench import run

    return run.main(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from thinwire.launch import run

    return run.main(arguments)


def _doctor(_arguments: argparse.Namespace) -> int:
    from thinwire import doctor

    return doctor.main()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="thinwire", description="Gradient compression for DDP.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is here, what is missing, what to do")
    doctor.set_defaults(run=_doctor, needs_torch=False)
    demo = commands.add_parser("demo", help="train a model, plain and compressed, and compare")
    from thinwire.demo import run

    run.add_arguments(demo)
    demo.set_defaults(run=_demo, needs_torch=True)
    bench = commands.add_parser(
        "bench",
        help="codecs, link and allreduces of this machine, or under a launcher of a cluster",
    )
    from thinwire.bench import run as bench_run

    bench_run.add_arguments(bench)
    bench.set_defaults(run=_bench, needs_torch=True)
    advise = commands.add_parser(
        "advise", help="which codec and policy suit this model on this link; run it under torchrun"
    )
    advise.add_argument(
        "make", metavar="MODULE:FUNCTION",
        help="a function that returns (model, optimizer, run); run() does a forward and backward",
    )  # fmt: skip
    advise.add_argument("--codecs", help="to choose from, the most accurate first: fp32,bf16,...")
    advise.set_defaults(run=_advise, needs_torch=True)
    starter = commands.add_parser("run", help="start all ranks of a program, here or over ssh")
    from thinwire.launch import run as launch_run

    launch_run.add_arguments(starter)
    starter.set_defaults(run=_run, needs_torch=False)
    trace = commands.add_parser("trace", help="merge the traces of all ranks on one clock")
    trace.add_argument("files", nargs="+", type=Path, help="the name that was traced to, or files")
    trace.add_argument("--out", type=Path, default=Path("trace.json"))
    trace.set_defaults(run=_trace, needs_torch=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if something needed is missing."""
    arguments = _parser().parse_args(argv)
    if arguments.needs_torch and importlib.util.find_spec("torch") is None:
        print(f"{arguments.command} needs torch: pip install torch", file=sys.stderr)
        return 1
    try:
        return arguments.run(arguments)
    except errors.Error as error:
        print(f"thinwire {arguments.command}: {error}", file=sys.stderr)
        return 1
