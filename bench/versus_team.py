"""The ranks of versus.py: those of two trees beside each other, in one network lab."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab

START_S, TURN_S = 60.0, 120.0  # deadlines
_PORT = 29500  # of the first tree's rendezvous in a lab
_RANK = Path(__file__).with_name("versus_rank.py")


class Team:
    """One tree's ranks in a lab. RuntimeError once a rank has failed; its words are on stderr."""

    def __init__(self, tree: Path, place: lab.Lab, port: int) -> None:
        self._tree = tree
        self._folder = tempfile.TemporaryDirectory()
        path = f"{self._folder.name}/turns"
        settings = [
            f"PYTHONPATH={tree}/integrations/python",
            f"THINWIRE_LIBRARY={tree}/build/integrations/c/libthinwire.so",
        ]
        if place.link != lab.LOOPBACK:  # there the lab has chosen a free port
            settings.append(f"MASTER_PORT={port}")
        command = ["env", *settings, sys.executable, str(_RANK), str(tree), path]
        self._lines = []
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(place.world)
            server.settimeout(START_S)
            self._ranks = threading.Thread(target=self._run, args=(place, command), daemon=True)
            self._ranks.start()
            for _ in range(place.world):
                connection, _ = server.accept()
                connection.settimeout(TURN_S)
                self._lines.append(connection.makefile("rw"))
                connection.close()  # the file keeps it open

    def _run(self, place: lab.Lab, command: list[str]) -> None:
        try:
            place.run(command, 3600.0)
        except RuntimeError as error:
            print(f"{self._tree}: {error}", file=sys.stderr)

    def turn(self, subject: str, repeats: int) -> float:
        """Seconds of one repetition, on the slowest rank."""
        try:
            for lines in self._lines:
                print(json.dumps([subject, repeats]), file=lines, flush=True)
            return max(float(lines.readline()) for lines in self._lines)
        except (OSError, ValueError) as error:  # an empty line: the rank is no more
            raise RuntimeError(f"a rank of {self._tree} gave no answer: {error}") from error

    def close(self) -> None:
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.close()
        self._ranks.join(START_S)
        self._folder.cleanup()


@contextlib.contextmanager
def open_teams(trees: tuple[Path, Path], world: int, link: str) -> Iterator[list[Team]]:
    """The ranks of both trees, in one lab. RuntimeError if the system or a tree refuses."""
    with lab.open_lab(world, link) as place, contextlib.ExitStack() as stack:
        started = []
        for number, tree in enumerate(trees):
            started.append(Team(tree, place, _PORT + number))
            stack.callback(started[-1].close)
        yield started
