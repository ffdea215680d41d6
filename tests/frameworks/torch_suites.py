#!/usr/bin/env python3
"""Runs third-party test suites over the backend "thinwire", and compares the tests that pass with
those that pass over Gloo: torch_suites.py [--jobs N] [--only PATTERN] [--sources FOLDER] [SUITE...]

Suites in wheels:
distributed  torch.testing._internal.distributed.distributed_test, 3 ranks, codec fp32
torchft      torchft.process_group_test, with thinwire.torchft in place of torchft's Gloo
diloco       torchft.local_sgd_integ_test, likewise

Suites whose files are in FOLDER:
c10d         test_c10d_gloo.py and test_c10d_common.py of PyTorch's test/distributed, codec fp32
horovod      test_torch.py of Horovod's test/parallel over thinwire.horovod, 2 ranks, codec fp32

It needs expecttest, and for torchft's suites torchft and parameterized. A suite takes a quarter of
an hour on two cores, so `make test-torch` calls it and CI does not. It fails if a test that Gloo
passes fails over thinwire and is not in KNOWN, which gives the reasons. Horovod's tests have no run
over Gloo; all that run must pass."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

fork = multiprocessing.get_context("fork")

# Patterns of tests that pass over Gloo only, and the reasons.
_BY_NAME = "torch allows monitored_barrier for the backend named gloo alone"
KNOWN: dict[str, dict[str, str]] = {
    "distributed": {
        "test_get_backend": "it wants the name gloo",
        "test_monitored_barrier_gloo": _BY_NAME,
        "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    },
    "c10d": {"test_monitored_barrier": _BY_NAME},
    # Their numbers of tests differ from run to run.
    "torchft": {
        "test_gloo_timeout": "it compares the text of Gloo's timeout",
        "test_collective_with_resiliency_*": "errored() gives the first failure, where the test "
        "expects the text 'aborted'",
    },
}
_APART = "integers go over Gloo and floats do not, so ranks that differ meet at the deadline only"
_IN_ORDER = (
    "what is not a sum of floats goes in the order of calls, which differs between ranks here: a "
    "MismatchError on all of them"
)
KNOWN["horovod"] = {
    "test_broadcast_state_no_grad": "since torch 2.0 zero_grad() leaves None, which it broadcasts",
    "test_horovod_allgather_duplicate_name_error": _IN_ORDER,
    "test_horovod_broadcast_duplicate_name_error": _IN_ORDER,
    "test_horovod_allreduce_type_error": _APART,
    "test_horovod_reducescatter_type_error": _APART,
    "test_optimizer_no_named_parameters": "it reads _parameter_names, a private name of Horovod's",
    "test_sparse_embeddings": "sparse gradients of an optimizer need sparse_as_dense=True; the "
    "typed error says so",
    "test_synchronize_step_warning": "step() behind synchronize() reduces nothing again, so there "
    "is nothing to warn of",
}
LIMIT_S = 100  # per test
RANKS = 2  # for Horovod's suite

Classes = list[type[unittest.TestCase]]


def prepare_distributed(backend: str, folder: str) -> Classes:
    """Return the suite's class. Its tests choose what they do by BACKEND, so that stays "gloo", and
    only the default group has the other backend."""
    os.environ |= {
        "BACKEND": "gloo", "WORLD_SIZE": "3", "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
        "THINWIRE_CODEC": "fp32", "THINWIRE_SCOPE": "all",
    }  # fmt: skip
    import thinwire.torch.backend  # noqa: F401
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(fork.Process)

        @classmethod
        def _run(cls, *arguments: object, **named: object) -> None:
            take_in_place_of_gloo(backend, dist)
            super()._run(*arguments, **named)

    Suite.__name__ = Suite.__qualname__ = "TestDistBackendWithSpawn"  # torch's name for it
    return [Suite]


def take_in_place_of_gloo(backend: str, dist: types.ModuleType) -> None:
    """From now on, groups of this process that name Gloo have the backend instead."""
    init = dist.init_process_group

    def other(named: str | None = None, *arguments: object, **options: object) -> None:
        named = options.pop("backend", named)
        init(backend if named == "gloo" else named, *arguments, **options)

    dist.init_process_group = other


def prepare_c10d(backend: str, _folder: str) -> Classes:
    """Return the suite's classes, whose tests are all forked from this process."""
    os.environ |= {"THINWIRE_CODEC": "fp32", "THINWIRE_SCOPE": "all"}
    import thinwire.torch.backend  # noqa: F401
    import torch.distributed as dist
    from thinwire.torch.process_group import ProcessGroup
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    suite = importlib.import_module("test_c10d_gloo")
    MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(fork.Process)
    if backend == "thinwire":
        take_in_place_of_gloo(backend, dist)

        def create(
            _case: object, store: dist.Store, rank: int, size: int, _options: object
        ) -> ProcessGroup:
            group = ProcessGroup("fp32", scope="all")
            group.connect(store, rank, size, timedelta(seconds=50))
            dist.barrier(group=group)
            return group

        suite.ProcessGroupGlooTest._create_process_group_gloo = create
    return [
        each for each in vars(suite).values()
        if isinstance(each, type) and issubclass(each, unittest.TestCase)
        and each.__module__ == suite.__name__
    ]  # fmt: skip


