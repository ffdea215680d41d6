"""Runs a function as every rank of a process group, each rank a process with a deadline.

The processes come from a fork server that has imported torch already, so that a test costs tenths
of a second and not an import of torch for each rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        call = pickle.dumps((function, args))
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_be_rank, args=(theirs, folder, rank, world, environment or {}, call)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes, processes, end: float) -> list[Outcome]:
    outcomes = []
    for rank, pipe in enumerate(pipes):
        outcome = Outcome()
        if not pipe.poll(max(0.0, end - time.monotonic())):
            raise AssertionError(f"rank {rank} hangs")
        with contextlib.suppress(EOFError):  # it died
            outcome = pickle.loads(pipe.recv_bytes())
        outcomes.append(outcome)
    for rank, process in enumerate(processes):
        process.join(max(0.1, end - time.monotonic()))
        assert process.exitcode is not None, f"rank {rank} does not exit"
        outcomes[rank].exit_code = process.exitcode
    return outcomes


def _be_rank(pipe, folder: str, rank: int, world: int, environment, call: bytes) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    function, args = pickle.loads(call)
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    start, outcome = time.monotonic(), Outcome()
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        # A rank that left torch's group at once would end the others' connecting.
        dist.barrier()
        outcome.value = function(rank, *args)
    except Exception as error:
        outcome.error = type(error).__name__
        outcome.message = str(error)
        outcome.trace = traceback.format_exc()
    outcome.seconds = time.monotonic() - start
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: tensors go by value, not by descriptor
    pipe.close()
    if dist.is_initialized() and not outcome.error:
        dist.destroy_process_group()
