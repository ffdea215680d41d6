"""Every code block of README.md and docs/ is tried: Python on two ranks, C by the compiler, shell
commands against the make targets and the command line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import run, run_program
from thinwire import cli

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose blocks build on one another. Tests of their own run these.
ELSEWHERE = {
    "docs/how-to/migrate.md": "tests/integrations/python/test_migration.py",
    "docs/guides/add-a-framework.md": "tests/integrations/python/test_guide.py",
}
# Guides for changing the library show parts of C++ files that a reader is to write.
SKETCHES = ("docs/guides/", "docs/decisions.md", "docs/architecture.md")
# Drawings and texts, which are not code.
INERT = {"mermaid", "{eval-rst}", "text"}
OPTIONAL = ("lightning", "accelerate", "transformers", "ray", "torchft")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for match in re.finditer(r"^```(\S*)[^\n]*\n(.*?)^```", text, re.S | re.M):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TRIED = [b for b in BLOCKS if b.page not in ELSEWHERE and not b.page.startswith(SKETCHES)]


def of(*languages: str) -> list[Block]:
    return [block for block in TRIED if block.language in languages]


def test_there_are_blocks_of_every_kind():
    assert len(of("python")) > 15 and len(of("sh")) > 5 and len(of("c")) >= 2


def test_every_block_has_a_language_that_is_tried():
    others = {str(b): b.language for b in TRIED if b.language not in {"python", "sh", "c"} | INERT}
    assert others == {}


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_is_tried_elsewhere_is_named_there(page):
    assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text()


# Names that the pages' blocks assume. Each block gets fresh ones.
PRELUDE = """
import torch, torch.distributed as dist
import thinwire.torch as tw
from torch.nn.parallel import DistributedDataParallel
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
def sequential():
    return torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
    )
class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.net = torch.nn.Embedding(512, 256), sequential()
    def forward(self, x):
        return self.net(x + self.embedding(torch.arange(len(x))))
model = Embedded()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
def loss_of(module):
    x = torch.randn(64, 256)
    return (module(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
def train(module, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step()
class Writer:
    def add_scalar(self, tag, value, step):
        assert isinstance(value, (int, float))
writer = Writer()
tensor = torch.ones(1000)
"""


def needs(block: Block) -> list[str]:
    """Return the frameworks that a block uses, also by the names of its page's objects."""
    return [each for each in OPTIONAL if re.search(rf"\bthinwire\.{each}\b|\b{each}\.", block.text)]


def is_program(block: Block) -> bool:
    return "init_process_group(" in block.text


def is_excerpt(block: Block) -> bool:
    """Return whether the block is from a program in integrations/examples with a framework."""
    return bool(needs(block)) or "ray.train" in block.text


def run_in_rank(rank: int, text: str, name: str, folder: str) -> str:
    import torch.distributed as dist

    os.chdir(folder)
    os.environ.update(  # torchrun's variables
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    namespace = {"__name__": "__main__"}
    exec(PRELUDE, namespace)
    if "store" in text:
        namespace["store"] = dist.FileStore(str(Path(folder) / "meeting"), 2)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, name, "exec"), namespace)
        made = namespace.get("c")
        if made is not None:  # train with what the block compressed
            uses_ddp = "compress(ddp" in text
            namespace["train"](namespace["ddp" if uses_ddp else "model"])
            assert made.stats()["steps"] >= 3
            made.close()
        if "make" in namespace:  # `thinwire advise` imports it from its own file
            alone: dict = {}
            exec(text, alone)
            _, _, forward_and_backward = alone["make"]()
            forward_and_backward()
    return printed.getvalue()


@pytest.mark.parametrize(
    "block", [b for b in of("python") if not is_program(b) and not is_excerpt(b)], ids=str
)
def test_a_python_block_runs_on_two_ranks(block, tmp_path):
    run(run_in_rank, block.text, str(block), str(tmp_path))


@pytest.mark.parametrize("block", [b for b in of("python") if is_program(b)], ids=str)
def test_a_python_program_runs_on_two_ranks(block, tmp_path):
    (tmp_path / "train.py").write_text(block.text)
    printed = run_program(tmp_path / "train.py")
    loss = re.search(r"loss ([\d.]+)", printed)
    assert loss is not None and float(loss[1]) < 0.1
    ratio = re.search(r"([\d.]+) times fewer", printed)
    assert (ratio is None) == ("thinwire" not in block.text)
    assert ratio is None or float(ratio[1]) > 7


@pytest.mark.parametrize("block", [b for b in of("python") if is_excerpt(b)], ids=str)
def test_an_excerpt_is_of_a_program_that_is_run(block):
    """`make test-frameworks` runs these programs, which need a framework."""
    files = (ROOT / "integrations" / "examples").glob("*.py")
    programs = [re.sub(r"\s+", "", file.read_text()) for file in files]
    lines = [re.sub(r"\s+", "", line.partition("  #")[0]) for line in block.text.splitlines()]
    assert any(all(line in program for line in lines) for program in programs)


C_PRELUDE = """
#include <stdio.h>
#include <stdlib.h>
#include "integrations/c/thinwire.h"
void block(int rank, int size, const float* send, float* recv, size_t count, tw_comm* comm) {
  (void)rank; (void)size; (void)send; (void)recv; (void)count; (void)comm;
  {
"""


@pytest.mark.parametrize("block", of("c"), ids=str)
def test_a_c_block_compiles(block, tmp_path):
    file = tmp_path / "block.c"
    file.write_text(C_PRELUDE + block.text + "  }\n}\n")
    done = subprocess.run(
        ["cc", "-fsyntax-only", "-Werror", "-Wall", "-Wno-unused-variable", f"-I{ROOT}", str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
SYSTEM = {"pip", "export", "openssl", "chmod", "wg", "ip", "python", "cc"}
STARTERS = {"torchrun", "srun", "mpirun", "mpiexec"}


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip()]
    parts = [part for line in lines for part in re.split(r"&&|\|\|", line)]
    words = [shlex.split(part, comments=True) for part in parts]
    return [[w for w in each if not re.match(r"[A-Z_]+=", w)] for each in words if each]


def check_command(words: list[str]) -> None:
    first, *rest = words
    if first == "make":
        assert set(rest) <= TARGETS, f"no make target {rest}"
    elif first == "thinwire":
        cli._parser().parse_args(rest)  # SystemExit on an unknown word
    elif first in STARTERS:
        if "thinwire" in rest:
            check_command(rest[rest.index("thinwire") :])
        else:
            assert any(word.endswith(".py") for word in rest)
    else:
        assert first in SYSTEM, f"nobody knows the command {first}"


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_a_shell_block_names_what_there_is(block):
    for words in commands(block.text):
        if words:
            check_command(words)


def test_a_broken_block_is_seen(tmp_path):
    with pytest.raises(AssertionError, match="no make target"):
        check_command(["make", "cake"])
    with pytest.raises(SystemExit):
        check_command(["thinwire", "guess"])
    with pytest.raises(AssertionError, match="nobody knows"):
        check_command(["curl", "example.org"])
    with pytest.raises(AssertionError, match="AttributeError"):
        run(run_in_rank, "tw.no_such_name(ddp)", "broken", str(tmp_path))