def take_in_place_of_torchfts(*modules: types.ModuleType) -> None:
    """Replace these modules' ProcessGroupGloo, torchft's group over Gloo, by our group."""
    from thinwire.torchft import ThinwireProcessGroup

    class Ours(ThinwireProcessGroup):
        def __init__(self, timeout: object = None) -> None:
            seconds = timeout.total_seconds() if timeout is not None else None
            super().__init__("fp32", timeout_s=seconds)

    Ours.__name__ = "ProcessGroupGloo"
    for module in modules:
        module.ProcessGroupGloo = Ours


def prepare_torchft(backend: str, _folder: str) -> Classes:
    os.environ |= {"THINWIRE_CODEC": "fp32"}
    from torchft import process_group, process_group_test

    if backend == "thinwire":
        take_in_place_of_torchfts(process_group, process_group_test)
    return [
        process_group_test.ProcessGroupTest, process_group_test.CreateStoreClientTest,
        process_group_test.NormalGlooMultiPgTest,
    ]  # fmt: skip


def prepare_diloco(backend: str, _folder: str) -> Classes:
    os.environ |= {"THINWIRE_CODEC": "fp32"}
    from torchft import local_sgd_integ_test

    if backend == "thinwire":
        take_in_place_of_torchfts(local_sgd_integ_test)
    return [local_sgd_integ_test.LocalSGDIntegTest]


def prepare_horovod(_backend: str, _folder: str) -> Classes:
    """Return the suite's class. Each test runs on all ranks, and has the worst outcome of them."""
    os.environ |= {"THINWIRE_CODEC": "fp32", "OMP_NUM_THREADS": "1"}
    import thinwire.horovod
    import torch

    # Tests make every optimizer of torch.optim for a model with biases, which this one refuses.
    torch.optim.Muon.__module__ = "newer than Horovod"
    horovod = types.ModuleType("horovod")
    horovod.torch = thinwire.horovod
    sys.modules |= {"horovod": horovod, "horovod.torch": thinwire.horovod}
    sys.modules["common"] = helpers = types.ModuleType("common")  # Horovod's needs all of it
    helpers.mpi_env_rank_and_size = lambda: (0, 1)
    helpers.skip_or_fail_gpu_test = lambda test, message: test.skipTest(message)
    helpers.temppath = temporary_path
    suite = importlib.import_module("test_torch")

    class TorchTests(suite.TorchTests):
        def run(self, result: unittest.TestResult) -> None:
            name = f"TorchTests.{self._testMethodName}"
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            with processes() as start:
                pipes = [
                    start(run_on_rank, suite.TorchTests, name, rank, port) for rank in range(RANKS)
                ]
                ends = [pipe.recv() for pipe in pipes]
            result.skipped += [(self, text) for end, text in ends if end == "skipped"]
            result.failures += [(self, text) for end, text in ends if end == "failed"]

    return [TorchTests]


@contextmanager
def temporary_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/file"


@contextmanager
def processes() -> Iterator[Callable[..., Connection]]:
    """Yield a function that starts a process, forked from this one, and returns the pipe whose
    other end the process's function gets as its last argument. Kills all processes at the end."""
    started = []

    def start(function: Callable[..., None], *arguments: object) -> Connection:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=function, args=(*arguments, theirs))
        process.start()
        theirs.close()
        started.append(process)
        return ours

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.join()


