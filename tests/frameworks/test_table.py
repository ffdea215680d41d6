"""The table of docs/how-to/frameworks.md names the code that the tests run."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "frameworks.md"
HERE = Path(__file__).parent
PINS = (ROOT / "requirements.txt", HERE / "trainers.txt", HERE / "others.txt")


class Row(NamedTuple):
    framework: str
    lines: str
    codecs: str
    residuals: str
    tested_with: str
    run_by: str

    def files(self) -> list[Path]:
        return [PAGE.parent / link for link in re.findall(r"\]\(([^)]+)\)", self.run_by)]


def rows() -> list[Row]:
    text = re.search(r"^\| framework \| lines.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.M)[1]
    return [Row(*(cell.strip() for cell in line.split("|")[1:-1])) for line in text.splitlines()]


def name(row: Row) -> str:
    return re.sub(r"\W+", "-", row.framework)


def calls(cell: str) -> set[str]:
    """Return the names that a cell's code calls or imports."""
    code = " ".join(re.findall(r"`([^`]+)`", cell))
    return set(re.findall(r"(\w+)\(", code)) | set(re.findall(r"import ([\w.]+)", code))


def test_all_frameworks_have_a_row():
    modules = {"lightning", "accelerate", "transformers", "ray", "torchft"}
    assert modules <= {row.tested_with.split()[0] for row in rows()}


@pytest.mark.parametrize("row", rows(), ids=name)
def test_a_rows_code_is_in_what_runs_it(row):
    tests = [file for file in row.files() if "tests" in file.parts]
    assert tests and all(file.is_file() for file in row.files())
    text = "".join(file.read_text() for file in row.files())
    for called in calls(row.lines) | calls(row.residuals):
        assert called in text, f"none of {[str(file) for file in row.files()]} has {called}"
    for program in {file.stem for file in row.files()} - {file.stem for file in tests}:
        # An example's framework follows train_ in its name.
        said = program.removeprefix("train_")
        assert any(f'"{word}' in file.read_text() for file in tests for word in (program, said))


@pytest.mark.parametrize("row", rows(), ids=name)
def test_a_rows_version_is_the_pinned_one(row):
    package, version = row.tested_with.split()
    pinned = re.findall(
        rf"^{package}(?:\[\w+\])?==([\d.]+)", "".join(p.read_text() for p in PINS), re.M
    )
    assert [f"{pin}.".startswith(f"{version}.") for pin in pinned] == [True], pinned
