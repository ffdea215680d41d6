"""How this process ends."""

from __future__ import annotations

import sys
import threading


def is_ending() -> bool:
    """Whether the main thread has ended, so that exit handlers run, or soon will."""
    return not threading.main_thread().is_alive()


def fatal_exception() -> BaseException | None:
    """The uncaught exception that ends this process; None while it goes on, and after a normal end.

    Between the main thread's end and the exit handlers the interpreter prints an uncaught exception
    and keeps it (sys.last_exc, before Python 3.12 sys.last_value). An interactive session keeps
    those of earlier commands there, which end nothing."""
    if not is_ending() or hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
