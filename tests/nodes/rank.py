"""A rank of tests/nodes/replicas.sh: steps of int4 by nodes, found by themselves. Writes the digest
of all its results."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np
from thinwire import config
from thinwire.comm import Communicator

NUMEL = 50_003
_PAUSE_S = 0.01


class FolderStore:
    """A file for each key, written whole and then renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(value)
        written.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        end = time.monotonic() + timeout_s
        while not self._path(key).exists():
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(_PAUSE_S)
        return self._path(key).read_bytes()


def main(folder: Path, steps: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ["LOCAL_SIZE"])
    # Several chunks, and nothing in one exchange outside the order, which is flat.
    settings = config.resolve(
        codec="int4", topology="hierarchical", timeout_s=120, chunk_bytes=65536, min_bytes=0
    )
    comm = Communicator(rank, size, FolderStore(folder), "nodes", settings)
    expected = f"hierarchical: {size // local_size} nodes of {local_size} ranks"
    if comm.topology() != expected:
        raise SystemExit(f"rank {rank} goes {comm.topology()}, expected {expected}")
    random = np.random.default_rng(rank)
    digest = hashlib.sha256()
    for _ in range(steps):
        values = random.standard_normal(NUMEL, dtype=np.float32)
        comm.start(values.ctypes.data, NUMEL, "float32", "mean", "g").wait()
        digest.update(values.tobytes())
    (folder / f"digest.{rank}").write_text(digest.hexdigest() + "\n")
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
