"""docs/how-to/migrate.md: each section's program runs on two ranks, before and after its diff."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import thinwire.horovod as hvd
import torch.distributed as dist
from ranks import run

pytestmark = pytest.mark.xdist_group("migration")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "migrate.md"
# Modules that cannot be installed here. A program that imports one before its diff is not run.
MISSING = ("horovod.torch",)


class Diff(NamedTuple):
    section: str
    text: str

    def without(self, sign: str) -> str:
        """Return the program after the diff (sign "-") or before it (sign "+")."""
        lines = [line for line in self.text.splitlines() if not line.startswith(sign)]
        return "\n".join(line[1:] for line in lines) + "\n"

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", self.section)


def diffs() -> Iterator[Diff]:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        for text in re.findall(r"^```diff\n(.*?)^```", section, re.S | re.M):
            yield Diff(section.partition("\n")[0], text)


DIFFS = list(diffs())


class Program(NamedTuple):
    title: str
    file: str
    port: int  # of the program's rendezvous
    alone: bool  # one process uses all devices


def programs(folder: Path) -> tuple[list[Program], list[dist.TCPStore]]:
    """Write the programs, each with its own store, served by this process like torchrun's agent."""
    found, stores = [], []
    for diff in DIFFS:
        for when, text in (("before", diff.without("+")), ("after", diff.without("-"))):
            if any(name in text for name in MISSING):
                continue
            file = folder / f"{diff}_{when}.py".lower()
            file.write_text(text)
            alone = "DataParallel(" in text and "DistributedDataParallel(" not in text
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            found.append(Program(f"{diff} {when}", str(file), stores[-1].port, alone))
    return found, stores


# Globals of the programs that ran. If they were freed, the last reference to a group might be their
# DDP model; torch then joins the group's threads while it holds the GIL, which those threads' hooks
# wait for.
_kept: list[dict] = []


def outputs(rank: int, listed: list[Program]) -> dict[str, str]:
    """Return what each program prints on this rank. Each program has its own rendezvous."""
    dist.destroy_process_group()  # the group of ranks.py
    found = {}
    for program in listed:
        if program.alone and rank > 0:
            continue
        os.environ.update(variables(rank, program))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            _kept.append(runpy.run_path(program.file, run_name="__main__"))
        found[program.title] = printed.getvalue()
        hvd.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def variables(rank: int, program: Program) -> dict[str, str]:
    """Return torchrun's variables."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(program.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    listed, _stores = programs(tmp_path_factory.mktemp("migration"))
    return tuple(run(outputs, listed))


def test_there_are_diffs():
    assert len({diff.section for diff in DIFFS}) == len(DIFFS) == 3


@pytest.mark.parametrize("diff", DIFFS, ids=str)
def test_both_programs_of_a_diff_learn(printed, diff):
    assert all(line[:1] in ("+", "-", " ") for line in diff.text.splitlines())
    before_is_missing = any(name in diff.without("+") for name in MISSING)
    for when in ["after"] if before_is_missing else ["before", "after"]:
        loss = re.fullmatch(r"loss ([\d.]+)\n", printed[0][f"{diff} {when}"])
        assert loss is not None and float(loss[1]) < 0.15, printed[0]
        assert printed[1].get(f"{diff} {when}", "") == ""  # only rank 0 prints
