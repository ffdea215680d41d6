"""Bytes that change on the network: with checksum=True both ends get a typed error, whichever way
the tensor went, and no wrong sum before it."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
from actor import Actor, Report
from board import Board
from cases import Case, draw
from proxy import Proxy
from ranks import HANG_S, started, values_of
from thinwire.comm import Communicator

TIMEOUT_S = 100.0
ADDRESS = "mesh/0"  # the end of the key that holds rank 0's address


class Detour(Board):
    """Gives rank 1 the proxy's port instead of rank 0's."""

    def get(self, key: str, timeout_s: float) -> bytes:
        value = super().get(key, timeout_s)
        if not key.endswith(ADDRESS):
            return value
        (self._folder / "address").write_bytes(value)
        host, _, fingerprint = value.split()
        while not (self._folder / "detour").exists():
            time.sleep(0.001)
        port = (self._folder / "detour").read_bytes()
        return b" ".join((host, port, fingerprint))


class Staying(Actor):
    """Closes only when both ranks have their errors. On a busy machine the first rank's connections
    may otherwise end before its failure message has arrived: a peer waits a quarter of a second for
    it."""

    def _give_up(self, communicator: Communicator) -> None:
        (self._folder / f"rank{self._rank}.failed").touch()
        while len(list(self._folder.glob("rank*.failed"))) < 2:
            time.sleep(0.001)
        super()._give_up(communicator)


def be(case: Case, rank: int, folder: Path) -> Report:
    board = (Detour if rank == 1 else Board)(folder, lambda operation, key: None)
    return Staying(case, rank, folder, board).run()


def write_whole(path: Path, value: bytes) -> None:
    path.with_suffix(".part").write_bytes(value)
    path.with_suffix(".part").rename(path)


def wait_for_address(folder: Path) -> tuple[str, int]:
    """Return rank 0's host and port, once rank 1 has read them."""
    end = time.monotonic() + HANG_S
    path = folder / "address"
    while not path.exists() or len(path.read_bytes().split()) != 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    host, port, _ = path.read_bytes().split()
    return host.decode(), int(port)


@pytest.mark.parametrize("phase, hit", [("raw", 7), ("direct", 6), ("chunks", 50), ("chunks", 51)])
def test_a_flipped_bit_is_data_loss_on_both_ranks(tmp_path, phase, hit):
    seed = int.from_bytes(os.urandom(3), "big")
    drawn = draw(seed, phase, "SIGKILL", TIMEOUT_S)
    case = dataclasses.replace(
        drawn,
        world=2,
        victim=-1,
        checksum=True,
        chunk_bytes=64 << 10,
        transport="gloo",
        loops=1,
    )  # the proxy sees this rank's bytes
    with started(be, [(case, rank, tmp_path) for rank in range(2)]) as ranks:
        proxy = Proxy(wait_for_address(tmp_path), hit)
        write_whole(tmp_path / "detour", str(proxy.port).encode())
        print(case)
        for report in values_of(ranks):
            assert report.error == "DataLossError", f"{case}\n{report}"
            assert not report.wrong, f"{case}\n{report}"
            for words in ("what rank 0 sent to rank 1 came damaged", "tensor 'tensor"):
                assert words in report.message, f"{case}\n{report}"
        assert proxy.damaged.is_set()
        proxy.close()
