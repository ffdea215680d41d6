"""thinwire.kvstore: MXNet's method names, optimizers on the server, both launchers' processes."""

import threading

import numpy as np
import pytest
import thinwire
import torch
from ranks import (
    mxnet_variables,
    reserved_port,
    run_program,
    started_programs,
    torchrun,
    values_of,
)
from test_wrong_types import WRONG
from thinwire import _library, kvstore, launch

CHECKS = '''
"""The checks of MXNet's tests/nightly/dist_sync_kvstore.py, check_default_keys and
check_compr_pull: after each push of ones times rank + 1 every worker pulls the exact value."""
import os, sys
import thinwire.kvstore as kvs
import torch

name, codec = sys.argv[1], sys.argv[2]
kv = kvs.create(name, timeout_s=100)
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
kv = kvs.create("dist_sync", timeout_s=100, slice_elements=4096)
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
    """The last THINWIRE_SERVERS ranks serve, and end after the workers have left."""
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


def test_mxnets_variables_start_a_scheduler_servers_and_workers(checks):
    roles = ("worker", "server", "worker", "server", "scheduler")
    with reserved_port() as port:
        each = [
            own | {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"} for own in mxnet_variables(port, roles)
        ]
        with started_programs(checks, "dist_sync", "fp32", environments=each) as started:
            values_of(started)
            outputs = [member.printed.read_text() for member in started]
    assert {output.split(":")[0] for output in outputs if output} == {
        "worker 0 of 2",
        "worker 1 of 2",
    }


@pytest.fixture
def kv():
    store = kvstore.create("local", timeout_s=100)
    yield store
    store.close()


def test_values_and_lists_of_them(kv):
    assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
    assert kv.is_capable("optimizer") and not kv.is_capable("pickled updaters")
    kv.init(["a", 1], [torch.ones(2, 3), torch.zeros(4, dtype=torch.bfloat16)])
    kv.set_optimizer("add", lr=1.0)
    kv.push("a", [torch.ones(2, 3), torch.full((2, 3), 2.0)])  # gradients of two devices
    outs = [torch.empty(2, 3), torch.empty(3, 2).t()]
    kv.pull("a", out=outs)
    for out in outs:
        assert torch.equal(out, torch.full((2, 3), 4.0))
    grads = [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    kv.pushpull(["a", 1], grads, priority=-1)
    kv.wait()
    assert torch.equal(grads[0], torch.full((2, 3), 5.0))
    assert torch.equal(grads[1], torch.ones(4, dtype=torch.bfloat16))
    negated = torch.complex(torch.zeros(2, 3), torch.ones(2, 3)).conj().imag  # a view
    kv.push("a", negated.contiguous())
    kv.pull("a", out=torch._neg_view(memory := torch.empty(2, 3)))
    assert torch.equal(memory, torch.full((2, 3), -4.0))
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
        (lambda: kvstore.create("local", slice_elements=-4096), "-4096"),
        (lambda: kv.init("w", torch.ones(4)), "already"),
        (lambda: kv.push("v", torch.ones(4)), "init"),
        (lambda: kv.push("w", torch.ones(3)), "4 elements"),
        (lambda: kv.push("w", torch.ones(4, dtype=torch.int64)), "float32"),
        (lambda: kv.push(True, torch.ones(4)), "key True"),
        (lambda: kv.push(["w"], []), "one for each key"),
        (lambda: kv.push(["w"], torch.ones(1, 4)), "list of tensors"),
        (lambda: kv.push("w", []), "expected a tensor"),
        (lambda: kv.push("w", [torch.ones(4), torch.ones(1)]), "shapes .4,. and .1,."),
        (lambda: kv.pull("w", [torch.ones(4), torch.ones(2, 4)]), "shapes .4,. and .2, 4."),
        (lambda: kv.push("a\0b", torch.ones(4)), "NUL"),
        (lambda: kv.push("\ud800", torch.ones(4)), "UTF-8"),
        (lambda: kv.save_optimizer_states("\ud800"), "UTF-8"),
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
        (lambda: kv.pull("w", out=np.zeros(999)), r"out is .{20,40}, expected a tensor"),
    ]:
        with pytest.raises(thinwire.Error, match=words):
            call()
    kv.pull("w", out := torch.zeros(4))  # the store still works
    assert torch.equal(out, torch.ones(4))
    kv.close()
    with pytest.raises(thinwire.InvalidArgumentError, match="closed"):
        kv.push("w", torch.ones(4))
    kv.close()


def test_threads_that_wait_for_one_key_are_told_to_use_one(kv):
    kv.init("w", torch.zeros(10))
    out, wait = torch.zeros(10), kv._library.tw_kv_wait

    class Twice:
        """Another thread waits for the key while this thread waits."""

        def __getattr__(self, name):
            return getattr(library, name)

        def tw_kv_wait(self, *call):
            kv._library = library
            thread = threading.Thread(target=kv.wait)
            thread.start()
            thread.join()
            return wait(*call)

    library, kv._library = kv._library, Twice()
    kv.pushpull("w", torch.ones(10), out=out)
    with pytest.raises(thinwire.InvalidArgumentError, match="from one thread"):
        kv.wait()
    assert torch.equal(out, torch.ones(10))


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
        (mxnet | {"DMLC_PS_ROOT_PORT": "65536"}, "DMLC_PS_ROOT_PORT is .65536., .* to 65535"),
        ({"DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER"),
        ({}, "torchrun"),
    ]:
        with pytest.raises(thinwire.InvalidArgumentError, match=words):
            launch.store_role(wrong)


def methods(store):
    """Return each method of a store with valid arguments."""
    w = torch.zeros(4)
    return {
        store.push: {"key": "w", "value": w, "priority": 0},
        store.pull: {"key": "w", "out": w, "priority": 0},
        store.pushpull: {"key": "w", "value": w, "out": w, "priority": 0, "row_ids": None},
        store.row_sparse_pull: {"key": "table", "out": w.reshape(2, 2), "row_ids": [0]},
        store.wait: {"key": "w"},
        store.set_optimizer: {"optimizer": "add", "lr": 1.0},
        store.set_gradient_compression: {"compression": "int4"},
        store.is_capable: {"capability": "optimizer"},
        store.save_optimizer_states: {"fname": "store.states"},
    }


def test_wrong_types_are_typed_errors(kv, tmp_path, monkeypatch):
    """The argument may also be valid. A Python exception or a failed store is an error."""
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
