"""A rank of tests/nodes/replicas.sh: makes int4 steps over nodes that it detects itself, and writes
the digest of all results."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
from thinwire import config
from thinwire.comm import Communicator

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.folder_store import FolderStore

NUMEL = 50_003


def main(folder: Path, steps: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    # Several chunks each, so that nothing goes through the direct path, which is flat.
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
