"""integrations/examples: eight programs that differ from their uncompressed twins by one line and
its import. Both twins learn on two ranks, and the compressed one encodes what it sends."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import run_program

EXAMPLES = Path(__file__).resolve().parents[3] / "integrations" / "examples"
# A mark may give the line that the marked line replaces, after `was:`.
MARK = re.compile(r"^(?P<indent> *)(?P<line>.*?)  # thinwire(?:, was: (?P<was>.*))?$")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Example(NamedTuple):
    program: str
    package: str = "torch"  # the package that it needs
    launcher: tuple[str, ...] = TORCHRUN

    def __str__(self) -> str:
        return self.program


LISTED = [
    Example("ddp"), Example("fsdp2"), Example("replicate"), Example("plain_loop"),
    Example("accelerate_loop", "accelerate"), Example("hf_trainer", "transformers"),
    Example("lightning_trainer", "lightning", ()), Example("ray_train", "ray", ()),
]  # fmt: skip
RUN = [
    pytest.param(
        example, id=str(example),
        marks=pytest.mark.torch_alone if example.package == "torch" else pytest.mark.slow,
    )
    for example in LISTED
]  # fmt: skip


def text_of(example: Example) -> str:
    return (EXAMPLES / f"{example.program}.py").read_text()


def marked(example: Example) -> list[re.Match]:
    lines = text_of(example).splitlines()
    return [found for found in map(MARK.match, lines) if found is not None]


def without_thinwire(example: Example) -> str:
    """Return the twin: without the marked lines, or with the lines that they replace. The docstring
    is dropped, since it describes thinwire."""
    lines = []
    for line in text_of(example).partition('"""\n\n')[2].splitlines():
        found = MARK.match(line)
        if found is None:
            lines.append(line)
        elif found["was"]:
            lines.append(found["indent"] + found["was"])
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("example", LISTED, ids=str)
def test_a_twin_differs_by_one_line_and_its_import(example):
    lines = [found["line"] for found in marked(example)]
    assert len(lines) == 2
    importing, calling = lines
    assert re.match(r"(import|from) thinwire", importing)
    assert 'codec="int4"' in calling and "import" not in calling
    assert "thinwire" not in without_thinwire(example)
    compile(without_thinwire(example), example.program, "exec")


def loss_of(example: Example, program: Path, folder: Path, environment: dict[str, str]) -> float:
    if importlib.util.find_spec(example.package) is None:
        pytest.skip(f"{example.package} is not here: `make test-frameworks` installs it")
    if example.package == "torch":
        printed = run_program(program, environment=environment)
        return float(re.search(r"loss ([\d.]+)", printed)[1])
    done = subprocess.run(
        [sys.executable, *example.launcher, str(program)], capture_output=True, text=True,
        timeout=300, cwd=folder, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return float(re.search(r"loss ([\d.]+)", done.stdout)[1])


@pytest.mark.parametrize("example", RUN)
def test_a_program_learns_and_sends_int4(example, tmp_path):
    """A trace has the codec's stages if a rank compressed, and each rank did."""
    program = EXAMPLES / f"{example.program}.py"
    trace = {
        "THINWIRE_TRACE": str(tmp_path / "trace.json"),
        "RAY_prestart_worker_first_driver": "0",
    }
    assert loss_of(example, program, tmp_path, trace) < 0.1
    assert sorted(file.name for file in tmp_path.glob("trace.rank*.json")) == [
        "trace.rank0.json", "trace.rank1.json",
    ]  # fmt: skip
    for file in tmp_path.glob("trace.rank*.json"):
        assert '"ENCODE"' in file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN)
def test_the_twin_learns(example, tmp_path):
    program = tmp_path / "twin.py"
    program.write_text(without_thinwire(example))
    assert loss_of(example, program, tmp_path, {"RAY_prestart_worker_first_driver": "0"}) < 0.1
    assert not list(tmp_path.glob("trace*"))


# The twins again, with one word changed, or with one more line before a framework that accepts only
# torch's own backends. Before torch 2.14 there is an import too.
_LIGHTNING = 'DDPStrategy(process_group_backend="thinwire")'
_BEFORE = 'torch.distributed.init_process_group("thinwire")\n'
ONE_WORD = {
    "ddp": {'"gloo"': '"thinwire"'},
    "fsdp2": {'"gloo"': '"thinwire"'},
    "replicate": {'"gloo"': '"thinwire"'},
    "accelerate_loop": {"accelerator = ": f"{_BEFORE}accelerator = "},
    "hf_trainer": {"arguments = ": f"{_BEFORE}arguments = "},
    "lightning_trainer": {
        'strategy="ddp"': f"strategy={_LIGHTNING}",
        "import torch\n": "import torch\nfrom lightning.pytorch.strategies import DDPStrategy\n",
    },
}


@pytest.mark.parametrize("example", [each for each in RUN if each.values[0].program in ONE_WORD])
def test_a_twin_with_one_word_changed_learns_and_sends_int4(example, tmp_path):
    program, text = tmp_path / "twin.py", without_thinwire(example)
    for word, other in ONE_WORD[example.program].items():
        assert text.count(word) == 1
        text = text.replace(word, other)
    program.write_text("import thinwire.torch.backend\n" + text)
    trace = {"THINWIRE_TRACE": str(tmp_path / "trace.json")}
    assert loss_of(example, program, tmp_path, trace) < 0.1
    for rank in range(2):
        assert '"ENCODE"' in (tmp_path / f"trace.rank{rank}.json").read_text()
