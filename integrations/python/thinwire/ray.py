"""Executor: runs the ranks of a job as actors of Ray 2, in the manner of Horovod's RayExecutor.

executor = Executor(num_workers=4)
executor.start()
losses = executor.run(train, args=[config])   # train() calls torch.distributed and thinwire
executor.shutdown()

With servers, train() creates a store of thinwire.kvstore or a ParameterServerOptimizer:

executor = Executor(num_workers=4, num_servers=2, journal="/scratch/run7")

Ray Train's TorchTrainer does not need this module: call thinwire.torch.compress in its train
function."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from thinwire import config, kvserver
from thinwire.arguments import as_int, check_call, check_kind, is_number, plain, wrong
from thinwire.errors import Error, PeerLostError, TimeoutError
from thinwire.launch import Place
from thinwire.tcp_store import TcpStore

_GOODBYE_S = 5.0  # seconds for workers to leave their process group
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


_JOURNAL = "THINWIRE_KV_JOURNAL"
_FOREVER = -1  # Ray's value for any number of retries
_SERVER_RESTARTS = 10  # the default number of restarts of each server with a journal
_RANK, _SERVER = "worker of rank", "server"
_OVER = "thinwire.ray/over"  # a key that servers set when all workers have left the store


@dataclass(frozen=True)
class _Setup:
    """The set-up that members get when all are placed, and again after Ray has restarted them."""

    places: Sequence[Place]  # of the workers, then of the servers
    variables: Mapping[str, str]  # environment variables, in addition to those of a place
    group_timeout_s: float | None  # of the workers' process group; None: they have none
    executable: tuple[type, Sequence[Any], Mapping[str, Any]] | None

    def enter(self, rank: int) -> None:
        os.environ.update(self.places[rank].variables() | dict(self.variables))

    def board(self, rank: int) -> TcpStore:
        """Return the rendezvous store of a job with servers."""
        place, attempt = self.places[rank], os.environ.get(kvserver.ATTEMPT, "0")
        return TcpStore(place.address, place.port, attempt, kvserver.DEFAULT_TIMEOUT_S)


class _Meeting:
    """The rendezvous store of a job with servers, in a separate process: any member may be
    restarted, and the driver may be outside the cluster (Ray Client). Ray does not restart this
    process, because the store would be empty; if it dies, running members continue, but a restarted
    one cannot rejoin. It shares the first server's bundle, whose host has that server's journal."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._address = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)

    def host(self) -> tuple[str, int]:
        """Return the address and port where it listens."""
        return self._address, self._store.port


class _Server:
    """A server of the workers' first store. It does not import torch, so that it restarts
    quickly."""

    def host(self) -> str:
        return ray.util.get_node_ip_address()

    def serve(self, setup: _Setup, rank: int) -> None:
        """Serve until all workers have left. Ray calls it again in a restarted process."""
        setup.enter(rank)
        kvserver.serve_here(awaits_workers=True)
        setup.board(rank).set(_OVER, b"")


