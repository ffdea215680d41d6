"""Starts ranks: every test that runs functions or scripts in several processes uses this module.
(bench/lab.py runs commands in a separate network, and also starts the scripts here.)

Functions run in processes of a fork server that has imported what most tests need, so that a test
takes tenths of a second, without an import of torch per rank."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# DDP imports torch._dynamo when the first model is wrapped, which costs a second. A test's file
# imports pytest, which costs a rank more than everything else before its function.
_context.set_forkserver_preload(
    [
        "torch.distributed.fsdp", "torch._dynamo", "thinwire.torch", "thinwire.torch.fsdp",
        "thinwire.torch.sites", "pytest",
    ]
)  # fmt: skip

# A rank that takes longer hangs. This is far longer than a rank takes on a busy machine, where an
# import of torch can take half a minute, and a compiled model two.
HANG_S = 480.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """The outcome of a rank: its function's result, or the error that it raised."""

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
        """Return the outcome of its function, an empty one if it died; None if time.monotonic()
        reaches `end` first."""
        if not self._pipe.poll(max(0.0, end - time.monotonic())):
            return None
        with contextlib.suppress(EOFError):  # it died
            return pickle.loads(self._pipe.recv_bytes())
        return Outcome()

    def exit_code(self, end: float) -> int | None:
        """Return its exit status, minus the signal if one killed it; None if it does not exit in
        time."""
        self.process.join(max(0.1, end - time.monotonic()))
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.process.kill()
        self.process.join()


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
    """Start a process for each tuple of arguments, which calls the function with them. No process
    outlives the context."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for each in arguments:
            ranks.append(Rank(function, each))
            stack.callback(ranks[-1].kill)
        yield ranks


def values_of(ranks: Sequence[Rank], timeout_s: float = HANG_S) -> list[Any]:
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
    timeout_s: float = HANG_S,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call function(rank, *args) on every rank, and return the results. Fails if a rank raises."""
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
    timeout_s: float = HANG_S,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Like run(), but a rank may raise or die. Fails if one takes longer than timeout_s. No rank
    outlives the call."""
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(folder, rank, world, environment or {}, call) for rank in range(world)]
        with started(_in_group, arguments) as ranks:
            end = time.monotonic() + timeout_s
            outcomes = [rank.outcome(end) for rank in ranks]
            raised = "".join(outcome.trace for outcome in outcomes if outcome and outcome.error)
            for number, (rank, outcome) in enumerate(zip(ranks, outcomes, strict=True)):
                assert outcome is not None, f"rank {number} hangs\n{raised}"
                outcome.exit_code = rank.exit_code(end)
                assert outcome.exit_code is not None, f"rank {number} does not exit"
            return outcomes


def _in_group(folder: str, rank: int, world: int, environment: dict[str, str], call: bytes) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    function, args = pickle.loads(call)  # this may import modules that read the environment
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    # A rank that leaves torch's group at once would end the others' connecting.
    dist.barrier()
    return function(rank, *args)


# Ranks that are programs.


class Program(Rank):
    """A process that runs a Python program, a file or a module by its name, from its first line to
    its exit handlers. The program's output goes to the file `printed`, in whose folder it runs."""

    def __init__(
        self,
        program: Path | str,
        arguments: tuple[str, ...],
        printed: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.printed = printed
        super().__init__(_as_program, (program, arguments, printed, dict(environment)))

    def await_lines(self, count: int, timeout_s: float = HANG_S) -> list[str]:
        """Wait until it has printed that many lines, and return all. Fails if it ends earlier."""
        end = time.monotonic() + timeout_s
        while True:
            ended = not self.process.is_alive()
            text = self.printed.read_text() if self.printed.exists() else ""
            if text.count("\n") >= count:
                return text.splitlines()
            assert not ended, f"ended with {self.process.exitcode} after\n{text}"
            assert time.monotonic() < end, f"hangs after\n{text}"
            time.sleep(0.01)


@contextlib.contextmanager
def started_programs(
    program: Path | str, *arguments: str, environments: Iterable[Mapping[str, str]]
) -> Iterator[list[Program]]:
    """Start a process for each environment, all in one folder. No process outlives the context."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs: list[Program] = []
        for number, environment in enumerate(environments):
            programs.append(Program(program, arguments, folder / str(number), environment))
            stack.callback(programs[-1].kill)
        yield programs


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of loopback that the system gives to no other process meanwhile. A server that
    sets SO_REUSEADDR, as torch's stores do, can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank on one node."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def mxnet_variables(port: int, roles: Sequence[str]) -> list[dict[str, str]]:
    """Return MXNet's variables for members of these roles."""
    common = {
        "DMLC_NUM_WORKER": str(roles.count("worker")),
        "DMLC_NUM_SERVER": str(roles.count("server")),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
    }
    return [common | {"DMLC_ROLE": role} for role in roles]


def run_program(
    program: Path | str,
    *arguments: str,
    world: int = 2,
    timeout_s: float = HANG_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run the program on every rank with torchrun's variables, and return everything printed. Fails
    if a rank raises, dies or takes longer."""
    with reserved_port() as port:
        each = [variables(rank, world, port) | dict(environment or {}) for rank in range(world)]
        with started_programs(program, *arguments, environments=each) as programs:
            values_of(programs, timeout_s)
            return "".join(program.printed.read_text() for program in programs)


def torchrun(
    program: Path | str,
    *arguments: str,
    world: int = 2,
    timeout_s: float = HANG_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Like run_program(), but torchrun's agent starts the ranks, with its store and variables."""
    with tempfile.TemporaryDirectory() as folder:
        call = (program, arguments, Path(folder), world, dict(environment or {}))
        with started(_as_torchrun, [call]) as agents:
            values_of(agents, timeout_s)
        return "".join(Path(folder, str(rank)).read_text() for rank in range(world))


def _as_torchrun(
    program: Path | str,
    arguments: tuple[str, ...],
    folder: Path,
    world: int,
    environment: dict[str, str],
) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(environment)
    config = LaunchConfig(
        1, 1, world, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _as_rank_of_torchrun)(program, arguments, folder)


def _as_rank_of_torchrun(program: Path | str, arguments: tuple[str, ...], folder: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with its agent
    _as_program(program, arguments, folder / os.environ["RANK"], {})


def _as_program(
    program: Path | str, arguments: tuple[str, ...], printed: Path, environment: dict[str, str]
) -> None:
    multiprocessing.set_start_method(None, force=True)  # the default, which programs have
    os.environ.update(environment)
    os.chdir(printed.parent)
    sys.argv = [str(program), *arguments]
    with printed.open("w") as out, contextlib.redirect_stdout(out):
        # Kept until the process ends: a DDP model that dies after destroy_process_group() waits,
        # with Python's lock, for a thread of Gloo's that may wait for the lock (torch 2.13).
        try:
            if isinstance(program, str):
                _as_program.left = runpy.run_module(program, run_name="__main__")
            else:
                sys.path.insert(0, str(program.parent))
                _as_program.left = runpy.run_path(str(program), run_name="__main__")
        finally:
            atexit._run_exitfuncs()  # processes of multiprocessing do not run these


# Ranks that are scripts, each with its own interpreter.


def run_scripts(
    text: str,
    *arguments: str,
    world: int = 2,
    timeout_s: float = HANG_S,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the text as the program of every rank, with torchrun's variables. Fails if a rank takes
    longer than timeout_s."""
    from bench import lab

    place = lab.Lab(world, lab.LOOPBACK)
    command = [sys.executable, "-c", text, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    end, done = time.monotonic() + timeout_s, []
    with reserved_port() as port:
        ranks = [place.start(rank, command, port, environment, **pipes) for rank in range(world)]
        try:
            for rank in ranks:
                out, error = rank.communicate(timeout=max(0.1, end - time.monotonic()))
                done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, error))
            return done
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
