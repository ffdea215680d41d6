"""ParameterServerOptimizer: torch's loops in every mode, pushes in backward(), shared batches."""

import copy
import io

import pytest
import thinwire
import torch
from ranks import (
    reserved_port,
    run_program,
    started_programs,
    values_of,
    variables,
)
from thinwire.torch import ParameterServerOptimizer

RATES = '''
"""Two epochs with rates of their own, of which worker 1 has a long one first."""
import sys
import torch
from thinwire.torch import ParameterServerOptimizer

net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
served = ParameterServerOptimizer(optimizer, net, mode=sys.argv[1], timeout_s=100,
                                  overlap=sys.argv[2] == "overlap")
for epoch, steps in enumerate((2, 6) if served.store.rank == 0 else (40, 6)):
    optimizer.param_groups[0]["lr"] = 1e-3 / (epoch + 1)
    for _ in range(steps):
        served.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        served.step()
    served.wait()
print("done", flush=True)
served.close()
'''


@pytest.mark.parametrize("overlap", ["overlap", "step"])
def test_a_rate_by_epoch_in_ssp_waits_for_no_gradient(overlap, tmp_path):
    """Worker 0 waits for the new rate while the other makes more updates than the bound allows."""
    program = tmp_path / "rates.py"
    program.write_text(RATES)
    printed = run_program(
        program, "ssp:staleness=1", overlap, world=3, environment={"THINWIRE_SERVERS": "1"}
    )
    assert printed.count("done") == 2, printed


SHARING = '''
"""Trains on what share() hands out, at a speed of its own; says which samples a step had."""
import sys, time
import torch
from thinwire.torch import ParameterServerOptimizer

net = torch.nn.Linear(1, 1)
served = ParameterServerOptimizer(torch.optim.SGD(net.parameters(), lr=1e-6), net,
                                  mode=sys.argv[1], codec=None, timeout_s=100)
data = [(torch.tensor([float(i)]), i) for i in range(100)]
for x, numbers in served.share(data, batch_size=5, epochs=2):
    served.zero_grad()
    net(x).square().mean().backward()
    if served.store.rank == 1:
        time.sleep(0.1)
    if served.store.rank == 2:
        print("took", flush=True)
        time.sleep(60)  # until it is killed
    served.step()
    print(*numbers.tolist(), flush=True)
print("done", flush=True)
served.close()
'''


@pytest.mark.parametrize("mode", ["async", "ssp:staleness=2"])
@pytest.mark.parametrize("kills", [False, True])
def test_shared_batches_go_to_whoever_asks(mode, kills, tmp_path):
    program, workers = tmp_path / "sharing.py", 3 if kills else 2
    program.write_text(SHARING)
    with reserved_port() as port:
        own = {"THINWIRE_SERVERS": "1"}
        each = [variables(rank, workers + 1, port) | own for rank in range(workers + 1)]
        with started_programs(program, mode, environments=each) as started:
            if kills:
                started[2].await_lines(1)
                started[2].kill()
            values_of([*started[:2], started[-1]])
            lines = [started[rank].printed.read_text().splitlines() for rank in (0, 1)]
    assert all(printed.pop() == "done" for printed in lines)
    assert len(lines[0]) > len(lines[1]), "the fast one does more"
    samples = [int(word) for printed in lines for line in printed for word in line.split()]
    assert sorted(samples) == sorted([*range(100), *range(100)])