class _Worker:
    """One rank, in its own process."""

    def __init__(self, rank: int) -> None:
        self._rank, self._is_set_up = rank, False
        self._executable: Any = None

    def host(self) -> tuple[str, int]:
        """Return this worker's address, and a free port on it."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def set_up(self, setup: _Setup) -> None:
        """Join the process group, and create the executable. All workers do so at the same time; a
        restarted worker does so alone."""
        if self._is_set_up:
            return
        setup.enter(self._rank)
        if setup.group_timeout_s is None:
            self._check_not_over(setup)
        else:
            import datetime

            import torch.distributed as dist

            timeout = datetime.timedelta(seconds=setup.group_timeout_s)
            dist.init_process_group("gloo", timeout=timeout)
        if setup.executable is not None:
            kind, arguments, options = setup.executable
            self._executable = kind(*arguments, **options)
        self._is_set_up = True

    def call(
        self,
        setup: _Setup,
        fn: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Any:
        self.set_up(setup)
        return fn(*arguments, **options)

    def call_with_executable(self, setup: _Setup, fn: Callable[[Any], Any]) -> Any:
        self.set_up(setup)
        return fn(self._executable)

    def end(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _check_not_over(self, setup: _Setup) -> None:
        """Raise if the run is over, which is only possible if this worker was restarted."""
        if setup.board(self._rank).has(_OVER):
            raise PeerLostError(
                f"the worker of rank {self._rank} died, and the other workers had left the store "
                "when it was back; the store's values are theirs, which run_remote() returns one "
                "by one"
            )


class Executor:
    """Runs functions on `num_workers` ranks that Ray starts. They have one process group over Gloo,
    and torchrun's variables. Call ray.init() first.

    With num_servers they have no process group, and `num_servers` processes serve the first store
    that they create (thinwire.kvstore.create, ParameterServerOptimizer), until all workers have
    left it. Call shutdown() and start() before creating another store. With a journal Ray restarts
    a server that dies, up to max_server_restarts times. The server continues with the same bits,
    and workers wait for it until the store's timeout_s.

    Args:
        num_workers: the number of ranks.
        num_servers: the number of servers; 0: no parameter server.
        cpus_per_worker, gpus_per_worker, cpus_per_server: the resources that Ray reserves for each,
            all of them together or none.
        journal: as thinwire.kvstore.create takes it. A server that is restarted on another host
            needs it on a disk that all hosts share, and raises DataLossError otherwise. None: a
            server that dies is a PeerLostError on all workers.
        max_worker_restarts: how often, between start() and shutdown(), Ray restarts a worker that
            dies. It keeps its rank, creates the class of start() again, and calls its function from
            the beginning. In modes async and ssp it joins the run; in sync a death is an error on
            all workers. After the last restart, run() raises PeerLostError for the next death.
        max_server_restarts: how often, between start() and shutdown(), Ray restarts each server
            that dies and has a journal. None: 10. If it dies again after the last restart, run()
            raises the workers' error when the store's timeout_s is over; its cause is a
            PeerLostError that names the server.
        placement: "PACK" (few machines), "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        env_vars: environment of every worker and server, such as {"THINWIRE_CODEC": "int4"}.
        timeout_s: seconds until Ray has reserved and started everything; also the timeout of
            torch's collectives. A store has its own: THINWIRE_TIMEOUT_S in env_vars.

    Raises:
        InvalidArgumentError: an argument is not valid.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int = 0,
        *,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 0,
        cpus_per_server: int = 1,
        journal: str | os.PathLike[str] | None = None,
        max_worker_restarts: int = 0,
        max_server_restarts: int | None = None,
        placement: str = "PACK",
        env_vars: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        num_workers = as_int("num_workers", num_workers, 1)
        num_servers = as_int("num_servers", num_servers, 0)
        cpus_per_worker = as_int("cpus_per_worker", cpus_per_worker, 0)
        gpus_per_worker = as_int("gpus_per_worker", gpus_per_worker, 0)
        cpus_per_server = as_int("cpus_per_server", cpus_per_server, 1)
        check_kind("journal", journal, (str, os.PathLike, type(None)), "a folder, or None")
        max_worker_restarts = as_int("max_worker_restarts", max_worker_restarts, 0)
        if max_server_restarts is not None:
            max_server_restarts = as_int("max_server_restarts", max_server_restarts, 0)
        check_kind("env_vars", env_vars, (Mapping, type(None)), "a dict of text, or None")
        if placement not in STRATEGIES:
            raise wrong("placement", placement, f"one of {STRATEGIES}")
        timeout_s = plain(timeout_s)
        if not is_number(timeout_s) or timeout_s <= 0:
            raise wrong("timeout_s", timeout_s, "a number of seconds above 0")
        for name, got in (("journal", journal), ("max_worker_restarts", max_worker_restarts)):
            if got and not num_servers:
                raise wrong(name, got, "none without servers; set num_servers")
        self._env_vars = dict(env_vars or {})
        kept = os.fspath(journal) if journal is not None else self._env_vars.get(_JOURNAL)
        self._journal = (kept or config.kv_journal()) if num_servers else None
        if self._journal:
            self._env_vars[_JOURNAL] = self._journal
        elif max_server_restarts:
            raise wrong(
                "max_server_restarts", max_server_restarts, "none without a journal; set journal"
            )
        if max_server_restarts is None:
            max_server_restarts = _SERVER_RESTARTS if self._journal else 0
        self.num_workers, self.num_servers = num_workers, num_servers
        self._bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
        self._cpus_per_server = cpus_per_server
        self._worker_restarts, self._server_restarts = max_worker_restarts, max_server_restarts
        self._placement, self._timeout_s = placement, timeout_s
        self._group: Any = None
        self._workers: list[Any] = []
        self._servers: list[Any] = []
        self._meeting: Any = None
        self._setup: Any = None  # Ray's reference to a _Setup
        self._serving: list[Any] = []  # Ray's references, by server, which end with the store

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] = (),
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the servers, the workers and their process group.

        Args:
            executable_cls: a class whose object is created on every worker, and passed by execute()
                to its function.
            executable_args: its positional arguments.
            executable_kwargs: its keyword arguments.

        Raises:
            TimeoutError: Ray lacks the resources.
            Exception: an error of the class.
        """
        check_call("executable_cls", executable_cls)
        if self._workers:
            raise wrong("start()", "called again", "one call before shutdown()")
        bundle = {k: v for k, v in self._bundle.items() if v}
        server_bundles = [{"CPU": self._cpus_per_server}] * self.num_servers
        self._group = placement_group(
            [bundle] * self.num_workers + server_bundles, strategy=self._placement
        )
        executable = None
        if executable_cls is not None:
            executable = executable_cls, executable_args, executable_kwargs or {}
        try:
            self._begin(executable)
        except BaseException:
            self.shutdown()
            raise

    def _begin(self, executable: tuple[type, Sequence[Any], Mapping[str, Any]] | None) -> None:
        if not self._group.wait(self._timeout_s):
            servers = f" and {self._cpus_per_server} CPU for each of {self.num_servers} servers"
            raise TimeoutError(
                f"Ray has not reserved {self._bundle} for each of {self.num_workers} workers"
                f"{servers if self.num_servers else ''} within {self._timeout_s:.0f} s; ask for "
                "less, or add machines to the cluster"
            )
        first_server = self.num_workers
        if self.num_servers:
            self._meeting = self._actor(_Meeting, first_server, restarts=0, num_cpus=0)
        self._workers = [
            self._actor(
                _Worker, rank, rank, restarts=self._worker_restarts,
                num_cpus=self._bundle["CPU"], num_gpus=self._bundle["GPU"],
            )
            for rank in range(self.num_workers)
        ]  # fmt: skip
        self._servers = [
            self._actor(
                _Server, first_server + number,
                restarts=self._server_restarts, num_cpus=self._cpus_per_server,
            )
            for number in range(self.num_servers)
        ]  # fmt: skip
        hosts = self._results([worker.host.remote() for worker in self._workers])
        addresses = [host for host, _ in hosts]
        variables = {}
        address, port = hosts[0]
        if self.num_servers:
            addresses += self._results([s.host.remote() for s in self._servers], _SERVER)
            address, port = self._results([self._meeting.host.remote()], "meeting")[0]
            variables = {
                "THINWIRE_SERVERS": str(self.num_servers), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        size = len(addresses)
        places = [
            Place(
                rank, size, addresses[:rank].count(host), addresses.count(host), address, port,
                "thinwire.ray",
            )
            for rank, host in enumerate(addresses)
        ]  # fmt: skip
        group_timeout_s = None if self.num_servers else self._timeout_s
        self._setup = ray.put(_Setup(places, variables, group_timeout_s, executable))
        self._serving = [
            server.serve.remote(self._setup, first_server + number)
            for number, server in enumerate(self._servers)
        ]
        self._results([worker.set_up.remote(self._setup) for worker in self._workers])

    def _actor(self, kind: type, bundle: int, *arguments: Any, restarts: int, **resources: int):
        return (
            ray.remote(kind)
            .options(
                max_restarts=restarts,
                max_task_retries=_FOREVER if restarts else 0,  # max_restarts is the limit
                runtime_env={"env_vars": self._env_vars},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
                **resources,
            )
            .remote(*arguments)
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call fn(*args, **kwargs) on every rank.

        Returns:
            The results by rank.

        Raises:
            PeerLostError: a rank died; the message names it.
            Exception: the error of the first rank that failed. If a server has failed, its error is
                the cause.
        """
        return self._results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like run(), but return Ray's references at once. Their ray.get() raises Ray's errors."""
        self._check_call("fn", fn)
        return [worker.call.remote(self._setup, fn, args, kwargs or {}) for worker in self._workers]

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call fn(executable) on every rank, with the object that start() created there, or None.
        Return the results by rank."""
        self._check_call("fn", fn)
        return self._results([
            worker.call_with_executable.remote(self._setup, fn) for worker in self._workers
        ])  # fmt: skip

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like execute(), but only on rank 0. Return its result."""
        self._check_call("fn", fn)
        return self._results([self._workers[0].call_with_executable.remote(self._setup, fn)])[0]

    def shutdown(self) -> None:
        """End all members and release their resources. A second call does nothing."""
        if self._workers:
            ends = [worker.end.remote() for worker in self._workers]
            ray.wait(ends, num_returns=len(ends), timeout=_GOODBYE_S)
        for actor in [*self._workers, *self._servers, self._meeting]:
            if actor is not None:
                ray.kill(actor)
        self._workers, self._servers, self._serving, self._meeting = [], [], [], None
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _check_call(self, name: str, fn: object) -> None:
        if not callable(fn):
            raise wrong(name, fn, "a function")
        if not self._workers:
            raise Error("there are no workers; call start() first")

    def _results(self, references: Sequence[Any], of: str = _RANK) -> list[Any]:
        """Wait for all ranks, so that none is still running when an error is raised. Peers of a
        dead worker end with errors of their collectives."""
        ray.wait(list(references), num_returns=len(references))
        results: list[Any] = []
        found: list[Exception] = []
        for number, reference in enumerate(references):
            try:
                results.append(ray.get(reference))
            except ray.exceptions.RayActorError as error:
                raise self._lost(of, number, error) from error
            except ray.exceptions.RayTaskError as error:
                found.append(error)
        if found:
            if (cause := self._error_of_servers()) is not None:
                raise found[0] from cause
            raise found[0]  # also an instance of the type of the rank's own error
        return results

    def _error_of_servers(self) -> Exception | None:
        for number, reference in enumerate(self._serving):
            try:
                ray.get(reference, timeout=0)
            except ray.exceptions.GetTimeoutError:
                continue  # it is still serving
            except ray.exceptions.RayActorError as error:
                return self._lost(_SERVER, number, error)
            except ray.exceptions.RayTaskError as error:
                return error
        return None

    def _lost(self, of: str, number: int, error: Exception) -> PeerLostError:
        """Return the error for a dead actor without restarts left."""
        limits = {
            _RANK: ("max_worker_restarts", self._worker_restarts),
            _SERVER: ("max_server_restarts", self._server_restarts),
        }
        name, restarts = limits.get(of, ("", 0))
        often, fix = "", "look into Ray's log of it"
        if restarts:
            often = f" {restarts + 1} times, once more than {name}={restarts} allows"
            fix += ", and allow more restarts where each death is one by itself"
        return PeerLostError(
            f"the {of} {number} died{often} ({error}); {fix}; then shutdown() and start() again, "
            "from a checkpoint"
        )
