"""Checks of the arguments of public calls. The errors name the argument, its value, and what was
expected."""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any, TypeGuard

from thinwire.errors import InvalidArgumentError


def wrong(name: str, got: object, expected: str) -> InvalidArgumentError:
    """Return the error for an argument. Its value is shortened, because it may be a state dict."""
    return InvalidArgumentError(f"{name} is {reprlib.repr(got)}, expected {expected}")


def check_kind(name: str, got: object, kind: Any, expected: str) -> None:
    """InvalidArgumentError unless `got` has this type, or one of these types."""
    if not isinstance(got, kind):
        raise wrong(name, got, expected)


def check_flag(name: str, got: object) -> None:
    """InvalidArgumentError unless `got` is True or False."""
    if not isinstance(got, bool):
        raise wrong(name, got, "True or False")


def check_call(name: str, got: object) -> None:
    """InvalidArgumentError unless `got` is callable or None."""
    if got is not None and not callable(got):
        raise wrong(name, got, "a function, or None")


def is_text(got: object) -> bool:
    """Return whether it can be a C string: text without NUL that can be encoded as UTF-8 (text from
    the environment may have other bytes)."""
    return isinstance(got, str) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in got)


def is_number(got: object) -> bool:
    """Return whether it is an int or a float, and not a bool."""
    return isinstance(got, (int, float)) and not isinstance(got, bool)


def is_finite(got: object) -> bool:
    """Return whether it is a number, neither infinite nor NaN."""
    return is_number(got) and -math.inf < got < math.inf


def plain(got: Any) -> Any:
    """Return an integer of another type than int, such as numpy's, as an int, because JSON and
    timedelta take no other; anything else as it is."""
    return int(got) if is_whole(got) else got


def is_whole(got: object) -> TypeGuard[int]:
    """Return whether it is an integer, also of numpy, and not a bool."""
    if type(got) is int:  # nearly always; the check of the abstract class takes longer
        return True
    return isinstance(got, numbers.Integral) and not isinstance(got, bool)


def as_int(name: str, got: Any, least: int, most: int | None = None) -> int:
    """Return an integer, also of numpy, as an int. InvalidArgumentError unless it is one from
    `least` to `most`, and not a bool."""
    if is_whole(got) and least <= got and (most is None or got <= most):
        return int(got)
    to = "on" if most is None else f"to {most}"
    raise wrong(name, got, f"a whole number from {least} {to}")