def test_a_share_in_one_process_has_the_datasets_batches(tmp_path):
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    served = ParameterServerOptimizer(optimizer, net, mode="local", codec=None, timeout_s=100)
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    batches = [x.tolist() for (x,) in served.share(data, 4, 2, shuffle=False)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    first, second = ([x.tolist() for (x,) in served.share(data, 4, 2)] for _ in range(2))
    assert first == second and first[:3] != first[3:]
    assert sorted(sample for batch in first[:3] for sample in batch) == list(range(10))
    for wrong, words in [((data, 0), "batch_size"), ((7, 1), "len"), ((data, 1, 0), "epochs")]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            served.share(*wrong)
    served.close()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_loop_with_the_optimizer_on_the_server_is_torchs(make, tmp_path):
    """The loop has a parameter without a gradient in some steps, a new learning rate, and a
    checkpoint in the middle. The results agree up to rounding."""
    torch.manual_seed(3)

    def net():
        return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))

    theirs, ours = net(), net()
    start = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours.load_state_dict(start)
    numbers = {"lr": 0.05} | ({"momentum": 0.9} if make is torch.optim.SGD else {})
    plain = make(theirs.parameters(), **numbers)
    served = ParameterServerOptimizer(
        make(ours.parameters(), **numbers), ours, mode="local", codec=None, timeout_s=100
    )
    for step in range(12):
        x = torch.randn(16, 20)
        for group in (plain.param_groups[0], served.optimizer.param_groups[0]):
            group["lr"] = 0.05 if step < 6 else 0.01
        for model, optimizer in ((theirs, plain), (ours, served)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if step == 8:
            served.save(str(tmp_path / "states"))
            with torch.no_grad():
                ours[0].weight.zero_()
            served.load(str(tmp_path / "states"))
    served.wait()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    served.close()
    served.close()
    ours(torch.randn(1, 20))  # the hooks are removed


@pytest.mark.parametrize("codec", [None, "int4"])
def test_gradients_are_pushed_in_backward_with_the_same_bits(codec):
    def train(overlap):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
        net.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        served = ParameterServerOptimizer(
            optimizer, net, mode="local", codec=codec, overlap=overlap, timeout_s=100
        )
        sent, pushpull = [], served.store.pushpull
        served.store.pushpull = lambda name, *rest, **more: (
            sent.append(name),
            pushpull(name, *rest, **more),
        )
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.01 if step < 3 else 0.003
            served.zero_grad()
            net(torch.randn(16, 20)).square().mean().backward()
            in_backward = list(sent)
            served.step()
            assert len(sent) == 5, "each once"
            assert len(in_backward) == (4 if overlap else 0), in_backward
            sent.clear()
        served.wait()
        served.close()
        return [p.detach().clone() for p in net.parameters()]

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b)


