"""Private names of torch are used in one file only: a new torch requires fixes in one place."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "integrations" / "python" / "thinwire"
PRIVATE = PACKAGE / "torch" / "private.py"
FILES = sorted(PACKAGE.rglob("*.py"))
# Not torch's: NamedTuple and ctypes structures have these public names.
PUBLIC = {"_asdict", "_fields", "_fields_", "_replace"}
# A module of torch without an underscore that torch's documentation does not list.
UNDOCUMENTED = {"distributed_c10d"}


def is_private(name: str) -> bool:
    return name in UNDOCUMENTED or (
        name.startswith("_") and not name.endswith("__") and name not in PUBLIC
    )


def own_names(tree: ast.AST) -> set[str]:
    """Return the private names that this file gives to its own attributes and methods."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return own


def foreign_private_names(source: str) -> list[str]:
    tree = ast.parse(source)
    own, found = own_names(tree), []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("thinwire"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names = [name for name in names if name != "__future__"]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            inside = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            names = [] if inside else [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [name for name in names if isinstance(name, str) and name not in own]
        found += [f"line {node.lineno}: {name}" for name in names if is_private(name)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_private_names(path):
    found = foreign_private_names(path.read_text())
    assert (path == PRIVATE) == bool(found), found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.distributed import distributed_c10d",
        "from torch._C import _distributed_c10d",
        "torch.distributed.distributed_c10d.something()",
        "v = tensor._version",
        "hooks = module._forward_pre_hooks",
        "x = getattr(ddp, '_module_copies')",
    ],
)
def test_the_search_finds_them(line):
    assert foreign_private_names(line)


@pytest.mark.parametrize(
    "line", ["self._mine", "kept._replace(a=1)", "from thinwire import _library"]
)
def test_the_search_leaves_our_own_alone(line):
    assert not foreign_private_names(line)
