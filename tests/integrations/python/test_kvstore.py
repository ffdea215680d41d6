"""thinwire.kvstore: MXNet's method names, optimizers on the server, processes of both launchers."""

import contextlib
import time

import pytest
import thinwire
import torch
from ranks import (
    HANG_S,
    reserved_port,
    run_program,
    started_programs,
    torchrun,
    values_of,
    variables,
)
from test_wrong_types import WRONG
from thinwire import _library, kvstore, launch
from thinwire.torch import ParameterServerOptimizer

CHECKS = '''
"""The checks of MXNet's tests/nightly/dist_sync_kvstore.py, check_default_keys and
check_compr_pull: after each push of ones times rank + 1 every worker pulls the exact value."""
import os, sys
import thinwire.kvstore as kvs
import torch

name, codec = sys.argv[1], sys.argv[2]
kv = kvs.create(name, timeout_s=30)
if codec != "fp32":
    kv.set_gradient_compression({"type": codec})
shape, big = (2, 3), (1200, 1100)
kv.init("3", torch.ones(shape))
kv.init(["99", 7], [torch.ones(big), torch.zeros(5)])
kv.set_optimizer("add", learning_rate=1.0, rescale_grad=2.0)
n = kv.num_workers
for repeat in range(3):
    for key, size in (("3", shape), ("99", big)):
        kv.push(key, torch.ones(size) * (kv.rank + 1))
        out = torch.zeros(size)
        kv.pull(key, out=out)
        expected = (n + 1) * n * 2 / 2 * (repeat + 1) + 1
        if name == "dist_sync" and codec == "fp32":
            assert torch.equal(out, torch.full(size, float(expected))), (key, repeat, out)
kv.barrier()
out = torch.zeros(big)
kv.pull("99", out)
expected = (n + 1) * n * 2 / 2 * 3 + 1
assert (out - expected).abs().max() <= (0 if codec == "fp32" else expected / 7), out
kv.barrier()
print(f"worker {kv.rank} of {n}: {kv.type} {float(out[0, 0])}", flush=True)
kv.close()
'''


COMPRESSION = '''
"""MXNet's checks of compression in the same file, test_sync_2bit_compression, with its
compute_expected_2bit_quantization."""
import thinwire.kvstore as kvs
import torch

rate, threshold = 2, 0.5
kv = kvs.create("dist_sync", timeout_s=30, slice_elements=4096)
kv.init("3", torch.zeros(2, 3))  # as MXNet's file has keys before that are not compressed
kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
kv.set_optimizer("add", learning_rate=1.0, rescale_grad=rate)
shapes = {"1000": (2, 3), "1200": (121, 121), "1300": (120, 120)}
sent = rate * kv.num_workers * threshold


def pulled(key):
    out = torch.full(shapes[key[:2] + "00"], -7.0)
    kv.pull(key, out=out)
    return out


def pushed(key, factor):
    kv.push(key, torch.ones(shapes[key]) * factor)
    return pulled(key)


def is_all(values, expected):
    assert (values == expected).all(), (kv.rank, values, expected)


for key, shape in shapes.items():
    kv.init(key, torch.zeros(shape))
    kv.init(key[:2] + "01", torch.ones(shape))
for key in shapes:
    is_all(pulled(key), 0)
    is_all(pulled(key[:2] + "01"), 1)  # an init is not compressed
    is_all(pushed(key, 0), 0)
    is_all(pushed(key, 0.4), 0)  # does not meet the threshold
    is_all(pushed(key, threshold - 0.4), sent)  # meets it with the residual
    is_all(pushed(key, 0.2), sent)
    is_all(pushed(key, threshold - 0.2), 2 * sent)
    is_all(pushed(key, threshold), 3 * sent)
    is_all(pushed(key, -threshold), 2 * sent)

torch.manual_seed(123)  # all workers push the same, so that each knows what is pulled
for key, shape in shapes.items():
    name = key[:2] + "02"
    kv.init(name, torch.zeros(shape))
    residual = torch.zeros(shape)
    for _ in range(7):
        before, gradient = pulled(name), torch.rand(shape)
        kv.push(name, gradient)
        residual += gradient
        expected = (residual >= threshold) * threshold - (residual <= -threshold) * threshold
        residual -= expected
        is_all(pulled(name) - before, expected * kv.num_workers * rate)
kv.barrier()
print(f"worker {kv.rank} of {kv.num_workers}: compression holds", flush=True)
kv.close()
'''


