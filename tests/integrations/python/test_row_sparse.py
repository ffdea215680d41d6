"""Row-sparse values of thinwire.kvstore: MXNet's checks, torch's sparse tensors, embeddings."""

import numpy as np
import pytest
import thinwire
import torch
from ranks import run_program
from thinwire import kvstore
from thinwire.torch import ParameterServerOptimizer

CHECKS = '''
"""The checks of MXNet's tests/nightly/dist_sync_kvstore.py, check_row_sparse_keys,
check_row_sparse_keys_with_zeros and check_big_row_sparse_keys, with its shapes and seeds."""
import sys
import numpy as np
import thinwire.kvstore as kvs
import torch

kv = kvs.create(sys.argv[1], timeout_s=100, slice_elements=4096)
rate, shape, big_shape, repeats = 2, (2, 3), (1200, 1200), 2
rank, workers = kv.rank, kv.num_workers


def check(value, expected):
    assert torch.equal(value.to_dense().float(), expected), (rank, value, expected)


def pull(key, size, dtype, row_ids):
    out = torch.zeros(size, dtype=dtype).to_sparse(1)
    kv.row_sparse_pull(key, out=out, row_ids=row_ids)
    return out


def check_updates(key, size, dtype, update_rows):
    gradient = torch.zeros(size, dtype=dtype)
    gradient[update_rows[rank]] = rank + 1
    for repeat in range(repeats):
        kv.push(key, gradient)  # whose rows of zeros are not sent, as of tostype("row_sparse")
        row_ids = torch.from_numpy(np.random.randint(size[0], size=size[0])).reshape(-1, 2)
        value = pull(key, size, dtype, row_ids)
        updated = torch.ones(size)
        for each in range(workers):
            updated[update_rows[each]] += (each + 1) * rate * (repeat + 1)
        expected = torch.zeros(size)
        expected[row_ids.flatten()] = updated[row_ids.flatten()]
        check(value, expected)


for dtype in (torch.float16, torch.float32):
    keys = [f"{name} of {dtype}" for name in ("9", "11", "97")]
    for key, size in zip(keys, (shape, shape, big_shape)):
        kv.init(key, torch.ones(size, dtype=dtype), row_sparse=True)
    kv.set_optimizer("add", learning_rate=1.0, rescale_grad=rate)
    check_updates(keys[0], shape, dtype, [[each % 2] for each in range(workers)])
    for key, size in ((keys[1], shape), (keys[2], big_shape)):
        kv.push(key, torch.zeros(size, dtype=dtype).to_sparse(1))
        check(pull(key, size, dtype, torch.arange(size[0])), torch.ones(size))
        check(pull(key, size, dtype, []), torch.zeros(size))
    np.random.seed(123)
    indices = np.argwhere(np.random.rand(big_shape[0]) < 0.3).flatten()
    np.random.seed(rank)
    check_updates(keys[2], big_shape, dtype, [indices[:: (r + 1) * 2] for r in range(workers)])
kv.barrier()
print(f"worker {rank} of {workers}: row_sparse", flush=True)
kv.close()
'''


def test_mxnets_checks_of_row_sparse_hold(tmp_path):
    """Over ZeroMQ; tests/schedule/store/rows_test.cc has other numbers of workers and servers."""
    program = tmp_path / "checks.py"
    program.write_text(CHECKS)
    printed = run_program(program, "dist_sync", world=4, environment={"THINWIRE_SERVERS": "2"})
    for rank in range(2):
        assert f"worker {rank} of 2: row_sparse" in printed


@pytest.fixture
def kv():
    store = kvstore.create("local", timeout_s=100)
    yield store
    store.close()


def sparse(rows, values, shape):
    parts = torch.tensor([rows]), torch.tensor(values)
    return torch.sparse_coo_tensor(*parts, shape, check_invariants=False)


def test_rows_are_pushed_and_pulled(kv):
    """Repeated rows are summed, as are those of several devices. Other rows stay as they are."""
    table = torch.arange(8.0).reshape(4, 2)
    kv.init("t", table, row_sparse=True)
    kv.init(["u", "v"], [table.to_sparse(1), torch.ones(3, 1).to_sparse(1)])
    kv.set_optimizer("add", lr=1.0)
    kv.push("t", sparse([3, 0, 3], [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], (4, 2)))
    dense = torch.zeros(4, 2)
    dense[1] = 0.5
    kv.push("t", [sparse([1], [[5.0, 5.0]], (4, 2)), dense])  # gradients of two devices
    expected = torch.tensor([[10.0, 21.0], [7.5, 8.5], [4.0, 5.0], [107.0, 209.0]])
    assert torch.equal(kv.row_sparse_pull("t", row_ids=range(4)), expected)
    ids = torch.tensor([[3, 0], [0, 3]], dtype=torch.int32)
    assert torch.equal(kv.row_sparse_pull("t", row_ids=ids), expected[ids.long()])
    out = torch.zeros(4, 2, dtype=torch.bfloat16)
    other = torch.full((4, 2), 9.0).to_sparse(1)
    assert kv.row_sparse_pull("t", out=[out, other], row_ids=torch.tensor([2, 2])) is None
    assert torch.equal(out.float(), torch.tensor([[0.0, 0], [0, 0], [4, 5], [0, 0]]))
    assert torch.equal(other.to_dense(), out.float())
    found = kv.row_sparse_pull(["u", "v"], row_ids=[[np.int64(1)], []])
    assert torch.equal(found[0], table[1:2]) and found[1].shape == (0, 1)
    assert kv.is_capable("row_sparse")


