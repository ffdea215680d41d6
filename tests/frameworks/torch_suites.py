#!/usr/bin/env python3
"""Runs the test suites of other people that lie in wheels over the backend "thinwire", and compares
the tests that pass with those over Gloo: torch_suites.py [--jobs N] [--only PATTERN] [SUITE...]

distributed  torch.testing._internal.distributed.distributed_test, 3 ranks, codec fp32
torchft      torchft.process_group_test, with thinwire.torchft in place of torchft's Gloo

It needs expecttest, and torchft for its suite. A suite takes a quarter of an hour on two cores, so
`make test-torch` calls it and CI does not. It fails if a test that Gloo passes fails over thinwire
and is not in KNOWN, which gives the reason."""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from multiprocessing.connection import Connection, wait
from pathlib import Path

fork = multiprocessing.get_context("fork")

# Patterns of tests that pass over Gloo alone, and why.
_BY_NAME = "torch allows monitored_barrier for the backend named gloo alone"
KNOWN: dict[str, dict[str, str]] = {
    "distributed": {
        "test_monitored_barrier_gloo": _BY_NAME,
        "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    },
    # Their numbers differ from run to run.
    "torchft": {
        "test_collective_with_resiliency_*": "errored() gives the first failure, where the test "
        "expects the text 'aborted'",
    },
}
LIMIT_S = 100  # of a test


def prepare_distributed(backend: str, folder: str) -> list[type[unittest.TestCase]]:
    """The suite's class, whose tests choose what they do by BACKEND; so that stays Gloo's, and the
    default group alone has another backend."""
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
            init = dist.init_process_group
            dist.init_process_group = lambda **given: init(**given | {"backend": backend})
            super()._run(*arguments, **named)

    Suite.__name__ = Suite.__qualname__ = "TestDistBackendWithSpawn"  # torch's name of it
    return [Suite]


def prepare_torchft(backend: str, _folder: str) -> list[type[unittest.TestCase]]:
    """The suite's classes; over thinwire, our group stands where torchft's Gloo does."""
    os.environ |= {"THINWIRE_CODEC": "fp32"}
    from torchft import process_group, process_group_test

    if backend == "thinwire":
        from thinwire.torchft import ThinwireProcessGroup

        class Ours(ThinwireProcessGroup):
            def __init__(self, timeout: object = None) -> None:
                seconds = timeout.total_seconds() if timeout is not None else None
                super().__init__("fp32", timeout_s=seconds)

        Ours.__name__ = "ProcessGroupGloo"
        process_group.ProcessGroupGloo = process_group_test.ProcessGroupGloo = Ours
    return [
        process_group_test.ProcessGroupTest, process_group_test.CreateStoreClientTest,
        process_group_test.NormalGlooMultiPgTest,
    ]  # fmt: skip


SUITES = {"distributed": prepare_distributed, "torchft": prepare_torchft}


def tests_of(classes: list[type[unittest.TestCase]], pattern: str) -> dict[str, type]:
    """The class of each test, by "class.test"."""
    found = {f"{each.__name__}.{name}": each for each in classes for name in dir(each)}
    return {
        name: each for name, each in found.items() if fnmatch.fnmatch(name, f"*.test_{pattern}")
    }


def run_one(case: type[unittest.TestCase], name: str, pipe: Connection) -> None:
    """Run a test in this process, and send its end."""
    result = unittest.TestResult()
    unittest.TestSuite([case(name.partition(".")[2])]).run(result)
    bad = [*result.failures, *result.errors]
    end = "skipped" if result.skipped else "failed" if bad else "passed"
    pipe.send((end, "".join(text for _, text in bad)[-2000:]))
    pipe.close()
    os._exit(0)


def run_suite(suite: str, backend: str, names: list[str], jobs: int) -> dict[str, tuple[str, str]]:
    """Every test's end and text. A test has a process of its own, forked from this one, which has
    imported all."""
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
    theirs = run_suite(suite, "gloo", names, jobs)
    passed = [name for name in names if theirs[name][0] == "passed"]
    ours = run_suite(suite, "thinwire", passed, jobs)
    failed = {name: text for name, (end, text) in ours.items() if end != "passed"}
    print(f"{suite}: gloo passes {len(passed)}, thinwire {len(passed) - len(failed)} of these")
    for name, text in failed.items():
        print(f"- {name}: {reason_of(suite, name) or text}")
    return all(reason_of(suite, name) for name in failed)


def reason_of(suite: str, name: str) -> str | None:
    known = KNOWN[suite].items()
    return next((why for each, why in known if fnmatch.fnmatch(name, f"*.{each}")), None)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*")
    arguments = parser.parse_args()
    return 0 if all([compare(s, arguments.only, arguments.jobs) for s in arguments.suites]) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations" / "python"))
    sys.exit(main())
