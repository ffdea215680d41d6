"""`thinwire bench`: its arguments, and the ranks that it starts where no launcher has."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from thinwire import launch
from thinwire.codec import codec_info
from thinwire.demo import lab
from thinwire.errors import InvalidArgumentError, UnavailableError

_TIMEOUT_S = 1800.0


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


_sizes.__name__ = "list of whole numbers above 0"  # argparse's message names it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", default="int8,int4", help="the most accurate first")
    parser.add_argument(
        "--sizes", type=_sizes, default=[64, 1024, 16384, 65536], help="in KiB of fp32: 64,1024"
    )
    parser.add_argument("--rounds", type=int, default=5, help="at least, for each size")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size, at least")
    parser.add_argument("--ranks", type=int, default=2, help="here, if no launcher started this")
    parser.add_argument(
        "--link", default=lab.LOOPBACK,
        help="between ranks that are started here: loopback, or a rate such as 1gbit (needs root)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="file for a PNG; needs matplotlib")


def main(arguments: argparse.Namespace) -> int:
    """The exit status."""
    _check(arguments)
    if _was_launched():
        launch.setup()
        from thinwire.bench import rank

        return rank.main(arguments)
    if arguments.link != lab.LOOPBACK:
        lab.become_root_of_namespaces()
        if refusal := lab.can_shape():
            raise UnavailableError(f"no {arguments.link} link here: {refusal}; leave out --link")
    return _start_ranks(arguments)


def _check(arguments: argparse.Namespace) -> None:
    lab.check_link(arguments.link)
    for spec in arguments.codecs.split(","):
        codec_info(spec)
    for file in (arguments.json, arguments.plot):
        if file is not None and not file.parent.is_dir():
            raise InvalidArgumentError(f"'{file}': there is no folder '{file.parent}'; make it")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--plot needs matplotlib: pip install matplotlib")
    if arguments.rounds < 1 or arguments.ranks < 2:
        raise InvalidArgumentError(
            f"--rounds is {arguments.rounds} and --ranks {arguments.ranks}, expected at least 1 "
            "round and 2 ranks"
        )


def _was_launched() -> bool:
    try:
        return launch.find().size > 1
    except InvalidArgumentError:
        # A launcher whose variables are not whole is an error, in setup().
        return "RANK" in os.environ


def _start_ranks(arguments: argparse.Namespace) -> int:
    options = {
        "--codecs": arguments.codecs,
        "--sizes": ",".join(map(str, arguments.sizes)),
        "--rounds": arguments.rounds,
        "--seconds": arguments.seconds,
        "--json": arguments.json,
        "--plot": arguments.plot,
    }
    given = [str(part) for pair in options.items() if pair[1] is not None for part in pair]
    with lab.open_lab(arguments.ranks, arguments.link) as place:
        try:
            place.run([sys.executable, "-m", "thinwire", "bench", *given], _TIMEOUT_S)
        except RuntimeError as error:
            print(f"thinwire bench: {error}", file=sys.stderr)
            return 1
    return 0
