"""The first reason of a failure wins: every rank raises it in the first backward pass, whichever
bucket caused it."""

import pytest
import thinwire
import torch
import torch.distributed as dist
from policies import Wrapped
from ranks import outcomes_of, run
from thinwire.torch import State, compress, hook
from torch.nn.parallel import DistributedDataParallel


class Tail(torch.nn.Module):
    """A dense layer, whose gradients come first, behind an embedding, whose gradient comes last."""

    def __init__(self, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(50, 96, sparse=sparse, dtype=dtype)
        self.dense = torch.nn.Linear(96, 96)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embed(rows).float()).square().sum()


def one_backward(rank: int, guilty: tuple[int, ...], kind: str):
    """Return the errors of the first backward pass and of the second."""
    dtype = {"sparse": torch.float32, "float64": torch.bfloat16}[kind]
    if rank in guilty and kind == "float64":
        dtype = torch.float64
    # Ranks may have different dtypes here, so DDP must not broadcast the parameters.
    ddp = DistributedDataParallel(Tail(kind == "sparse", dtype), init_sync=False)
    ddp.register_comm_hook(State("int4", min_bytes=0, timeout_s=100), hook)
    errors = []
    for _ in range(2):
        with pytest.raises(thinwire.Error) as caught:
            ddp(torch.tensor([1, 2])).backward()
        errors.append((type(caught.value).__name__, str(caught.value)))
    dist.barrier()
    return errors


@pytest.mark.parametrize("guilty, kind, words", [
    ((0, 1), "sparse", "layout torch.sparse_coo"),
    ((0, 1), "float64", "dtype torch.float64"),
    ((1,), "float64", "dtype torch.float64"),
])  # fmt: skip
def test_an_error_in_a_later_bucket_is_the_reason_on_every_rank(guilty, kind, words):
    for first, second in run(one_backward, guilty, kind):
        name, message = first
        assert name == "InvalidArgumentError", message
        assert words in message and "expected" in message
        assert any(f"rank {rank}, tensor 'bucket1" in message for rank in guilty), message
        assert second[0] == name and words in second[1]


def refuse_at_compress(rank: int):
    ddp = DistributedDataParallel(Tail(sparse=True))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'embed\.weight'.*sparse"):
        compress(ddp)
    ddp = DistributedDataParallel(Tail(dtype=torch.float64))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'embed\.weight'.*float64"):
        compress(ddp)
    names = {p: name for name, p in ddp.module.named_parameters()}
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'embed\.weight'.*float64"):
        State("int4", names=names)
    sparse = Tail(sparse=True)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'embed\.weight'.*sparse"):
        Wrapped(torch.optim.SGD(sparse.parameters(), lr=0.1), sparse)
    frozen = Tail(sparse=True)
    frozen.embed.requires_grad_(False)  # has no gradient at all
    compress(DistributedDataParallel(frozen))


def test_a_known_model_is_checked_before_any_backward():
    run(refuse_at_compress)


class Tables(torch.nn.Module):
    """Makes sparse gradients if `sparse` is set, which no check at the start can foresee."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Parameter(torch.randn(600, 600))  # a bucket of its own
        self.dense = torch.nn.Linear(600, 600)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.embedding(rows, self.table, sparse=self.sparse)
        return self.dense(found).square().sum()


def late_sparse(rank: int):
    """One rank refuses the last bucket of a backward pass, after another bucket has been sent."""
    model = Tables()
    optimizer = Wrapped(
        torch.optim.SGD(model.parameters(), lr=0.1), model, codec="int4", min_bytes=0, timeout_s=100
    )
    for step in range(2):
        model.sparse = rank == 1 and step == 1
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).backward()
        optimizer.step()
    optimizer.finish()


def test_an_optimizers_error_is_the_reason_on_every_rank():
    for outcome in outcomes_of(late_sparse):
        assert outcome.error == "InvalidArgumentError", outcome.trace
        assert "rank 1" in outcome.message and "sparse" in outcome.message