def run_on_rank(
    case: type[unittest.TestCase], name: str, rank: int, port: int, pipe: Connection
) -> None:
    """Run run_one() as a rank started by Horovod's launcher and torchrun."""
    os.environ |= {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(RANKS), "RANK": str(rank),
        "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    run_one(case, name, pipe)


SUITES = {
    "distributed": prepare_distributed, "torchft": prepare_torchft, "diloco": prepare_diloco,
    "c10d": prepare_c10d, "horovod": prepare_horovod,
}  # fmt: skip
IN_WHEELS = ("distributed", "torchft", "diloco")
WITHOUT_GLOO = ("horovod",)


def tests_of(classes: Classes, pattern: str) -> dict[str, type]:
    """Return the class of each test, by "class.test"."""
    found = {f"{each.__name__}.{name}": each for each in classes for name in dir(each)}
    return {
        name: each for name, each in found.items() if fnmatch.fnmatch(name, f"*.test_{pattern}")
    }


def run_one(case: type[unittest.TestCase], name: str, pipe: Connection) -> None:
    """Run a test in this process, and send its outcome."""
    result = unittest.TestResult()
    unittest.TestSuite([case(name.partition(".")[2])]).run(result)
    bad = [*result.failures, *result.errors]
    end = "skipped" if result.skipped else "failed" if bad else "passed"
    pipe.send((end, "".join(text for _, text in bad)[-2000:]))
    pipe.close()
    os._exit(0)


def run_suite(suite: str, backend: str, names: list[str], jobs: int) -> dict[str, tuple[str, str]]:
    """Return every test's outcome and text. Each test has its own process, forked from this one,
    which has imported everything."""
    ends: dict[str, tuple[str, str]] = {}
    waiting, running = list(reversed(names)), {}
    with tempfile.TemporaryDirectory() as folder:
        cases = tests_of(SUITES[suite](backend, folder), "*")
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=run_one, args=(cases[name], name, theirs))
                process.start()
                theirs.close()
                running[ours] = name, process, time.monotonic() + LIMIT_S + 30
            done = wait(list(running), 1)
            late = [pipe for pipe, (*_, end) in running.items() if time.monotonic() > end]
            for pipe in {*done, *late}:
                name, process, _ = running.pop(pipe)
                try:
                    ends[name] = pipe.recv() if pipe in done else ("failed", "it hangs")
                except EOFError:
                    ends[name] = "failed", "its process died"
                process.kill()
                process.join()
                print(f"{suite} {backend} {name}: {ends[name][0]}", flush=True)
    return ends


def compare(suite: str, pattern: str, jobs: int) -> bool:
    names = list(tests_of(SUITES[suite]("gloo", "/tmp"), pattern))
    if suite not in WITHOUT_GLOO:
        theirs = run_suite(suite, "gloo", names, jobs)
        names = [name for name in names if theirs[name][0] == "passed"]
    ours = run_suite(suite, "thinwire", names, jobs)
    if suite in WITHOUT_GLOO:
        names = [name for name in names if ours[name][0] != "skipped"]
    failed = {name: ours[name][1] for name in names if ours[name][0] != "passed"}
    run = "run" if suite in WITHOUT_GLOO else "gloo passes"
    print(f"{suite}: {run} {len(names)}, thinwire passes {len(names) - len(failed)} of these")
    for name, text in failed.items():
        print(f"- {name}: {reason_of(suite, name) or text}")
    return all(reason_of(suite, name) for name in failed)


def reason_of(suite: str, name: str) -> str | None:
    known = KNOWN.get(suite, {}).items()
    return next((why for each, why in known if fnmatch.fnmatch(name, f"*.{each}")), None)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*", choices=SUITES, default=IN_WHEELS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*")
    parser.add_argument("--sources", help="a folder with the files of suites that no wheel has")
    arguments = parser.parse_args()
    if arguments.sources:
        sys.path.insert(0, arguments.sources)
    return 0 if all([compare(s, arguments.only, arguments.jobs) for s in arguments.suites]) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations" / "python"))
    sys.exit(main())