def test_rows_are_pushed_and_pulled_by_one_message(kv):
    """The pulled rows may differ from the pushed ones; dense keys travel in the same message."""
    table = torch.arange(8.0).reshape(4, 2)
    kv.init("t", table, row_sparse=True)
    kv.init("w", torch.ones(3))
    kv.set_optimizer("add", lr=1.0)
    gradient = sparse([3, 0, 3], [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], (4, 2))
    out, other, w = torch.full((4, 2), 9.0), torch.zeros(4, 2).to_sparse(1), torch.zeros(3)
    before = kv.bytes_sent()
    kv.pushpull("t", gradient, out=[out, other], row_ids=torch.tensor([[3, 1], [3, 3]]))
    kv.wait()
    together = kv.bytes_sent() - before
    table += torch.tensor([[10.0, 20.0], [0, 0], [0, 0], [101.0, 202.0]])
    assert torch.equal(out, torch.stack([*torch.full((1, 2), 9.0), table[1], out[2], table[3]]))
    assert torch.equal(other.to_dense()[[1, 3]], table[[1, 3]])
    assert other.to_dense()[[0, 2]].count_nonzero() == 0
    before = kv.bytes_sent()
    kv.push("t", gradient)
    kv.row_sparse_pull("t", out=out, row_ids=torch.tensor([[3, 1], [3, 3]]))
    assert kv.bytes_sent() - before == together + 32  # one header more
    kv.pushpull(["t", "w"], [gradient, torch.ones(3)], out=[out, w], row_ids=[[0], None])
    kv.wait()
    assert torch.equal(out[0], table[0] + torch.tensor([20.0, 40.0]))
    assert torch.equal(w, torch.full((3,), 2.0))
    kv.pushpull("t", torch.zeros(4, 2).to_sparse(1), out=out, row_ids=[])
    kv.wait()


def test_only_rows_are_sent(kv):
    kv.init("t", torch.zeros(10000, 64), row_sparse=True)
    kv.set_optimizer("add", lr=1.0)
    before = kv.bytes_sent()
    kv.push("t", sparse([7, 9000], [[1.0] * 64] * 2, (10000, 64)))
    kv.row_sparse_pull("t", row_ids=[7])
    assert kv.bytes_sent() - before < 2000


