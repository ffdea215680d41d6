"""pyproject.toml has an extra for every framework, at the tested versions, and with the name that
the documentation uses."""

import re
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FRAMEWORKS = tuple(ROOT / "tests" / "frameworks" / f"{name}.txt" for name in ("trainers", "others"))
PINNED = (*FRAMEWORKS, ROOT / "requirements.txt")


def requirements(lines: list[str]) -> list[Requirement]:
    return [Requirement(line) for line in lines if not line.startswith("#")]


def test_extras_admit_the_versions_that_are_tested():
    pins = {
        each.name: str(each.specifier).removeprefix("==")
        for file in PINNED
        for each in requirements(file.read_text().splitlines())
    }
    for extra, lines in EXTRAS.items():
        for each in requirements(lines):
            assert each.name in pins, f"{extra}: no test has {each.name}"
            assert each.specifier.contains(pins[each.name]), f"{extra}: {each} and its tests' pin"


def test_every_tested_framework_has_an_extra():
    wanted = {each.name for lines in EXTRAS.values() for each in requirements(lines)}
    tested = {
        each.name for file in FRAMEWORKS for each in requirements(file.read_text().splitlines())
    }
    assert tested <= wanted


def test_the_check_of_the_wheel_starts_every_example():
    cases = (ROOT / "scripts/wheel_check.sh").read_text().split("case $name in")[1]
    named = set(re.findall(r"\w+\.py", cases.split("*) echo")[0]))
    assert named == {file.name for file in (ROOT / "integrations/examples").glob("*.py")}


def test_documents_name_extras_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("integrations/**/*.md")]
    named = {
        extra
        for page in pages
        for found in re.findall(r"thinwire\[([\w,]+)\]", page.read_text())
        for extra in found.split(",")
    }
    assert named and named <= set(EXTRAS)
