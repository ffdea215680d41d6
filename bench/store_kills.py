"""The store under kills, the part "kills" of bench.store: members are processes on loopback, forked
off one that has imported torch, and each reports its steps to the one that kills."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from bench import harness, lab
from bench.harness import Row

MODES = {"sync": "dist_sync", "ssp": "dist_ssp:staleness=2", "async": "dist_async"}
TIMEOUT_S = 60.0  # of meeting and of each wait
SMALL = 100_000  # elements of the model
KILL_WORKERS = 3
KILL_STEP_S = 0.02
WINDOW_S = 1.5  # of steps that are counted before a kill, and after it
JOURNAL_STEPS = 25  # from one kill to the next
JOURNAL_BYTES = 2_000_000  # from one snapshot to the next, less than two kills are apart

_forks = multiprocessing.get_context("forkserver")

SERVER = """
import sys
from thinwire import kvserver
kvserver.serve_here(float(sys.argv[1]), sys.argv[2])
"""  # `thinwire serve`


def environment_of(rank: int, port: int) -> dict[str, str]:
    """Return what a launcher gives a rank on this machine, the last of which serves."""
    given = lab.Lab(KILL_WORKERS + 1, lab.LOOPBACK).environment_of(rank, port)
    return given | {"THINWIRE_SERVERS": "1", "PYTHONPATH": harness.PYTHONPATH}


def _member(environment: dict[str, str], mode: str, steps: int, pipe: Any, stop: Any) -> None:
    """A worker or a server. A worker sends the time of each step's end; at its own end the name of
    its error and its time, or the digest of its values."""
    import thinwire
    import torch
    from thinwire import kvstore

    os.environ.update(environment)
    torch.set_num_threads(1)
    value = torch.zeros(SMALL)
    try:
        store = kvstore.create(mode, codec="int4", timeout_s=TIMEOUT_S)
        store.init("w", value)
        store.set_optimizer("adam", learning_rate=1e-3)
        for step in range(steps):
            if stop.is_set():
                break
            seed = torch.Generator().manual_seed(1000 * step + store.rank)
            gradient = torch.randn(SMALL, generator=seed)
            time.sleep(KILL_STEP_S)
            store.pushpull("w", gradient, out=value)
            store.wait()
            pipe.send(("step", time.monotonic()))
    except thinwire.Error as error:  # a server's is the workers' too
        pipe.send((type(error).__name__, time.monotonic()))
        return
    pipe.send((hashlib.sha256(value.numpy().tobytes()).hexdigest(), time.monotonic()))
    store.close()


@dataclass
class Member:
    process: Any
    pipe: Any
    steps: list[float] = field(default_factory=list)  # ends
    end: tuple[str, float] | None = None


class Members:
    """KILL_WORKERS workers and one server, which are gone at the end."""

    def __init__(self, mode: str, steps: int = 1 << 30, server: bool = True) -> None:
        self.port, self.mode = lab.free_port(), mode
        self._stop = _forks.Event()
        self.all = [self._start(rank_, steps) for rank_ in range(KILL_WORKERS + server)]
        self.workers = self.all[:KILL_WORKERS]

    def _start(self, rank_: int, steps: int) -> Member:
        pipe, theirs = _forks.Pipe(duplex=False)
        arguments = (environment_of(rank_, self.port), self.mode, steps, theirs, self._stop)
        process = _forks.Process(target=_member, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Member(process, pipe)

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.all:
            member.process.kill()
            member.process.join()

    def watch(self, done: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
        """Until `done`. RuntimeError after `seconds` without it."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.mode}: nothing more in {seconds} s")
            pipes = {member.pipe: member for member in self.workers if not member.pipe.closed}
            for pipe in connection.wait(list(pipes), 0.05):
                try:
                    word, when = pipe.recv()
                except EOFError:
                    pipe.close()
                    continue
                if word == "step":
                    pipes[pipe].steps.append(when)
                else:
                    pipes[pipe].end = (word, when)

    def watch_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() > end)

    def watch_ends(self, workers: Sequence[Member], seconds: float = TIMEOUT_S) -> None:
        self.watch(lambda: all(worker.end for worker in workers), seconds)

    def stop(self) -> None:
        self._stop.set()

    def kill(self, number: int) -> float:
        """The time of it."""
        os.kill(self.all[number].process.pid, signal.SIGKILL)
        return time.monotonic()


