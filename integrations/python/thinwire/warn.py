"""warn: warnings that point at the line of the user's program that led to them."""

from __future__ import annotations

import inspect
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """A UserWarning at the innermost caller that is outside this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
