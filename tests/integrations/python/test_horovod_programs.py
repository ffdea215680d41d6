"""The examples for Horovod's users on two ranks: programs with the structure of Horovod's own."""

from __future__ import annotations

import re
from pathlib import Path

from ranks import torchrun

EXAMPLES = Path(__file__).resolve().parents[3] / "integrations" / "examples"
PROGRAMS = {
    "horovod_digits.py": ["--epochs", "2", "--compression", "int4"],
    "horovod_benchmark.py": ["--iterations", "2", "--compression", "fp16"],
    "horovod_checkpoints.py": ["FOLDER", "--epochs", "2", "--compression", "int4"],
}
DRIVER = """
import runpy, sys
for program in {programs!r}:
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
"""


def test_the_examples_run_with_one_line_changed(tmp_path):
    """The processes start once for all examples. The last example is resumed."""
    programs = []
    for name, arguments in PROGRAMS.items():
        text = (EXAMPLES / name).read_text().split('"""', 2)[2]
        lines = [line for line in text.splitlines() if "thinwire" in line]
        assert lines == ["import thinwire.horovod as hvd  # was: import horovod.torch as hvd"]
        programs.append(
            [str(EXAMPLES / name), *(str(tmp_path) if a == "FOLDER" else a for a in arguments)]
        )
    programs.append([*programs[-1][:2], "--epochs", "3", "--compression", "int4"])
    (tmp_path / "driver.py").write_text(DRIVER.format(programs=programs))
    out = torchrun(tmp_path / "driver.py")
    accuracy = re.findall(r"accuracy (\d+) %", out)
    assert int(accuracy[-1]) > 60, out
    assert re.search(r"on 2 ranks [\d.]+", out), out
    losses = re.findall(r"epoch (\d) of (\d): loss ([\d.]+)", out)
    assert [loss[:2] for loss in losses] == [("1", "2"), ("2", "2"), ("3", "3")], out
    assert float(losses[2][2]) < float(losses[1][2]) < float(losses[0][2])