@pytest.fixture
def checks(tmp_path):
    path = tmp_path / "checks.py"
    path.write_text(CHECKS)
    return path


@pytest.mark.parametrize(
    ("workers", "servers", "name", "codec"),
    [
        (2, 1, "dist_sync", "fp32"),
        (4, 2, "dist_sync", "fp32"),
        (2, 2, "dist_async", "int4"),
        (2, 1, "dist_ssp:staleness=2", "int4"),
    ],
)
def test_mxnets_checks_hold(checks, workers, servers, name, codec):
    """The last THINWIRE_SERVERS ranks serve, and end when the workers have left."""
    printed = run_program(
        checks, name, codec, world=workers + servers,
        environment={"THINWIRE_SERVERS": str(servers)},
    )  # fmt: skip
    for rank in range(workers):
        assert f"worker {rank} of {workers}: {name}" in printed


def test_mxnets_checks_of_compression_hold(tmp_path):
    program = tmp_path / "compression.py"
    program.write_text(COMPRESSION)
    printed = run_program(program, world=6, environment={"THINWIRE_SERVERS": "2"})
    for rank in range(4):
        assert f"worker {rank} of 4: compression holds" in printed


def test_a_named_zeromq_that_is_not_there_is_an_error_with_the_fix(checks):
    named = "/nowhere/libzmq.so.5"
    with pytest.raises(thinwire.UnavailableError, match=f"{named}.*libzmq5.*THINWIRE_ZMQ_LIB"):
        _library.zmq_version(named)
    environment = {"THINWIRE_ZMQ_LIB": named, "THINWIRE_SERVERS": "1"}
    with pytest.raises(AssertionError, match=f"{named}.*THINWIRE_ZMQ_LIB"):
        run_program(checks, "dist_sync", "fp32", environment=environment)


def test_torchruns_last_ranks_serve(checks):
    environment = {"THINWIRE_SERVERS": "1"}
    printed = torchrun(checks, "dist_sync", "int4", world=3, environment=environment)
    assert printed.count("worker") == 2


def mxnets(port, roles):
    """MXNet's variables for members of these roles."""
    common = {
        "DMLC_NUM_WORKER": str(roles.count("worker")),
        "DMLC_NUM_SERVER": str(roles.count("server")),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
    }
    return [common | {"DMLC_ROLE": role} for role in roles]


