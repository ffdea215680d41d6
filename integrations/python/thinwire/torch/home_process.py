"""HomeProcess: the process that an object belongs to."""

from __future__ import annotations

import os

from thinwire.errors import InvalidArgumentError


class HomeProcess:
    """The process that made this. A forked child has a copy of everything and shares the
    connections, but has none of the threads, and locks that they held stay held."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def is_here(self) -> bool:
        """False in a forked child."""
        return self._process == os.getpid()

    def check(self, what: str) -> None:
        """InvalidArgumentError in a forked child; `what` is the object."""
        if not self.is_here():
            raise InvalidArgumentError(
                f"{what} is that of process {self._process}, and process {os.getpid()} is forked "
                "from it, without its threads; leave the collectives to the parent, or start "
                "processes by 'spawn', with a process group of their own"
            )
