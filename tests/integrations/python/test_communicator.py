"""A Communicator needs a store, a rank and a world size, and no process group of torch."""

import os

import pytest
import thinwire
import torch
import torch.distributed as dist
from ranks import outcomes_of, run
from thinwire.torch.advanced import Communicator

from bench.folder_store import FolderStore

NUMEL = 100_000  # enough to be compressed


def open_store(kind: str, folder: str) -> dist.Store | FolderStore:
    return FolderStore(folder) if kind == "own" else dist.FileStore(f"{folder}/store")


def meet(rank: int, kind: str, folder: str) -> list[tuple[torch.Tensor, float]]:
    dist.destroy_process_group()  # run() makes a group; a communicator does not need it
    store, means = open_store(kind, folder), []
    for key in ("first", "second"):
        communicator = Communicator(store, rank, 2, key, "int8")
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(NUMEL, generator=generator)
        assert communicator.all_reduce(tensor, dist.ReduceOp.AVG) is None
        works = [communicator.all_reduce(torch.ones(8), name=n, async_op=True)
                 for n in ("a", "b")]  # fmt: skip
        assert [work.wait() for work in works] == [True, True]
        means.append((tensor, communicator.stats()["ratio"]))
        communicator.close()
    return means


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_ranks_meet_in_a_store_and_again_by_another_key(kind, tmp_path):
    first, second = run(meet, kind, str(tmp_path))
    expected = sum(torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in (0, 1))
    for (ours, ratio), (theirs, _) in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours - expected / 2).abs().max() < 0.05
        assert ratio > 3.5


def leave(rank: int, folder: str) -> tuple[str, str] | None:
    communicator = Communicator(dist.FileStore(f"{folder}/s"), rank, 3, "k", timeout_s=100)
    communicator.all_reduce(torch.ones(NUMEL))
    dist.barrier()
    if rank == 2:
        os._exit(3)
    with pytest.raises(thinwire.PeerLostError, match="rank 2") as caught:
        communicator.all_reduce(torch.ones(NUMEL))
    assert isinstance(communicator.error, thinwire.PeerLostError)
    alone = Communicator(None, 0, 1, "alone")
    tensor = torch.arange(3.0)
    alone.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(3.0))
    return str(caught.value)


def test_a_lost_rank_is_named_on_all_others(tmp_path):
    outcomes = outcomes_of(leave, str(tmp_path), world=3)
    assert [outcome.error for outcome in outcomes] == [""] * 3, [o.trace for o in outcomes]
    assert all("rank 2" in outcome.value for outcome in outcomes[:2])