def test_mxnets_variables_start_a_scheduler_servers_and_workers(checks):
    roles = ("worker", "server", "worker", "server", "scheduler")
    with reserved_port() as port:
        each = [own | {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"} for own in mxnets(port, roles)]
        with started_programs(checks, "dist_sync", "fp32", environments=each) as started:
            values_of(started)
            outputs = [member.printed.read_text() for member in started]
    assert {output.split(":")[0] for output in outputs if output} == {
        "worker 0 of 2",
        "worker 1 of 2",
    }


@pytest.fixture
def kv():
    store = kvstore.create("local", timeout_s=20)
    yield store
    store.close()


def test_values_and_lists_of_them(kv):
    assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
    assert kv.is_capable("optimizer") and not kv.is_capable("pickled updaters")
    kv.init(["a", 1], [torch.ones(2, 3), torch.zeros(4, dtype=torch.bfloat16)])
    kv.set_optimizer("add", lr=1.0)
    kv.push("a", [torch.ones(2, 3), torch.full((2, 3), 2.0)])  # two devices' gradients
    outs = [torch.empty(2, 3), torch.empty(3, 2).t()]
    kv.pull("a", out=outs)
    for out in outs:
        assert torch.equal(out, torch.full((2, 3), 4.0))
    grads = [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    kv.pushpull(["a", 1], grads, priority=-1)
    kv.wait()
    assert torch.equal(grads[0], torch.full((2, 3), 5.0))
    assert torch.equal(grads[1], torch.ones(4, dtype=torch.bfloat16))
    other = torch.empty(5)
    kv.broadcast("b", torch.arange(5.0), out=other)
    assert torch.equal(other, torch.arange(5.0))
    assert "3 keys" in kv.describe() and kv.bytes_sent() > 0


def test_a_pull_that_is_not_waited_for_lands_before_the_next_push(kv):
    kv.init("w", torch.zeros(4))
    kv.set_optimizer("add", lr=1.0)
    out = torch.empty(2, 2).t().reshape(4)[::1]
    for _ in range(4):
        kv.pushpull("w", torch.ones(4), out=out)
    kv.wait("w")
    assert torch.equal(out, torch.full((4,), 4.0))


@pytest.mark.parametrize(
    ("name", "make", "numbers"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
        ("adam", torch.optim.Adam, {"lr": 0.01, "eps": 1e-6}),
        ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    ],
)
@pytest.mark.parametrize("given", ["by name", "as torch's"])
def test_server_optimizers_are_torchs(name, make, numbers, given, kv):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000))
    theirs = make([parameter], **numbers)
    ours = parameter.detach().clone()
    kv.init(0, ours)
    kv.set_optimizer(name, **numbers) if given == "by name" else kv.set_optimizer(theirs)
    for _ in range(30):
        parameter.grad = torch.randn(1000)
        theirs.step()
        kv.pushpull(0, parameter.grad, out=ours)
        kv.wait()
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_mxnets_numbers_and_a_new_learning_rate_that_keeps_the_momentum(kv):
    parameter = torch.nn.Parameter(torch.ones(10))
    theirs = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1)
    out = torch.ones(10)
    kv.init(0, out)
    for lr in (0.1, 0.1, 0.01):
        theirs.param_groups[0]["lr"] = lr
        kv.set_optimizer("SGD", learning_rate=lr, momentum=0.9, wd=0.1, rescale_grad=0.5)
        parameter.grad = torch.full((10,), 1.0)
        theirs.step()
        kv.pushpull(0, torch.full((10,), 2.0), out=out)
        kv.wait()
    torch.testing.assert_close(out, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_states_are_saved_and_loaded(tmp_path):
    file = tmp_path / "store.states"

    def steps(kv, out, count):
        for step in range(count):
            kv.pushpull("w", torch.full((100,), 1.0 + step), out=out)
            kv.wait()

    results = []
    for load in (False, True):
        kv, out = kvstore.create("local"), torch.zeros(100)
        kv.init("w", out)
        kv.set_optimizer("adam", lr=0.1)
        if load:
            kv.load_optimizer_states(file)
        else:
            steps(kv, out, 3)
            kv.save_optimizer_states(file)
        steps(kv, out, 4)
        results.append(out)
        kv.close()
    assert torch.equal(*results)


def test_wrong_calls_are_typed_errors_that_say_the_fix(kv):
    kv.init("w", torch.ones(4))
    for call, words in [
        (lambda: kvstore.create("dist_bsp"), "dist_sync"),
        (lambda: kvstore.create(7), "dist_sync"),
        (lambda: kvstore.create("local", codec="int5"), "int8"),
        (lambda: kvstore.create("local", slice_elements=100), "4096"),
        (lambda: kv.init("w", torch.ones(4)), "already"),
        (lambda: kv.push("v", torch.ones(4)), "init"),
        (lambda: kv.push("w", torch.ones(3)), "4 elements"),
        (lambda: kv.push("w", torch.ones(4, dtype=torch.int64)), "float32"),
        (lambda: kv.push(True, torch.ones(4)), "key True"),
        (lambda: kv.push(["w"], []), "one for each key"),
        (lambda: kv.push(["w"], torch.ones(1, 4)), "list of tensors"),
        (lambda: kv.push("w", []), "expected a tensor"),
        (lambda: kv.pull("w", torch.ones(1).expand(4)), "expanded"),
        (lambda: kv.pushpull("w", torch.ones(4), torch.ones(4).half()), "one dtype"),
        (lambda: kv.push("w", torch.ones(4), weight=2), "key 'w'.* 2, expected 1 .*sync:quorum"),
        (lambda: kv.pushpull("w", torch.ones(4), weight=float("nan")), "worker 0: key 'w'.*nan"),
        (lambda: kv.push("w", torch.ones(4), weight="1"), "weight is '1'"),
        (lambda: kv.push("w", torch.ones(4), weight=10**400), "weight is 1000"),
        (lambda: kv.set_optimizer("lamb", lr=1), "adagrad"),
        (lambda: kv.set_optimizer("sgd"), "learning rate"),
        (lambda: kv.set_optimizer("sgd", lr=1, alpha=2), "alpha"),
        (lambda: kv.set_optimizer(torch.optim.RMSprop([torch.ones(1)])), "RMSprop"),
        (lambda: kv.set_optimizer(torch.optim.Adam([torch.ones(1)], amsgrad=True)), "amsgrad"),
        (lambda: kv.set_gradient_compression({"threshold": 0.5}), "int4"),
        (lambda: kv.set_gradient_compression({"type": "1bit"}), "1bit.*2bit"),
        (lambda: kv.set_gradient_compression({"type": "2bit", "threshold": "1"}), "'1'.*0.5"),
        (lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0}), "1e-30 to 1e30"),
        (lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 10**400}), "1e30"),
        (lambda: kv.set_gradient_compression({"type": "2bit", "size": 1}), "size.*threshold"),
        (lambda: kv.set_gradient_compression({"type": "int4", "threshold": 1}), "int4.*2bit"),
        (lambda: kv.load_optimizer_states("nowhere.states"), "nowhere.states"),
    ]:
        with pytest.raises(thinwire.Error, match=words):
            call()
    kv.pull("w", out := torch.zeros(4))  # and the store still works
    assert torch.equal(out, torch.ones(4))
    kv.close()
    with pytest.raises(thinwire.InvalidArgumentError, match="closed"):
        kv.push("w", torch.ones(4))
    kv.close()