def test_wrong_rows_are_typed_errors_that_say_the_fix(kv):
    kv.init("t", torch.ones(4, 2), row_sparse=True)
    kv.init("w", torch.ones(4, 2))
    rows = sparse([0], [[1.0, 1.0]], (4, 2))
    for call, words in [
        (lambda: kv.init("x", torch.ones(4), row_sparse=True), "two dimensions"),
        (lambda: kv.init("x", torch.ones(2, 2, 2), row_sparse=True), "two dimensions"),
        (lambda: kv.init("x", torch.ones(4, 2).to_sparse()), "one sparse and one dense"),
        (lambda: kv.init("x", torch.ones(4, 2), row_sparse=1), "True or False"),
        (lambda: kv.push("t", torch.ones(4, 3)), "shape .4, 2., got"),
        (lambda: kv.push("t", torch.ones(4, 2).to_sparse()), "one sparse and one dense"),
        (lambda: kv.push("t", sparse([0], [[1.0, 1.0]], (5, 2))), "shape .4, 2., got"),
        (lambda: kv.push("t", sparse([0], [[1.0]], (4, 1))), "shape .4, 2., got"),
        (lambda: kv.push("t", rows.double()), "float32"),
        (lambda: kv.push("w", rows), "row_sparse=True"),
        (lambda: kv.pull("t", torch.ones(4, 2)), "row_sparse_pull"),
        (lambda: kv.pushpull("t", rows), "out and row_ids"),
        (lambda: kv.pushpull("t", rows, out=torch.ones(4, 2)), "out and row_ids"),
        (lambda: kv.pushpull("t", rows, row_ids=[0]), "out and row_ids"),
        (lambda: kv.pushpull("t", rows, torch.ones(4, 2), row_ids=[4]), "row 4"),
        (lambda: kv.pushpull("t", rows, torch.ones(4, 3), row_ids=[0]), "an out of shape"),
        (lambda: kv.pushpull("t", rows, torch.ones(4, 2).half(), row_ids=[0]), "one dtype"),
        (lambda: kv.pushpull("w", torch.ones(4, 2), row_ids=[0]), "'w' is dense"),
        (lambda: kv.pushpull(["t"], [rows], [torch.ones(4, 2)], row_ids=[0, 1]), "one for each"),
        (lambda: kv.row_sparse_pull("w", row_ids=[0]), "row_sparse=True"),
        (lambda: kv.row_sparse_pull("none", row_ids=[0]), "init"),
        (lambda: kv.row_sparse_pull("t"), "row_ids is None"),
        (lambda: kv.row_sparse_pull("t", row_ids=torch.ones(2)), "whole numbers"),
        (lambda: kv.row_sparse_pull("t", row_ids=[4]), "rows 0 to 3, got row 4"),
        (lambda: kv.row_sparse_pull("t", row_ids=[-1]), "got row -1"),
        (lambda: kv.row_sparse_pull("t", row_ids=[1 << 70]), "whole numbers"),
        (lambda: kv.row_sparse_pull("t", torch.ones(2, 2), row_ids=[0]), "an out of shape"),
        (lambda: kv.row_sparse_pull(["t"], row_ids=[[0], [1]]), "one for each key"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            call()
    kv.set_optimizer("add", lr=1.0)
    kv.push("t", rows)  # the store still works
    assert torch.equal(kv.row_sparse_pull("t", row_ids=[0, 1]), torch.tensor([[2.0, 2], [1, 1]]))


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SparseAdam, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    ],
)
def test_server_optimizers_are_torchs_of_sparse_gradients(make, numbers, kv):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50, 8))
    theirs = make([parameter], **numbers)
    kv.init(0, parameter.detach(), row_sparse=True)
    kv.set_optimizer(theirs)
    for _ in range(20):
        rows = torch.randint(50, (7,))
        gradient = sparse(rows.tolist(), torch.randn(7, 8).tolist(), (50, 8))
        parameter.grad = gradient.coalesce()
        theirs.step()
        kv.push(0, gradient)
        ours = kv.row_sparse_pull(0, row_ids=range(50))
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-6)


class Words(torch.nn.Module):
    """Has two tables, one of which is looked up only in every second step, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8, sparse=True)
        self.bag = torch.nn.EmbeddingBag(30, 8, sparse=True)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, ids, step):
        found = self.embedding(ids).mean(1)
        if step % 2 == 0:
            found = found + self.bag(input=ids % 30)
        return self.out(found)


def test_a_loop_with_sparse_embeddings_is_torchs():
    torch.manual_seed(3)
    theirs, ours = Words(), Words()
    ours.load_state_dict(theirs.state_dict())
    plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
    served = ParameterServerOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.5), ours, mode="local", codec=None, timeout_s=100
    )
    for step in range(12):
        ids = torch.randint(100, (16, 4))
        for group in (plain.param_groups[0], served.optimizer.param_groups[0]):
            group["lr"] = 0.5 if step < 6 else 0.1
        for model, optimizer in ((theirs, plain), (ours, served)):
            optimizer.zero_grad()
            model(ids, step).square().mean().backward()
            optimizer.step()
        assert ours.embedding.weight.grad.is_sparse
    served.wait()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    served.close()


TRAINED = '''
"""A table whose rows learn targets, looked up by each worker at random."""
import sys
import torch
from thinwire.torch import ParameterServerOptimizer

torch.manual_seed(0)
torch.set_num_threads(1)
target = torch.randn(50, 8)
model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 8))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
served = ParameterServerOptimizer(optimizer, model, mode=sys.argv[1], codec="int8", timeout_s=100)
torch.manual_seed(served.store.rank)
for step in range(80):
    ids = torch.randint(50, (64,))
    served.zero_grad()
    loss = (model(ids) - target[ids]).square().sum() / 64
    loss.backward()
    served.step()
    if step == 10:
        served.step()  # the same gradients again, without a forward between
served.wait()
served.store.barrier()
served.close()
print(f"worker {served.store.rank} loss {loss.item():.3f}", flush=True)
'''


@pytest.mark.parametrize("mode", ["sync", "ssp:staleness=2"])
def test_embeddings_train_in_every_mode(mode, tmp_path):
    program = tmp_path / "trained.py"
    program.write_text(TRAINED)
    printed = run_program(program, mode, world=3, environment={"THINWIRE_SERVERS": "1"})
    lines = [line.split() for line in printed.splitlines() if line.startswith("worker")]
    assert len(lines) == 2
    assert all(float(line[3]) < 3 for line in lines), f"the first loss is about 11: {printed}"
