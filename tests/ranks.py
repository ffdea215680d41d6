"""Starts ranks: every test that runs functions or scripts as several processes does it here.
(Commands in a network of their own are bench/lab.py's, which also starts the scripts here.)

Processes of functions come from a fork server that has imported torch already, so that a test costs
tenths of a second and not an import of torch for each rank."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# DDP imports torch._dynamo when the first model is wrapped, which costs a second.
_context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "thinwire.torch"])


@dataclass
class Outcome:
    """The end of a rank: its function's result, or the error that it raised."""

    value: Any = None
    error: str = ""  # the type's name
    message: str = ""
    trace: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class Rank:
    """A process that runs a function."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._pipe, theirs = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_be, args=(theirs, function, arguments))
        self.process.start()
        theirs.close()

    def outcome(self, end: float) -> Outcome | None:
        """Return the end of its function, empty if it died; None if time.monotonic() reaches
        `end` before."""
        if not self._pipe.poll(max(0.0, end - time.monotonic())):
            return None
        with contextlib.suppress(EOFError):  # it died
            return pickle.loads(self._pipe.recv_bytes())
        return Outcome()

    def exit_code(self, end: float) -> int | None:
        """Its exit status, minus the signal if one killed it; None if it does not exit in time."""
        self.process.join(max(0.1, end - time.monotonic()))
        return self.process.exitcode


def _be(pipe, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    start, outcome = time.monotonic(), Outcome()
    try:
        outcome.value = function(*arguments)
    except Exception as error:
        outcome.error = type(error).__name__
        outcome.message = str(error)
        outcome.trace = traceback.format_exc()
    outcome.seconds = time.monotonic() - start
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: tensors go by value, not by descriptor
    pipe.close()
    if dist.is_initialized() and not outcome.error:
        dist.destroy_process_group()


@contextlib.contextmanager
def started(
    function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[Rank]]:
    """A process for each tuple of arguments, which runs the function with them. None outlives the
    context."""
    ranks: list[Rank] = []
    try:
        for each in arguments:
            ranks.append(Rank(function, each))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def values_of(ranks: list[Rank], timeout_s: float) -> list[Any]:
    """Return the functions' results. Fails if one raises, dies or takes longer."""
    end, values = time.monotonic() + timeout_s, []
    for number, rank in enumerate(ranks):
        outcome = rank.outcome(end)
        assert outcome is not None, f"rank {number} hangs"
        assert not outcome.error, f"rank {number} raised\n{outcome.trace}"
        assert rank.exit_code(end) == 0, f"rank {number} ended with {rank.process.exitcode}"
        values.append(outcome.value)
    return values


# Ranks of one process group of torch's.


def run(
    function: Callable[..., Any],
    *args: Any,
    world: int = 2,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """function(rank, *args) on every rank; their results. Fails if a rank raises."""
    outcomes = outcomes_of(
        function, *args, world=world, timeout_s=timeout_s, environment=environment
    )
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank} raised\n{outcome.trace}"
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def outcomes_of(
    function: Callable[..., Any],
    *args: Any,
    world: int = 2,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Like run, but a rank may raise or die. Fails if one outlives timeout_s; none does after."""
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(folder, rank, world, environment or {}, call) for rank in range(world)]
        with started(_in_group, arguments) as ranks:
            end = time.monotonic() + timeout_s
            outcomes = [rank.outcome(end) for rank in ranks]
            for number, (rank, outcome) in enumerate(zip(ranks, outcomes, strict=True)):
                assert outcome is not None, f"rank {number} hangs"
                outcome.exit_code = rank.exit_code(end)
                assert outcome.exit_code is not None, f"rank {number} does not exit"
            return outcomes


def _in_group(folder: str, rank: int, world: int, environment: dict[str, str], call: bytes) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    function, args = pickle.loads(call)  # which may import what reads the environment
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    # A rank that left torch's group at once would end the others' connecting.
    dist.barrier()
    return function(rank, *args)


def run_program(
    file: Path,
    *arguments: str,
    world: int = 2,
    timeout_s: float = 100.0,
    environment: dict[str, str] | None = None,
) -> str:
    """Run the program on every rank with torchrun's variables, in a folder of its own and from its
    first line to its exit handlers, and return all that they printed. Fails if a rank raises, dies
    or takes longer."""
    from bench.lab import free_port

    here = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    here |= {"MASTER_PORT": str(free_port())} | (environment or {})
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, str(rank)) for rank in range(world)]
        calls = [
            (file, arguments, printed[rank], here | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]
        with started(_as_program, calls) as ranks:
            values_of(ranks, timeout_s)
        return "".join(each.read_text() for each in printed)


def _as_program(
    file: Path, arguments: tuple[str, ...], printed: Path, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    os.chdir(printed.parent)
    sys.argv = [str(file), *arguments]
    with printed.open("w") as out, contextlib.redirect_stdout(out):
        # Kept until the process ends: a DDP model that dies after destroy_process_group() waits,
        # with Python's lock, for a thread of Gloo's that may wait for the lock (torch 2.13).
        _as_program.left = runpy.run_path(str(file), run_name="__main__")
        atexit._run_exitfuncs()  # which the processes of multiprocessing leave out


# Ranks that are scripts, with an interpreter of their own.


def run_scripts(
    text: str,
    *arguments: str,
    world: int = 2,
    timeout_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs the text as the program of every rank, which has torchrun's variables. Fails if one
    outlives timeout_s."""
    from bench import lab

    place, port = lab.Lab(world, lab.LOOPBACK), lab.free_port()
    command = [sys.executable, "-c", text, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [place.start(rank, command, port, environment, **pipes) for rank in range(world)]
    end, done = time.monotonic() + timeout_s, []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=max(0.1, end - time.monotonic()))
            done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, error))
        return done
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
