"""The command line: `thinwire doctor`, `bench`, `advise`, `trace` and `serve`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire import errors, version
from thinwire.codec import specs_in


class _UsersError(Exception):
    """A function of the user's has raised the exception that is this one's cause."""

    def __init__(self, function: str) -> None:
        super().__init__(function)
        self.function = function


@contextlib.contextmanager
def users(function: str) -> Iterator[None]:
    """A context for a command's call of a function of the user's. The command ends if the function
    raises, and prints the traceback without frames of this package. function: for that message."""
    try:
        yield
    except Exception as error:
        raise _UsersError(function) from error


_NOT_THEIRS = (
    str(Path(__file__).parent) + os.sep, os.path.dirname(importlib.__file__) + os.sep,
    contextlib.__file__, "<frozen importlib",
)  # fmt: skip


def _users_lines(error: BaseException) -> str:
    """Return the error's traceback without frames of this package, and of its imports."""
    found = traceback.TracebackException.from_exception(error)
    left: list[traceback.TracebackException | None] = [found]
    while left:
        each = left.pop()
        if each is not None:
            theirs = [line for line in each.stack if not line.filename.startswith(_NOT_THEIRS)]
            each.stack = traceback.StackSummary.from_list(theirs)
            left += [each.__cause__, each.__context__]
    return "".join(found.format())


def _trace(arguments: argparse.Namespace) -> int:
    from thinwire import trace

    files = [file for path in arguments.files for file in trace.files_of(path) or [path]]
    if arguments.out.resolve() in {file.resolve() for file in files}:
        raise errors.InvalidArgumentError(
            f"--out is {arguments.out}, which is one of the traces to merge; name another file"
        )
    merged = trace.merge(files)
    trace.write(merged, arguments.out)
    print(
        f"{arguments.out}: {len(merged.offsets)} ranks, {len(merged.events)} events, clocks equal "
        f"to within {merged.uncertainty:.0f} microseconds; open it in ui.perfetto.dev"
    )
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    from thinwire.torch import advise

    return advise.main(arguments.make, arguments.codecs)


def _bench(arguments: argparse.Namespace) -> int:
    from thinwire import bench

    return bench.main(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.canary:
        from thinwire import canary

        return canary.main(arguments)
    for option in ("codecs", "topologies", "ranks", "seconds"):
        if getattr(arguments, option) != arguments.parser.get_default(option):
            raise errors.InvalidArgumentError(f"--{option} is an option of --canary; add that")
    from thinwire import doctor

    return doctor.main()


def _serve(arguments: argparse.Namespace) -> int:
    from thinwire import kvserver

    kvserver.serve_here(arguments.timeout, arguments.journal)
    return 0


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            print(f"thinwire {version()}")
        except errors.Error as error:  # the library does not load
            parser.exit(1, f"thinwire --version: {error}\n")
        parser.exit()


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_sizes.__name__ = "list of whole numbers"  # for argparse's error message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="thinwire", description="Gradient compression for DDP.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is here, what is missing, what to do")
    doctor.add_argument(
        "--canary", action="store_true",
        help="instead: compare all codecs and collectives with fp64, here or under a launcher",
    )  # fmt: skip
    doctor.add_argument(
        "--codecs", type=specs_in,
        help="of the canary, separated by commas or semicolons; all, unless this names some",
    )  # fmt: skip
    doctor.add_argument(
        "--topologies", default="flat,grid,hierarchical",
        help="of the canary, separated by commas; those that the ranks do not form are left out",
    )  # fmt: skip
    doctor.add_argument(
        "--ranks", type=int, default=2, help="of the canary here, if no launcher started this"
    )
    doctor.add_argument(
        "--seconds", type=float, default=25.0, help="of the canary: no case begins later"
    )
    doctor.set_defaults(run=_doctor, parser=doctor)
    bench = commands.add_parser(
        "bench",
        help="codecs, link and allreduces of this machine, or under a launcher of a cluster",
    )
    bench.add_argument(
        "--codecs", type=specs_in, default="int8,int4", help="separated by commas or semicolons"
    )
    bench.add_argument(
        "--sizes", type=_sizes, default=[64, 1024, 16384, 65536], help="in KiB of fp32: 64,1024"
    )
    bench.add_argument("--rounds", type=int, default=5, help="at least, for each size")
    bench.add_argument("--seconds", type=float, default=2.0, help="for each size, at least")
    bench.add_argument("--ranks", type=int, default=2, help="here, if no launcher started this")
    bench.add_argument("--json", type=Path, help="file for all figures")
    bench.set_defaults(run=_bench)
    advise = commands.add_parser(
        "advise", help="which codec and policy suit this model on this link; run it under torchrun"
    )
    advise.add_argument(
        "make", metavar="MODULE:FUNCTION",
        help="a function that returns (model, optimizer, run); run() does a forward and backward",
    )  # fmt: skip
    advise.add_argument(
        "--codecs", type=specs_in, help="to choose from, the most accurate first: fp32,bf16,..."
    )
    advise.set_defaults(run=_advise)
    trace = commands.add_parser("trace", help="merge the traces of all ranks on one clock")
    trace.add_argument("files", nargs="+", type=Path, help="the name that was traced to, or files")
    trace.add_argument("--out", type=Path, default=Path("trace.json"))
    trace.set_defaults(run=_trace)
    serve = commands.add_parser(
        "serve", help="serve a store of thinwire.kvstore, without torch; start it as a server rank"
    )
    serve.add_argument("--journal", help="as create(journal=); THINWIRE_KV_JOURNAL, else none")
    serve.add_argument("--timeout", type=float, help="in seconds; THINWIRE_TIMEOUT_S, else 60")
    serve.set_defaults(run=_serve)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status: 0; 1 if a check finds a fault or the run fails;
    2 for an argument or setting that is not valid, or an input that cannot be read; 130 after
    Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # such as by `| head`; Python's flush at exit must not fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"thinwire {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except _UsersError as error:
        cause = error.__cause__
        assert cause is not None
        print(
            f"{_users_lines(cause)}thinwire {arguments.command}: {error.function} raised "
            f"{type(cause).__name__}",
            file=sys.stderr,
        )
        return 1
    except (errors.Error, OSError, ModuleNotFoundError) as error:
        print(f"thinwire {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, errors.InvalidArgumentError) else 1
