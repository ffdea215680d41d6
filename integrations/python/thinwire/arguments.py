"""Checks of what public calls are given. The errors say which argument it was, what came, and what
was expected."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from thinwire.errors import InvalidArgumentError


def wrong(name: str, got: object, expected: str) -> InvalidArgumentError:
    """The error of an argument; its value is cut short, since it may be a state dict."""
    return InvalidArgumentError(f"{name} is {reprlib.repr(got)}, expected {expected}")


def check_kind(name: str, got: object, kind: Any, expected: str) -> None:
    """InvalidArgumentError unless `got` is of the type, or of one of the types."""
    if not isinstance(got, kind):
        raise wrong(name, got, expected)


def check_flag(name: str, got: object) -> None:
    """InvalidArgumentError unless `got` is True or False."""
    if not isinstance(got, bool):
        raise wrong(name, got, "True or False")


def check_call(name: str, got: object) -> None:
    """InvalidArgumentError unless `got` can be called, or is None."""
    if got is not None and not callable(got):
        raise wrong(name, got, "a function, or None")


def is_text(got: object) -> bool:
    """Return whether it is text for C: without NUL, where C would end it, and in UTF-8, which not
    all bytes of the environment are."""
    return isinstance(got, str) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in got)


def is_number(got: object) -> bool:
    """Return whether it is an int or a float, and no bool."""
    return isinstance(got, (int, float)) and not isinstance(got, bool)


def is_finite(got: object) -> bool:
    """Return whether it is a number, and neither infinite nor NaN."""
    return is_number(got) and -math.inf < got < math.inf


def check_whole(name: str, got: object, least: int, most: int | None = None) -> None:
    """InvalidArgumentError unless `got` is an int in that range, and no bool."""
    if (
        isinstance(got, int)
        and not isinstance(got, bool)
        and least <= got
        and (most is None or got <= most)
    ):
        return
    to = "on" if most is None else f"to {most}"
    raise wrong(name, got, f"a whole number from {least} {to}")