def summary(mode: str, victim: str, kills: int, found: Sequence[float], unit: str) -> Row:
    ordered = sorted(found)
    return {
        "mode": mode, "victim": victim, "kills": kills, "unit": unit, "errors": "",
        "median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1],
        "p99": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))], "same_digest": "",
        "found": [round(each, 4) for each in found],
    }  # fmt: skip


def errors_after_kills(kills: int) -> Iterator[Row]:
    """Sync: milliseconds from the kill to each survivor's error."""
    for victim, number in (("worker", KILL_WORKERS - 1), ("server", KILL_WORKERS)):
        found, kinds = [], set()
        for kill in range((kills + 1) // 2):
            with Members(MODES["sync"]) as members:
                members.watch(lambda: all(len(worker.steps) > 10 for worker in members.workers))
                members.watch_for(random.Random(kill).uniform(0, 2 * KILL_STEP_S))
                at = members.kill(number)
                left = [worker for place, worker in enumerate(members.workers) if place != number]
                members.watch_ends(left)
                found += [1e3 * (worker.end[1] - at) for worker in left]
                kinds |= {worker.end[0] for worker in left}
        yield summary("sync", victim, (kills + 1) // 2, found, "ms") | {
            "errors": f"{len(found)} {', '.join(sorted(kinds))}"
        }


def rates_after_kills(mode: str, kills: int) -> Row:
    """Steps of the others in the time after a worker's kill, over those before it."""
    found, errors = [], 0
    for _ in range(kills):
        with Members(MODES[mode]) as members:
            members.watch(lambda: all(len(worker.steps) > 10 for worker in members.workers))
            members.watch_for(WINDOW_S)
            at = members.kill(KILL_WORKERS - 1)
            members.watch_for(WINDOW_S)
            left = members.workers[:-1]
            times = [when for worker in left for when in worker.steps]
            before = sum(at - WINDOW_S < when <= at for when in times)
            found.append(sum(at < when <= at + WINDOW_S for when in times) / before)
            members.stop()
            members.watch_ends(left)
            errors += sum(worker.end[0].endswith("Error") for worker in left)
    return summary(mode, "worker", kills, found, "of the rate") | {"errors": str(errors)}


def server_comes_back(kills: int) -> Row:
    """Seconds from a server's kill to the next step of the worker that waits for it the longest."""
    steps = JOURNAL_STEPS * (kills + 1)
    back, digests = [], []
    for killed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            journal = f"{folder},bytes={JOURNAL_BYTES}"
            with Members(MODES["sync"], steps, server=False) as members:
                digests.append(_journalled(members, journal, kills * killed, back))
    same = digests[0] == digests[1] and all(len(set(each)) == 1 for each in digests)
    digest = {"same_digest": "yes" if same else "no"}
    return summary("sync, journal", "server", kills, back, "s") | digest


def _journalled(members: Members, journal: str, kills: int, back: list[float]) -> list[str]:
    """The workers' digests, after a run whose server is killed and started again."""
    environment = os.environ | environment_of(KILL_WORKERS, members.port)
    command = [sys.executable, "-c", SERVER, str(TIMEOUT_S), journal]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment)

    server = start()
    try:
        for kill in range(kills):
            ahead = JOURNAL_STEPS * (kill + 1)
            members.watch(lambda least=ahead: all(len(w.steps) >= least for w in members.workers))
            server.kill()
            server.wait()
            server = start()
            counts = [len(worker.steps) for worker in members.workers]
            # A step whose values were on their way counts with those before it.
            members.watch(
                lambda counts=counts: all(
                    len(w.steps) > n + 1 for w, n in zip(members.workers, counts, strict=True)
                )
            )
            gaps = [
                max(b - a for a, b in zip(w.steps[n - 1 :], w.steps[n:], strict=False))
                for w, n in zip(members.workers, counts, strict=True)
            ]
            back.append(max(gaps))
        members.watch_ends(members.workers, 10 * TIMEOUT_S)
        return [worker.end[0] for worker in members.workers]
    finally:
        if kills and server.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
        server.kill()
        server.wait()


def rows(count: int) -> Iterator[Row]:
    _forks.set_forkserver_preload(["thinwire.kvstore"])
    yield from errors_after_kills(count)
    yield rates_after_kills("async", count)
    yield rates_after_kills("ssp", count)
    yield server_comes_back(count)
