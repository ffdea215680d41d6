"""One rank of a case: it meets its peers, trains until something fails, and reports the failure and
its time. The victim does the same until it strikes itself."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from board import Board
from cases import Case
from strike import Striker
from thinwire import _library, errors
from thinwire.comm import Communicator
from thinwire.config import Config

WARM_UP = 3  # steps before a blow in a step or between steps
# About how long connecting takes after the last address is known, including the choice of UCX; and
# what nodes of ranks add, which agree twice and measure their links.
CONNECTING_S = {"gloo": 0.003, "auto": 0.06}
NODES_S = 0.06
FIRST_S = 0.003
CLOSING_S = 0.004


@dataclass
class Report:
    """How a rank ended. Times are of time.monotonic, which all processes of a machine share."""

    error: str = ""  # name of the error's type; empty: closed without an error
    message: str = ""
    failed_at: float = 0.0  # when the error was raised, or the close returned
    called_at: float = 0.0  # when the failed call was made (for a step: its tensor was submitted)
    stage: str = ""  # connecting, step or closing
    wrong: str = ""  # describes a result that is not the sum
    transport: str = ""  # the transport in use, once connected


class Actor:
    """Runs one rank of one case."""

    def __init__(
        self, case: Case, rank: int, folder: Path, board: Board | None = None, **settings: str
    ) -> None:
        """board: used instead of the case's own; settings: further fields of Config."""
        self._case, self._rank, self._folder = case, rank, folder
        self._board = board or Board(folder, self._before_store)
        self._settings = settings
        self._striker = Striker(case, rank, folder)
        self._operations = 0
        self._report = Report(stage="connecting")
        self._tensors = [np.zeros(count, np.float32) for count in case.tensors]

    def run(self) -> Report:
        """Run the rank from meeting at the store to the close."""
        _library.load()
        self._await_all()
        communicator = None
        try:
            self._report.called_at = time.monotonic()
            communicator = self._connect()
            self._report.transport = communicator.transport()
            self._striker.abort = functools.partial(
                communicator.fail, errors.Error(f"rank {self._rank} has had enough")
            )
            self._striker.now("idle")
            self._train(communicator)
            self._close(communicator)
        except errors.Error as error:
            self._report.failed_at = time.monotonic()
            self._report.error, self._report.message = type(error).__name__, str(error)
            if communicator is not None:
                self._give_up(communicator)
        return self._report

    def _give_up(self, communicator: Communicator) -> None:
        """Close after an error."""
        communicator.close()

    def _await_all(self) -> None:
        """Wait until all processes have started. This can take long, so no timeout includes it."""
        (self._folder / f"rank{self._rank}.is_here").touch()
        while len(list(self._folder.glob("rank*.is_here"))) < self._case.world:
            time.sleep(0.001)

    def _connect(self) -> Communicator:
        case = self._case
        config = Config(
            codec=case.codec, lanes=case.lanes, chunk_bytes=case.chunk_bytes, policy=case.policy,
            planned=case.planned, timeout_s=case.timeout_s, checksum=case.checksum,
            topology=case.topology, local_size=case.node_size, loops=case.loops,
            **{"transport": case.transport, **self._settings},
        )  # fmt: skip
        return Communicator(self._rank, case.world, self._board, "faults", config)

    def _before_store(self, operation: str, key: str) -> None:
        """Strike at the case's moment in the operations: handshake (1 set, n gets), token, address
        (1 set, n - 1 gets)."""
        self._operations += 1
        last = 2 * self._case.world + 2
        if self._operations == 1 + int(self._case.moment * last):
            self._striker.now("store")
        others = [rank for rank in range(self._case.world) if rank != self._rank]
        if operation == "get" and key.endswith(f"faults/mesh/{others[-1]}"):
            takes_s = CONNECTING_S[self._case.transport] + (NODES_S if self._case.nodes else 0)
            self._striker.soon("connecting", takes_s)

    def _train(self, communicator: Communicator) -> None:
        """Train without end, or in the phase "closing" for the warm-up only."""
        self._report.stage = "step"
        self._striker.soon("first", FIRST_S)
        seconds = self._step(communicator)
        for _ in range(WARM_UP):
            seconds = self._step(communicator)
        if self._case.phase == "closing":
            return
        training_file(self._folder, self._rank).touch()
        self._striker.now("between")
        for phase in ("raw", "direct", "chunks", "mixed"):
            self._striker.soon(phase, seconds)
        while True:
            self._step(communicator)

    def _step(self, communicator: Communicator) -> float:
        """Make a step, and return its seconds."""
        start = time.monotonic()
        works = []
        for number, tensor in enumerate(self._tensors):
            tensor.fill(1.0)
            self._report.called_at = time.monotonic()
            work = communicator.start(
                tensor.ctypes.data, len(tensor), "float32", "sum", f"tensor{number}"
            )
            works.append((self._report.called_at, work))
        for submitted, work in works:
            self._report.called_at = submitted
            work.wait()
        communicator.end_step()
        self._check()
        return time.monotonic() - start

    def _check(self) -> None:
        """Record a result that is off by more than 5 percent, with the codecs that keep every
        element. All inputs are ones."""
        if self._case.codec.startswith("topk"):
            return
        for number, tensor in enumerate(self._tensors):
            off = np.abs(tensor - self._case.world).max()
            if not off <= 0.05 * self._case.world:
                self._report.wrong = f"tensor{number} is off by {off}"

    def _close(self, communicator: Communicator) -> None:
        self._report.stage, self._report.called_at = "closing", time.monotonic()
        self._striker.soon("closing", CLOSING_S)
        communicator.close()
        self._report.failed_at = time.monotonic()


def training_file(folder: Path, rank: int) -> Path:
    """Return the path of a file that exists once that rank has warmed up."""
    return folder / f"rank{rank}.trains"