def test_roles_come_from_the_environment():
    ranks = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4",
             "MASTER_ADDR": "a", "MASTER_PORT": "5"}  # fmt: skip
    assert launch.store_role(ranks | {"THINWIRE_SERVERS": "1"}) == launch.StoreRole(
        "worker", 2, 3, 1, "a", 5
    )
    assert launch.store_role(ranks | {"THINWIRE_SERVERS": "2"}).role == "server"
    later = launch.store_role(ranks | {"THINWIRE_SERVERS": "1", "RANK": "5"})
    assert later == launch.StoreRole("worker", 5, 3, 1, "a", 5) and later.joins_later
    mxnet = {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2",
             "DMLC_PS_ROOT_URI": "b", "DMLC_PS_ROOT_PORT": "6",
             "MXNET_KVSTORE_BIGARRAY_BOUND": "7"}  # fmt: skip
    assert launch.store_role(ranks | mxnet) == launch.StoreRole("server", None, 3, 2, "b", 6, 7)
    for wrong, words in [
        (ranks, "THINWIRE_SERVERS"),
        (ranks | {"THINWIRE_SERVERS": "0"}, "expected 1 to 3"),
        (ranks | {"THINWIRE_SERVERS": "4"}, "expected 1 to 3"),
        (mxnet | {"DMLC_ROLE": "boss"}, "boss"),
        (mxnet | {"DMLC_NUM_SERVER": "0"}, "1 or more"),
        ({"DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER"),
        ({}, "torchrun"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            launch.store_role(wrong)


ENDLESS = '''
"""Pushes and pulls until it fails; says how far it came, and the time and type of its error."""
import itertools, os, sys, time
import thinwire
import thinwire.kvstore as kvs
import torch

kv = kvs.create(sys.argv[1], codec="int4", timeout_s=60)
w = torch.zeros(100_000)
kv.init("w", w)
kv.set_optimizer("add", lr=1.0)
try:
    for step in itertools.count():
        kv.pushpull("w", torch.ones(100_000), out=w)
        kv.wait()
        if step % 5 == 0:
            print(f"step {step}", flush=True)
        if step > 10 and os.path.exists(sys.argv[2]):
            break
except thinwire.Error as error:
    print(f"failed {type(error).__name__} {time.monotonic()} {error}", flush=True)
    sys.exit(3)
kv.close()
'''


@contextlib.contextmanager
def members(name, folder):
    """A scheduler, two servers and three workers that run ENDLESS under MXNet's variables, and the
    file that ends it. The workers have begun."""
    program, end = folder / "endless.py", folder / "end"
    program.write_text(ENDLESS)
    with reserved_port() as port:
        each = mxnets(port, ("scheduler", *("server",) * 2, *("worker",) * 3))
        with started_programs(program, name, str(end), environments=each) as started:
            for worker in started[3:]:
                assert worker.await_lines(1)[0] == "step 0"
            yield started[1:3], started[3:], end


@pytest.mark.parametrize(
    ("victim", "name"),
    [
        ("worker", "dist_sync"),
        ("server", "dist_sync"),
        ("worker", "dist_sync:quorum=3,grace=1"),
    ],
)
def test_a_kill_is_a_typed_error_on_all_workers_in_sync(victim, name, tmp_path):
    with members(name, tmp_path) as (servers, workers, _):
        killed = workers.pop() if victim == "worker" else servers[1]
        killed.kill()
        at, end = time.monotonic(), time.monotonic() + HANG_S
        for worker in workers:
            assert worker.exit_code(end) == 3, worker.printed.read_text()
            last = worker.printed.read_text().splitlines()[-1].split(" ", 3)
            assert last[:2] == ["failed", "PeerLostError"] and victim in last[3], last
            assert float(last[2]) - at < 60, "within the deadline"


@pytest.mark.parametrize(
    "name", ["dist_async", "dist_ssp:staleness=2", "dist_sync:quorum=2,grace=0.05"]
)
def test_others_go_on_without_a_killed_worker(name, tmp_path):
    with members(name, tmp_path) as (servers, workers, end):
        workers.pop(1).kill()
        for worker in workers:  # a hundred steps more
            worker.await_lines(20 + len(worker.await_lines(1)))
        end.write_text("")
        values_of([*workers, *servers])


JOINING = '''
"""Trains a linear model until the file is there; says every five steps how far it came."""
import itertools, os, sys
import thinwire
import torch
from thinwire.torch import ParameterServerOptimizer

net = torch.nn.Linear(64, 8)
try:
    served = ParameterServerOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net,
                                      mode=sys.argv[1], codec="int4", timeout_s=30)
    target = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    print(f"worker {served.store.rank} joined {served.store.has_joined}", flush=True)
    for step in itertools.count():
        x = torch.randn(16, 64)
        served.zero_grad()
        loss = (net(x) - x @ target).square().mean()
        loss.backward()
        served.step()
        if step % 5 == 0:
            print(f"step {step} {loss.item():.4f}", flush=True)
        if step > 10 and os.path.exists(sys.argv[2]):
            break
    served.close()
except thinwire.Error as error:
    print(f"failed {type(error).__name__} {error}", flush=True)
    sys.exit(3)
'''


@pytest.fixture
def joining(tmp_path):
    """Starts a rank of JOINING, among two workers and a server that meet at a store of this
    process; and the file that ends it."""
    program, end = tmp_path / "joining.py", tmp_path / "end"
    program.write_text(JOINING)
    with contextlib.ExitStack() as stack:
        meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        own = {"THINWIRE_SERVERS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}

        def start(mode, rank):
            each = [variables(rank, 3, meeting.port) | own]
            programs = started_programs(program, mode, str(end), environments=each)
            return stack.enter_context(programs)[0]

        yield start, end


@pytest.mark.parametrize("mode", ["async", "ssp:staleness=2"])
def test_killed_workers_come_back_and_new_ones_join(mode, joining):
    start, end = joining
    workers, server = [start(mode, 0), start(mode, 1)], start(mode, 2)
    for worker in workers:
        worker.await_lines(3)
    for rank in (1, 0):  # worker 0's values and key began the run
        other = workers[1 - rank]
        workers[rank].kill()
        other.await_lines(3 + len(other.await_lines(1)))  # steps meanwhile
        workers[rank] = start(mode, rank)
        assert workers[rank].await_lines(1)[0] == f"worker {rank} joined True"
        other.await_lines(3 + len(other.await_lines(1)))
        first, again = (
            float(worker.await_lines(2)[1].split()[-1]) for worker in (other, workers[rank])
        )
        assert again < first, "it goes on from what was learned"
    workers.append(start(mode, 3))  # WORLD_SIZE and more: a new number
    assert workers[2].await_lines(4)[0] == "worker 2 joined True"
    workers[2].kill()
    workers[0].await_lines(5 + len(workers[0].await_lines(1)))
    end.write_text("")
    values_of([*workers[:2], server])


def test_a_worker_that_comes_late_in_sync_is_told_what_to_do(joining):
    start, _ = joining
    workers = [start("sync", 0), start("sync", 1)]
    start("sync", 2)
    for worker in workers:
        worker.await_lines(3)
    late = start("sync", 3)
    assert late.exit_code(time.monotonic() + HANG_S) == 3
    words = late.printed.read_text()
    assert "failed MismatchError" in words and "take mode async or ssp" in words, words
    for worker in workers:  # the others go on
        worker.await_lines(3 + len(worker.await_lines(1)))


RATES = '''
"""Two epochs with rates of their own, of which worker 1 has a long one first."""
import sys
import torch
from thinwire.torch import ParameterServerOptimizer

net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
served = ParameterServerOptimizer(optimizer, net, mode=sys.argv[1], timeout_s=30,
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
    """Worker 0 waits for the new rate, while the other makes more updates than the bound allows."""
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
                                  mode=sys.argv[1], codec=None, timeout_s=30)
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
    served = ParameterServerOptimizer(optimizer, net, mode="local", codec=None, timeout_s=20)
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


KILLED = '''
"""Trains key a, during which the server is killed, and then key b in the same way in peace: both
end with the same bits."""
import os, sys, time
import thinwire.kvstore as kvs
import torch

kv = kvs.create("dist_sync", codec="int4", timeout_s=60)
kv.set_optimizer("adam", learning_rate=0.01)
worst, found = 0.0, []
for key in ("a", "b"):
    w = torch.zeros(100_000)
    kv.init(key, w)
    for step in range(60):
        start = time.monotonic()
        if key == "a" and step == 20:
            print("now", flush=True)
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        g = torch.randn(100_000, generator=torch.Generator().manual_seed(step * 8 + kv.rank))
        kv.pushpull(key, g, out=w)
        kv.wait()
        worst = max(worst, time.monotonic() - start)
    found.append(w.clone())
assert torch.equal(*found), (found[0] - found[1]).abs().max()
print(f"digest {found[0].double().sum().item()!r} waited {worst:.6f} s", flush=True)
kv.close()
'''


SERVES = """
import os, sys
program = '''
import sys
from thinwire import cli
code = cli.main(["serve", "--timeout=60"])
sys.exit(code or 10 * ("torch" in sys.modules))
'''
os.execv(sys.executable, [sys.executable, "-c", program])  # this process has imported torch
"""
AWAY_S = 0.3  # the least for which there is no server


@pytest.mark.parametrize("serving", [KILLED, SERVES], ids=["create", "serve"])
def test_a_killed_server_that_is_started_again_has_the_same_bits(serving, tmp_path):
    """It keeps its rank and journal; workers wait for it, and no value is lost. A process that only
    serves has not imported torch."""
    journal, gone = tmp_path / "journal", tmp_path / "gone"
    texts = (KILLED, serving)
    program_of = [tmp_path / f"{rank}.py" for rank in range(2)]
    for program, text in zip(program_of, texts, strict=True):
        program.write_text(text)
    own = {"THINWIRE_SERVERS": "1", "THINWIRE_KV_JOURNAL": f"{journal},bytes=500000"}
    with reserved_port() as port, contextlib.ExitStack() as stack:

        def start(rank):
            each = [variables(rank, 2, port) | own]
            programs = started_programs(program_of[rank], str(gone), environments=each)
            return stack.enter_context(programs)[0]

        worker, server = start(0), start(1)
        assert worker.await_lines(1) == ["now"]
        server.kill()
        assert (journal / "server-0.journal").exists()
        gone.write_text("")  # the worker goes on, without the server
        time.sleep(AWAY_S)
        anew = start(1)
        values_of([worker, anew])
        output = worker.printed.read_text()
    assert float(output.split()[-2]) >= AWAY_S, f"it has waited: {output}"
    assert not list(journal.iterdir()), "a run that is over needs none"


def test_a_journal_that_can_not_be_is_a_typed_error(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_SERVERS", "1")
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(kvstore, "_meet", lambda *_: store)
    damaged = tmp_path / "server-0.journal"
    damaged.write_bytes(b"x" * 1000)
    for wrong, kind, words in [
        (f"{tmp_path},bytes=0", thinwire.InvalidArgumentError, "bytes=N"),
        ("/proc/none", thinwire.InvalidArgumentError, "/proc/none/server-0.journal.*folder"),
        (tmp_path, thinwire.DataLossError, f"{damaged} is damaged"),
    ]:
        with pytest.raises(kind, match=words):
            kvstore.create("dist_sync", journal=wrong, timeout_s=5)
    monkeypatch.setenv("DMLC_ROLE", "server")
    for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    with pytest.raises(thinwire.InvalidArgumentError, match="another rank"):
        kvstore.create("dist_sync", journal=tmp_path)


def methods(store):
    """Each method of a store with arguments that it takes."""
    w = torch.zeros(4)
    return {
        store.push: {"key": "w", "value": w, "priority": 0},
        store.pull: {"key": "w", "out": w, "priority": 0},
        store.pushpull: {"key": "w", "value": w, "out": w, "priority": 0},
        store.row_sparse_pull: {"key": "table", "out": w.reshape(2, 2), "row_ids": [0]},
        store.wait: {"key": "w"},
        store.set_optimizer: {"optimizer": "add", "lr": 1.0},
        store.set_gradient_compression: {"compression": "int4"},
        store.is_capable: {"capability": "optimizer"},
        store.save_optimizer_states: {"fname": "store.states"},
    }


def test_wrong_types_are_typed_errors(kv, tmp_path, monkeypatch):
    """Or they are taken; anything but a failure of Python's or a store that has failed."""
    monkeypatch.chdir(tmp_path)
    kv.init("w", torch.zeros(4))
    kv.init("table", torch.zeros(2, 2), row_sparse=True)
    found = []
    for method, arguments in methods(kv).items():
        for name in arguments:
            for wrong in WRONG:
                try:
                    method(**arguments | {name: wrong})
                except thinwire.InvalidArgumentError:
                    continue
                except Exception as error:
                    found.append((method.__name__, name, wrong, error))
    kv.wait()
    for name in ("name", "codec", "slice_elements", "timeout_s", "journal"):
        for wrong in (5.5, b"x", [], {}, object(), [5], -1):
            try:
                kvstore.create(**{name: wrong}).close()
            except thinwire.InvalidArgumentError:
                continue
            except Exception as error:
                found.append(("create", name, wrong, error))
    assert not found, "\n".join(map(str, found))
    kv.pull("w", torch.zeros(4))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_loop_with_the_optimizer_on_the_server_is_torchs(make, tmp_path):
    """To rounding, with a parameter that has no gradient in some steps, a new learning rate, and a
    checkpoint in the middle."""
    torch.manual_seed(3)

    def net():
        return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))

    theirs, ours = net(), net()
    start = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours.load_state_dict(start)
    numbers = {"lr": 0.05} | ({"momentum": 0.9} if make is torch.optim.SGD else {})
    plain = make(theirs.parameters(), **numbers)
    served = ParameterServerOptimizer(
        make(ours.parameters(), **numbers), ours, mode="local", codec=None, timeout_s=20
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
    ours(torch.randn(1, 20))  # the hooks are gone


@pytest.mark.parametrize("codec", [None, "int4"])
def test_gradients_are_pushed_in_backward_with_the_same_bits(codec):
    def train(overlap):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
        net.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        served = ParameterServerOptimizer(
            optimizer, net, mode="local", codec=codec, overlap=overlap, timeout_s=20
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
    served = ParameterServerOptimizer(optimizer, net, mode="local", timeout_s=20)
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
served = ParameterServerOptimizer(optimizer, model, mode=sys.argv[1], codec="int4", timeout_s=30)
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
    """int4 both ways. In sync all workers end with the same bits."""
    program = tmp_path / "trained.py"
    program.write_text(TRAINED)
    printed = run_program(program, mode, str(lr), world=3, environment={"THINWIRE_SERVERS": "1"})
    lines = [line.split() for line in printed.splitlines() if line.startswith("worker")]
    assert len(lines) == 2
    assert all(float(line[3]) < 5 for line in lines), "the first loss is about 50"
    if mode == "sync":
        assert lines[0][5] == lines[1][5]
