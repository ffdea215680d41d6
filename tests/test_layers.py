"""The house rules that a compiler does not check: who includes whom, which names stay where."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = {
    "compress": {"compress"},
    "transport": {"transport", "compress/types.h", "compress/device.h"},
    "kernels": {"kernels", "compress"},
    "schedule": {"schedule", "kernels", "compress", "transport"},
    "integrations": {"integrations", "schedule", "kernels", "compress", "transport"},
}
SOURCES = [
    path
    for layer in LAYERS
    for path in sorted((ROOT / layer).rglob("*"))
    if path.suffix in {".cc", ".h", ".cu", ".cuh", ".c"}
]


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_includes_go_one_way_and_from_the_root(path):
    allowed = LAYERS[path.relative_to(ROOT).parts[0]]
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        if include.startswith("absl/"):
            assert path.suffix not in {".cu", ".cuh"}, "Abseil never meets nvcc"
            continue
        assert (ROOT / include).is_file(), f"{include} is not root-relative"
        assert include in allowed or include.split("/")[0] in allowed, (
            f"{include} from {name(path)}"
        )


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_foreign_names_stay_in_files_named_after_them(path):
    text = re.sub(r"//.*|/\*.*?\*/|\"[^\"\n]*\"", "", path.read_text(), flags=re.S)
    for word, pattern in {
        "gloo": r"\bgloo::|<gloo/",
        "nccl": r"\bnccl[A-Z]\w+|<nccl",
        "cuda": r"\bcuda[A-Z]\w+|<cuda",
        "torch": r"\btorch::|<torch/",
    }.items():
        if word not in path.name:
            assert not re.search(pattern, text), f"{word} in {name(path)}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_conditional_compilation_inside_functions(path):
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        # Code inside a function is indented, or follows an indented line.
        inside = number > 1 and lines[number - 2].startswith("  ")
        if re.match(r"#\s*(if|ifdef|ifndef|elif)\b", line) and inside:
            # Highway's targets are preprocessor values, and its rounding differs by target.
            assert "HWY_TARGET" in line, f"{name(path)}:{number}: {line}"


def test_the_library_exports_only_its_interface():
    library = pathlib.Path(
        os.environ.get("THINWIRE_LIBRARY", ROOT / "build/integrations/c/libthinwire.so")
    )
    if not library.is_file():
        pytest.skip(f"{library} is not built")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    )
    symbols = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
    assert symbols and all(symbol.startswith("tw_") for symbol in symbols), symbols
