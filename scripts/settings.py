#!/usr/bin/env python3
"""Generates two texts from the dataclasses in integrations/python/thinwire/options.py: the types of
keyword arguments at the end of that file, and docs/reference/settings.md.

Run it after a change; a test compares both texts with the output of this script."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "integrations" / "python"))

from thinwire import options  # noqa: E402
from thinwire.options import Option  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "settings.md"
SOURCE = Path(options.__file__)

_INTRODUCTION = """\
# Settings

<!-- scripts/settings.py writes this file from integrations/python/thinwire/options.py. -->

This page lists all settings. In Python an argument takes precedence over the environment, and the
environment over the default. `compress`, `State` and `GradientExchange` take the arguments;
collectives take only `codec` and `strict`. An unknown `THINWIRE_*` name is a warning that names the
nearest known one.

A C program calls `tw_options_init` and sets the fields of `tw_options` that it needs; zero means
the default, and the library reads no environment variables. Programs and libraries of different
versions work together if the fields that the library lacks are zero. The [C reference](c.md) has
the fields that are not settings.

Before they connect, ranks compare the settings that must be equal: a difference is a
`MismatchError` (`TW_MISMATCH`) on every rank that names both values.

"""
_OF_MODELS = """
`compress` has more options, each only for some models. They are not read from the environment, and
must be equal on all ranks, except `replicas`, which is each rank's own group.

"""
_TYPES = '''

class Settings(TypedDict, total=False):
    """The settings that State, GradientExchange and Communicator take by keyword.

    None means the THINWIRE_* variable of the setting, else its default: docs/reference/settings.md
    lists them. All ranks use the same values, but for interface, trace and flight."""

{settings}

class Options(Settings, total=False):
    """The settings that compress() takes by keyword: some are of one kind of model only."""

{of_models}'''
_COLUMNS = (
    "Python argument", "C field", "Environment", "Default", "Equal on all ranks?", "Meaning",
)  # fmt: skip
_NONE = "-"


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names) or _NONE


def _row(option: Option) -> tuple[str, ...]:
    return (
        _code(option.setting) if option.argument else _NONE,
        _code(option.field) if option.field else _NONE,
        _code(*option.variables),
        option.default,
        option.equal,
        option.meaning,
    )


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(map(_line, [columns, ("---",) * len(columns), *rows])) + "\n"


def page() -> str:
    """The text of docs/reference/settings.md."""
    of_models = [
        (f"`{field.name}`", ", ".join(field.metadata["models"]), field.metadata["meaning"])
        for field in dataclasses.fields(options.ModelOptions)
    ]
    return (
        _INTRODUCTION
        + _table(
            _COLUMNS, [_row(each) for each in options.OPTIONS if each.setting or each.variables]
        )
        + _OF_MODELS
        + _table(("Option", "Of", "Meaning"), of_models)
    )


def _hints(fields: list[dataclasses.Field]) -> str:
    """Each argument may be None, whatever the setting's own type."""
    types = {field.name: field.type.removesuffix(" | None").replace("'", '"') for field in fields}
    return "".join(f"    {name}: {type_} | None\n" for name, type_ in types.items())


def source() -> str:
    """The text of options.py; its end is generated from the part before it."""
    settings = [
        field for field in dataclasses.fields(options.Config)
        if field.name in options.ARGUMENTS and field.name != "codec"  # an argument of its own
    ]  # fmt: skip
    types = _TYPES.format(
        settings=_hints(settings), of_models=_hints(dataclasses.fields(options.ModelOptions))
    )
    return SOURCE.read_text().partition(_TYPES[: _TYPES.index(":")])[0] + types


if __name__ == "__main__":
    SOURCE.write_text(source())
    PAGE.write_text(page())
