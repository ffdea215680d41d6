#!/usr/bin/env python3
"""Writes docs/reference/settings.md from the list in integrations/python/thinwire/options.py.

Run it after a change of that list; a test compares the file with what this script would write."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "integrations" / "python"))

from thinwire import options  # noqa: E402
from thinwire.options import Option  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "settings.md"

_INTRODUCTION = """\
# Settings

<!-- scripts/settings.py writes this file from integrations/python/thinwire/options.py. -->

In Python an argument goes before the environment, and the environment before the default. The
arguments are those of `compress` and `State`; `all_reduce` takes `codec` and
`strict`, and goes by the environment otherwise. An unknown `THINWIRE_*` name is a warning that
names the nearest known one. `thinwire doctor` prints the variables that are set.

`compress` has more options, each for some models: `feedback` ([residuals](../tutorial/fsdp2.md)),
`gather`, `reference`, `replicas` and `inner` under FSDP2; `clip_value` and `clip_norm` under DDP;
`delay` and `find_unused_parameters` for plain modules with `optimizer=`; `warm_up_steps` under DDP
and with `optimizer=`.

The C library reads no environment. A C program calls `tw_options_init` and sets the fields of
`tw_options` that it needs; zero stands for the default. A program that was compiled against an
older, shorter `tw_options` keeps working with a newer library: the fields that it lacks have their
defaults. A newer program works with an older library as long as it leaves the new fields zero.
The [NCCL shim](../how-to/nccl-shim.md) has no other caller than the environment, and reads its own
variables.

The ranks compare, before they connect, what must be equal: a difference is a `MismatchError`
(`TW_MISMATCH`) on every rank that names both values.

"""
_COLUMNS = (
    "Setting", "C field", "Python argument", "Environment", "Default", "Equal on all ranks?",
    "Meaning",
)  # fmt: skip
_NONE = "-"


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names) or _NONE


def _row(option: Option) -> str:
    name = option.setting or option.field or option.variables[0]
    cells = (
        name,
        _code(f"{option.c_type} {option.field}") if option.field else _NONE,
        _code(option.setting) if option.argument else _NONE,
        _code(*option.variables),
        option.default,
        option.equal,
        option.meaning,
    )
    return _line(cells)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The text of docs/reference/settings.md."""
    lines = [_line(_COLUMNS), _line(("---",) * len(_COLUMNS)), *map(_row, options.OPTIONS)]
    return _INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
