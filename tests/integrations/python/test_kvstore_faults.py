"""thinwire.kvstore when processes are killed, restarted or join late; and servers' journals."""

import contextlib
import os
import shutil
import time

import pytest
import thinwire
import torch
from ranks import (
    HANG_S,
    mxnet_variables,
    reserved_port,
    started_programs,
    values_of,
    variables,
)
from thinwire import kvserver, kvstore

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
    """Start a scheduler, two servers and three workers that run ENDLESS under MXNet's variables.
    Yield them once the workers have begun, with the file that ends the run."""
    program, end = folder / "endless.py", folder / "end"
    program.write_text(ENDLESS)
    with reserved_port() as port:
        each = mxnet_variables(port, ("scheduler", *("server",) * 2, *("worker",) * 3))
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
        for worker in workers:  # a hundred more steps
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
                                      mode=sys.argv[1], codec="int4", timeout_s=100)
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
    """Start ranks of JOINING: two workers and a server that meet at a store of this process. Also
    gives the file that ends the run."""
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
    for rank in (1, 0):  # the run began with worker 0's values and key
        other = workers[1 - rank]
        workers[rank].kill()
        other.await_lines(3 + len(other.await_lines(1)))  # steps made meanwhile
        workers[rank] = start(mode, rank)
        assert workers[rank].await_lines(1)[0] == f"worker {rank} joined True"
        other.await_lines(3 + len(other.await_lines(1)))
        first, again = (
            float(worker.await_lines(2)[1].split()[-1]) for worker in (other, workers[rank])
        )
        assert again < first, "it goes on from what was learned"
    workers.append(start(mode, 3))  # WORLD_SIZE or more: the number of a new worker
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
    for worker in workers:  # the others continue
        worker.await_lines(3 + len(worker.await_lines(1)))


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
AWAY_S = 0.3  # least time without a server, seconds


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
        gone.write_text("")  # the worker continues while there is no server
        time.sleep(AWAY_S)
        anew = start(1)
        values_of([worker, anew])
        output = worker.printed.read_text()
    assert float(output.split()[-2]) >= AWAY_S, f"it has waited: {output}"
    assert not list(journal.iterdir()), "a run that is over needs none"


ENDED = '''
"""One push. Keeps the journal by a hard link, since the end of the run removes it."""
import os, sys
import thinwire.kvstore as kvs
import torch

kv = kvs.create("dist_sync", timeout_s=60)
w = torch.zeros(1000)
kv.init("w", w)
kv.pushpull("w", torch.ones(1000), out=w)
kv.wait()
os.link(*sys.argv[1:])
kv.close()
'''


def test_a_server_that_comes_back_when_the_run_is_over_ends(tmp_path, monkeypatch, caplog):
    """The server was killed after all workers had left, so the rendezvous store is gone too. A new
    run can use the folder."""
    program, kept = tmp_path / "ended.py", tmp_path / "kept"
    program.write_text(ENDED)
    journal = tmp_path / "journal" / "server-0.journal"
    own = {"THINWIRE_SERVERS": "1", "THINWIRE_KV_JOURNAL": str(journal.parent)}

    def serve():
        kvserver.serve_here(timeout_s=60)

    def create():
        with pytest.raises(SystemExit) as exit:
            kvstore.create("dist_sync", timeout_s=60)
        assert exit.value.code == 0

    with reserved_port() as port:
        for name, value in (variables(1, 2, port) | own).items():
            monkeypatch.setenv(name, value)

        def run():
            worker, arguments = [variables(0, 2, port) | own], (str(journal), str(kept))
            with started_programs(program, *arguments, environments=worker) as started:
                serve()
                values_of(started)

        run()
        assert not journal.exists()
        for again in (serve, create):
            shutil.copy(kept, journal)
            caplog.clear()
            again()
            assert "is over, since all workers had left" in caplog.text
            assert not journal.exists()

        kept.rename(journal)
        os.utime(journal, (0, 0))  # a time long ago; the folder belongs to a new run
        run()
        assert [path.name for path in journal.parent.iterdir()] == ["server-0.journal.old"]


LOST = '''
"""Pushes until the server does not come back."""
import sys
import thinwire
import thinwire.kvstore as kvs
import torch

kv = kvs.create("dist_sync", timeout_s=60)
w = torch.zeros(1000)
kv.init("w", w)
print("now", flush=True)
try:
    while True:
        kv.pushpull("w", torch.ones(1000), out=w)
        kv.wait()
except thinwire.Error as error:
    print(type(error).__name__, error, flush=True)
'''


def test_a_server_that_comes_back_without_its_journal_says_so(tmp_path, monkeypatch):
    """For example it was started on another host. Its workers get the error at once."""
    journal = tmp_path / "journal"
    program_of = [tmp_path / f"{rank}.py" for rank in range(2)]
    for program, text in zip(program_of, (LOST, SERVES), strict=True):
        program.write_text(text)
    own = {"THINWIRE_SERVERS": "1", "THINWIRE_KV_JOURNAL": str(journal)}
    with reserved_port() as port, contextlib.ExitStack() as stack:
        worker, server = (
            stack.enter_context(
                started_programs(program_of[rank], environments=[variables(rank, 2, port) | own])
            )[0]
            for rank in range(2)
        )
        worker.await_lines(1)
        server.kill()
        (journal / "server-0.journal").unlink()
        for name, value in (variables(1, 2, port) | own).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(thinwire.DataLossError, match="server 0: it has served this run"):
            kvserver.serve_here(timeout_s=60)
        assert worker.await_lines(2)[1].startswith("DataLossError worker 0: server 0: it has")


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
            kvstore.create("dist_sync", journal=wrong, timeout_s=60)
    monkeypatch.setenv("DMLC_ROLE", "server")
    for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    with pytest.raises(thinwire.InvalidArgumentError, match="another rank"):
        kvstore.create("dist_sync", journal=tmp_path)


def test_a_store_without_a_place_to_meet_is_a_typed_error(monkeypatch):
    """The host does not exist, or another process uses the port."""
    ranks = {"THINWIRE_SERVERS": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    taken = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, address, kind in [
        ("1", "none.invalid", thinwire.TimeoutError),
        ("0", "127.0.0.1", thinwire.UnavailableError),
    ]:
        place = {"RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": str(taken.port)}
        for name, value in (ranks | place).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(kind, match=f"meet at {address}:{taken.port} .MASTER_ADDR"):
            kvstore.create("dist_sync", timeout_s=2)
