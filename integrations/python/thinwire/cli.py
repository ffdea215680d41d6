"""The command line: `thinwire doctor` and `thinwire demo`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if something needed is missing."""
    parser = argparse.ArgumentParser(prog="thinwire", description="Gradient compression for DDP.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is here, what is missing, what to do")
    demo = commands.add_parser("demo", help="train a model, plain and compressed, and compare")
    from thinwire.demo import run

    run.add_arguments(demo)
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        from thinwire import doctor

        return doctor.main()
    if importlib.util.find_spec("torch") is None:
        print("the demo needs torch: pip install torch", file=sys.stderr)
        return 1
    return run.main(arguments)
