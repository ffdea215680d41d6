"""thinwire.tcp_store compared with torch's own store, and the errors of `thinwire serve`."""

import datetime
import os
import signal
import socket
import subprocess
import sys

import pytest
import thinwire
import torch.distributed as dist
from ranks import reserved_port, variables
from thinwire import cli, config, kvserver, launch
from thinwire.comm import Communicator
from thinwire.tcp_store import TcpStore


@pytest.fixture
def theirs():
    """A store of torch's that waits for one member besides its owner."""
    store = dist.TCPStore(
        "127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=20),
        wait_for_workers=False,
    )  # fmt: skip
    yield store


def test_both_read_what_the_other_has_set(theirs):
    ours, prefixed = TcpStore("127.0.0.1", theirs.port, "0", 10), dist.PrefixStore("0", theirs)
    large = bytes(range(256)) * 5000
    prefixed.set("theirs", b"\0\xff text")
    prefixed.set("large", large)
    assert ours.get("theirs", 1) == b"\0\xff text"
    assert ours.get("large", 1) == large
    ours.set("ours", large)
    ours.set("empty", b"")
    assert prefixed.get("ours") == large
    assert prefixed.get("empty") == ours.get("empty", 1) == b""
    assert [ours.add("sum", 3), prefixed.add("sum", 4), ours.add("sum", -2)] == [3, 7, 5]
    assert ours.has("ours") and not ours.has("nothing")
    bare = TcpStore("127.0.0.1", theirs.port, "", 10)
    assert bare.get("0/ours", 1) == large
    with pytest.raises(TimeoutError, match="nothing"):
        ours.get("nothing", 0.05)


def test_the_owner_waits_until_it_has_come():
    with reserved_port() as port:
        owner = (
            "import datetime, torch.distributed as dist\n"
            f"store = dist.TCPStore('127.0.0.1', {port}, 2, is_master=True, "
            "timeout=datetime.timedelta(seconds=60))\n"
            "store.set('all', 'here'); input()"
        )
        with subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE) as process:
            try:
                ours = TcpStore("127.0.0.1", port, "", 60)
                assert not ours.has("all")
                ours.come()
                assert ours.get("all", 30) == b"here"
                process.kill()
                process.wait()
                with pytest.raises(thinwire.UnavailableError, match=f"127.0.0.1:{port}"):
                    ours.get("all", 1)
            finally:
                process.kill()


def test_a_store_that_is_not_there_is_a_typed_error():
    with (
        reserved_port() as port,
        pytest.raises(thinwire.UnavailableError, match=f"127.0.0.1:{port}, which rank 0"),
    ):
        TcpStore("127.0.0.1", port, "", 0.2)


@pytest.mark.parametrize("address", ["a..b", "x" * 64 + ".org"])
def test_a_host_whose_name_can_not_be_is_a_typed_error(address):
    with pytest.raises(thinwire.UnavailableError, match=f"{address}:1, .* no name of a host"):
        TcpStore(address, 1, "", 60)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request", b"\0" * 8], ids=["http", "zeros"])
def test_a_listener_that_is_no_store_is_a_typed_error(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TcpStore("127.0.0.1", port, "", 20)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(answer)
            with pytest.raises(thinwire.UnavailableError, match=f"{port}, .* is no TCPStore"):
                store.come()
        store.close()


def test_serve_tells_a_worker_that_it_is_none(monkeypatch, capsys):
    for name, value in (variables(0, 2, 29999) | {"THINWIRE_SERVERS": "1"}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve"]) == 2
    assert "this process is a worker by its variables, expected a server" in capsys.readouterr().err


def test_ctrl_c_ends_a_server(theirs):
    own = variables(1, 2, theirs.port) | {"THINWIRE_SERVERS": "1"}
    theirs.set("0/thinwire.kvstore/0/kv/token", b"0" * 64 + b" 1 workers and 1 servers")
    command = [sys.executable, "-m", "thinwire", "serve", "--timeout", "60"]
    # A shell's background command ignores SIGINT, and its children would inherit that.
    own_signals = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, env=os.environ | own, **own_signals) as server:
        theirs.get("0/thinwire.kvstore/0/kv/address/1")  # the server listens now
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == -signal.SIGINT


class Interrupted:
    """A store whose user presses Ctrl-C."""

    def set(self, key, value):
        pass

    def get(self, key, timeout_s):
        raise KeyboardInterrupt


def test_ctrl_c_at_the_rendezvous_is_raised():
    options = kvserver.store_options(config.resolve(timeout_s=20), None)
    options.rank, options.workers, options.servers = 1, 1, 1
    with pytest.raises(KeyboardInterrupt):
        kvserver.serve(options, Interrupted(), 0)
    with pytest.raises(KeyboardInterrupt):
        Communicator(0, 2, Interrupted(), "interrupted", config.resolve(timeout_s=20))


def test_a_time_is_whole_milliseconds_that_an_int_holds():
    for seconds, milliseconds in ((1e-4, 1), (0.1, 100), (4294968, 2**31 - 1), (1e9, 2**31 - 1)):
        options = kvserver.store_options(config.resolve(timeout_s=seconds), None)
        assert options.timeout_ms == milliseconds


def test_ranks_by_the_order_of_coming_end_with_the_last_server(theirs):
    role = launch.StoreRole("server", None, 3, 2, "127.0.0.1", theirs.port)
    store = TcpStore("127.0.0.1", theirs.port, "", 10)
    assert [kvserver.rank_of(role, store) for _ in range(2)] == [3, 4]
    with pytest.raises(thinwire.InvalidArgumentError, match="server 3, expected 2"):
        kvserver.rank_of(role, store)