def test_gradients_that_backward_has_pushed_do_not_change():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    served = ParameterServerOptimizer(optimizer, net, mode="local", timeout_s=100)
    net(torch.randn(8, 4)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with pytest.raises(thinwire.InvalidArgumentError, match="overlap=False"):
        served.step()
    net(torch.randn(8, 4)).square().mean().backward()
    with pytest.raises(thinwire.InvalidArgumentError, match="overlap=False"):
        net(torch.randn(8, 4)).square().mean().backward()
    served.close()


def test_an_optimizer_that_can_not_be_served_is_refused():
    model = torch.nn.Linear(2, 2)
    for wrong, words in [
        (lambda: ParameterServerOptimizer(7, model), "torch.optim"),
        (lambda: ParameterServerOptimizer(torch.optim.SGD(model.parameters(), 1), 7), "Module"),
        (lambda: ParameterServerOptimizer(torch.optim.SGD([model.bias], 1), model), "1 parameters"),
        (
            lambda: ParameterServerOptimizer(torch.optim.RMSprop(model.parameters()), model),
            "RMSprop",
        ),
        (
            lambda: ParameterServerOptimizer(
                torch.optim.SGD(model.parameters(), 1), model, mode="bsp"
            ),
            "staleness",
        ),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            wrong()


TRAINED = '''
"""A model that learns a fixed linear map, of data that each worker draws itself."""
import sys
import torch
from thinwire.torch import ParameterServerOptimizer

torch.manual_seed(0)
target = torch.randn(50, 4)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(50, 64, bias=False), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
served = ParameterServerOptimizer(optimizer, model, mode=sys.argv[1], codec="int4", timeout_s=100)
torch.manual_seed(served.store.rank)
for step in range(200):
    x = torch.randn(64, 50)
    served.zero_grad()
    loss = (model(x) - x @ target).square().mean()
    loss.backward()
    served.step()
served.wait()
digest = sum(p.double().abs().sum() for p in model.parameters()).item()
print(f"worker {served.store.rank} loss {loss.item():.3f} digest {digest!r}", flush=True)
served.close()
'''


@pytest.mark.parametrize(
    ("mode", "lr"),
    [("sync", 0.1), ("async", 0.03), ("ssp:staleness=2", 0.03), ("sync:quorum=1,grace=0.1", 0.05)],
)
def test_models_train_in_every_mode(mode, lr, tmp_path):
    """int4 in both directions. In sync mode all workers end with the same bits."""
    program = tmp_path / "trained.py"
    program.write_text(TRAINED)
    printed = run_program(program, mode, str(lr), world=3, environment={"THINWIRE_SERVERS": "1"})
    lines = [line.split() for line in printed.splitlines() if line.startswith("worker")]
    assert len(lines) == 2
    assert all(float(line[3]) < 5 for line in lines), "the first loss is about 50"
    if mode == "sync":
        assert lines[0][5] == lines[1][5]


class ReadsOthers(torch.nn.Module):
    """Attention, which reads a child's weight without calling it, and a parent that does the
    same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.holder = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return torch.nn.functional.linear(x, self.holder.weight, self.holder.bias)


def test_a_forward_waits_for_all_parameters_that_it_reads():
    net = ReadsOthers()
    served = ParameterServerOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net, mode="local", timeout_s=100
    )
    waited, wait = set(), served.store.wait
    served.store.wait = lambda name=None: (waited.add(name), wait(name))
    for _ in range(2):
        waited.clear()
        net(torch.randn(3, 2, 8)).square().mean().backward()
        in_forward = set(waited)
        served.step()
    assert in_forward == {name for name, _ in net.named_parameters()}
    served.close()


def test_a_copy_of_the_model_has_its_values_and_waits_for_nothing():
    net = torch.nn.Linear(4, 2)
    served = ParameterServerOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net, mode="local", timeout_s=100
    )
    net(torch.ones(3, 4)).sum().backward()
    served.step()
    waited, wait = [], served.store.wait
    served.store.wait = lambda name=None: (waited.append(name), wait(name))
    net.state_dict()
    assert waited == [None]  # for all samples
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for copied in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(copied.weight, net.weight)
        copied(torch.ones(3, 4)).sum().backward()
        copied.state_dict()
    assert waited == [None]
    served.close()


class Attends(torch.nn.Module):
    """Reads a weight of a module that it does not call, and looks up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 8, sparse=True)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids):
        return self.layer(self.words(ids))


@pytest.mark.parametrize("how", ["before", "in place", "after"])
def test_a_compiled_model_trains_as_it_does_uncompiled(how):
    def trained(how):
        torch.manual_seed(1)
        model = net = Attends()
        if how == "before":
            model = torch.compile(net, backend="aot_eager")
        elif how == "in place":
            net.compile(backend="aot_eager")
        served = ParameterServerOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, mode="local", codec=None
        )
        if how == "after":
            model = torch.compile(net, backend="aot_eager")
        for _ in range(4):
            served.zero_grad()
            model(torch.randint(20, (4, 3))).square().sum().backward()
            served.step()
        served.close()
        return net.state_dict()

    torch.testing.assert_close(trained(how), trained("not"))


def test_a_model_that_is_one_graph_is_refused():
    net = torch.nn.Linear(2, 1)
    model = torch.compile(net, backend="eager", fullgraph=True)
    with pytest.raises(thinwire.InvalidArgumentError, match="compile it without fullgraph"):
        ParameterServerOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model, mode="local")
