"""`thinwire run`: starts every rank of a program, on this machine and over ssh on others."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from thinwire.errors import InvalidArgumentError
from thinwire.launch.guard import GRACE_S
from thinwire.launch.hosts import Slot, slots_of
from thinwire.launch.place import Place, port_of

_LOCAL = ("localhost", "127.0.0.1")
# What a rank on another machine gets of this one's environment; -x names more.
_FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PREFIX = "THINWIRE_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=1, metavar="RANKS", help="how many ranks to start")
    parser.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:RANKS,...",
        help="where to, host by host, such as a:2,b:2; without it on this machine",
    )
    parser.add_argument(
        "-x",
        dest="names",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that ranks on other hosts get, too; may be repeated",
    )
    parser.add_argument("--port", type=int, help="where rank 0 listens for the rendezvous")
    parser.add_argument(
        "--ssh",
        default="ssh -o BatchMode=yes",
        metavar="COMMAND",
        help="how a command is run on another host: COMMAND HOST TEXT",
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="command",
                        help="the program and its arguments, such as: python train.py")  # fmt: skip


class _Rank:
    """One rank's process, and the thread that prints its lines."""

    def __init__(
        self, place: Place, command: Sequence[str], environment: dict[str, str] | None,
        ended: queue.SimpleQueue[_Rank],
    ) -> None:  # fmt: skip
        """ended: gets this rank when it has ended and all its lines are printed."""
        self.rank = place.rank
        self._ended = ended
        # A session of its own keeps Ctrl-C, which a terminal sends to all of a group, from ssh.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._print, args=(self._process.stdout,), daemon=True).start()

    def _print(self, lines: IO[bytes]) -> None:
        prefix = f"[{self.rank}] ".encode()
        for line in lines:
            # One write a line, so that lines of several ranks do not mix.
            sys.stdout.buffer.write(prefix + line.rstrip(b"\r\n") + b"\n")
            sys.stdout.buffer.flush()
        self._process.wait()
        self._ended.put(self)

    @property
    def status(self) -> int:
        """After the end; 128 and the number of the signal that ended it."""
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def stop(self) -> None:
        """Tells the guard to end the rank."""
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()


def _is_here(host: str) -> bool:
    return host in _LOCAL or host == socket.gethostname()


def _command(slot: Slot, place: Place, options: argparse.Namespace) -> list[str]:
    guarded = [sys.executable, "-m", "thinwire.launch.guard", *options.command_line]
    if _is_here(slot.host):
        return guarded
    named = {*_FORWARDED, *options.names, *(n for n in os.environ if n.startswith(_PREFIX))}
    variables = {name: os.environ[name] for name in sorted(named) if name in os.environ}
    words = ["exec", "env", *(f"{k}={v}" for k, v in (variables | place.variables()).items())]
    remote = f"cd {shlex.quote(os.getcwd())} && {shlex.join([*words, *guarded])}"
    return [*shlex.split(options.ssh), slot.host, remote]


def _places(slots: Sequence[Slot], port: int | None) -> list[Place]:
    first = slots[0].host
    alone = all(slot.host in _LOCAL for slot in slots)
    if port is None:
        port = _free_port() if alone else port_of(f"{socket.gethostname()} {os.getpid()}")
    if not alone and first in _LOCAL:
        first = socket.gethostname()  # which the others can reach
    address = "127.0.0.1" if alone else first
    return [
        Place(rank, len(slots), slot.local_rank, slot.local_size, address, port, "thinwire run")
        for rank, slot in enumerate(slots)
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _start(options: argparse.Namespace, ended: queue.SimpleQueue[_Rank]) -> list[_Rank]:
    slots = slots_of(options.hosts or f"localhost:{options.n}", options.n)
    ssh = shlex.split(options.ssh)[:1]
    if not all(_is_here(slot.host) for slot in slots) and not (ssh and shutil.which(*ssh)):
        raise InvalidArgumentError(f"--ssh is '{options.ssh}', expected a command that is here")
    ranks = []
    for slot, place in zip(slots, _places(slots, options.port), strict=True):
        environment = os.environ | place.variables()
        ranks.append(_Rank(place, _command(slot, place, options), environment, ended))
    return ranks


def _stop(ranks: Sequence[_Rank], ended: queue.SimpleQueue[_Rank], left: set[int]) -> None:
    """Ends those that are left, and returns when they have."""
    for rank in ranks:
        if rank.rank in left:
            rank.stop()
    while left:
        try:
            left.discard(ended.get(timeout=2 * GRACE_S).rank)
        except queue.Empty:  # a guard that can't be reached
            for rank in ranks:
                rank.kill()


def _check(options: argparse.Namespace) -> None:
    if not options.command_line or options.n < 1:
        raise InvalidArgumentError(
            f"got -n {options.n} and the command {options.command_line}, expected at least one "
            "rank and a command, as in `thinwire run -n 2 python train.py`"
        )
    if options.port is not None and not 1 <= options.port <= 65535:
        raise InvalidArgumentError(f"--port is {options.port}, expected 1 to 65535")
    if unset := [name for name in options.names if name not in os.environ]:
        raise InvalidArgumentError(f"-x names {unset}, which this shell does not export; export it")


def main(options: argparse.Namespace) -> int:
    """0 when all ranks have ended with 0. Else the first other status of a rank, after all others
    were ended; 130 after Ctrl-C."""
    if options.command_line[:1] == ["--"]:
        options.command_line = options.command_line[1:]
    _check(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
    ranks = _start(options, ended)
    left = set(range(len(ranks)))
    try:
        while left:
            rank = ended.get()
            left.discard(rank.rank)
            if rank.status != 0:
                print(
                    f"thinwire run: rank {rank.rank} ended with {rank.status}; ending the others",
                    file=sys.stderr,
                )
                _stop(ranks, ended, left)
                return rank.status
    except KeyboardInterrupt:
        print("thinwire run: interrupted; ending all ranks", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _stop(ranks, ended, left)
        return 130
    return 0
