"""Place: a process among all of a job, and how its numbers are read from variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.errors import InvalidArgumentError

# Ports that are derived from a job's name: above those of services, below those that a kernel
# gives to outgoing connections.
_FIRST_PORT, _LAST_PORT = 15000, 31999
DEFAULT_PORT = 29500  # torch's own, where nothing tells jobs apart


@dataclass(frozen=True)
class Place:
    """address, port: where rank 0 listens for torch's rendezvous. source: which launcher said all
    that, in words."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    source: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size}, on its host {self.local_rank} of {self.local_size}, "
            f"by {self.source}; rank 0 listens on {self.address}:{self.port}"
        )

    def variables(self) -> dict[str, str]:
        """Those of torchrun, which torch.distributed.init_process_group reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Variables:
    """A launcher's variables. What is missing or no number is an InvalidArgumentError that names
    it, and the mend."""

    def __init__(self, environment: Mapping[str, str], launcher: str, mend: str) -> None:
        self._environment, self.launcher, self._mend = environment, launcher, mend

    def text(self, *names: str) -> str:
        """The first of these that is set."""
        for name in names:
            if value := self._environment.get(name):
                return value
        raise self.error(f"{' or '.join(names)} is not set")

    def number(self, *names: str) -> int:
        """The first of these that is set, as a whole number from 0."""
        text = self.text(*names)
        if not text.isdecimal():
            raise self.error(f"{' or '.join(names)} is {text!r}, expected a whole number from 0")
        return int(text)

    def get(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def error(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"started by {self.launcher}, but {what}; {self._mend}")

    def place(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        *,
        address: str | None = None,
        job: str | None = None,
    ) -> Place:
        """MASTER_ADDR and MASTER_PORT go before what the launcher says. address: rank 0's host, if
        the launcher tells; None: loopback, if all ranks are on one host. job: the same on all ranks
        of a job, and another one for other jobs, which keeps their ports apart."""
        for number, count, words in (
            (rank, size, "rank {} of {}"),
            (local_rank, local_size, "local rank {} of {}"),
        ):
            if number >= count:
                got = words.format(number, count)
                raise self.error(f"its variables say {got}, expected ranks from 0 to {count - 1}")
        named = self.get("MASTER_ADDR") or address
        if named is None and local_size < size:
            raise self.error(
                "nothing says on which host rank 0 runs (MASTER_ADDR is not set), and there are "
                f"{size} ranks, {local_size} of them here"
            )
        port = self.number("MASTER_PORT") if self.get("MASTER_PORT") else port_of(job)
        return Place(rank, size, local_rank, local_size, named or "127.0.0.1", port, self.launcher)


def port_of(job: str | None) -> int:
    """A port for a job's name."""
    if job is None:
        return DEFAULT_PORT
    return _FIRST_PORT + zlib.crc32(job.encode()) % (_LAST_PORT - _FIRST_PORT + 1)
