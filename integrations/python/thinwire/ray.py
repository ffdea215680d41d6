"""Executor: the ranks of a job as actors of Ray 2, for those who come from Horovod's RayExecutor.

executor = Executor(num_workers=4)
executor.start()
losses = executor.run(train, args=[config])   # train() calls torch.distributed and thinwire
executor.shutdown()

For Ray Train's TorchTrainer nothing of this is needed: call thinwire.torch.compress in its train
function."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from thinwire.arguments import check_call, check_kind, check_whole, wrong
from thinwire.errors import Error, PeerLostError, TimeoutError
from thinwire.launch import Place

_GOODBYE_S = 5.0  # for workers to leave their process group
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class _Worker:
    """One rank, in a process of its own."""

    def __init__(self) -> None:
        self.executable: Any = None

    def host(self) -> tuple[str, int]:
        """This worker's address, and a free port on it."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def begin(self, place: Place, timeout_s: float) -> None:
        """Joins the process group. Every worker does so at the same time."""
        import datetime
        import os

        import torch.distributed as dist

        os.environ.update(place.variables())
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def make(self, kind: type, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.executable = kind(*arguments, **options)

    def call(self, fn: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]):
        return fn(*arguments, **options)

    def call_with_executable(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self.executable)

    def end(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Executor:
    """Runs functions on `num_workers` ranks that Ray starts; they have one process group over Gloo,
    and torchrun's variables.

    cpus_per_worker, gpus_per_worker: what Ray reserves for each, all together or not at all.
    placement: "PACK" (few machines), "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    env_vars: of every worker, such as {"THINWIRE_CODEC": "int4"}.
    timeout_s: until Ray has reserved and started everything, and of torch's collectives.

    ray.init() comes first. Raises InvalidArgumentError."""

    def __init__(
        self,
        num_workers: int,
        *,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 0,
        placement: str = "PACK",
        env_vars: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        check_whole("num_workers", num_workers, 1)
        check_whole("cpus_per_worker", cpus_per_worker, 0)
        check_whole("gpus_per_worker", gpus_per_worker, 0)
        check_kind("env_vars", env_vars, (Mapping, type(None)), "a dict of text, or None")
        if placement not in STRATEGIES:
            raise wrong("placement", placement, f"one of {STRATEGIES}")
        if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool) or timeout_s <= 0:
            raise wrong("timeout_s", timeout_s, "a number of seconds above 0")
        self.num_workers = num_workers
        self._bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
        self._placement, self._timeout_s = placement, timeout_s
        self._env_vars = dict(env_vars or {})
        self._group: Any = None
        self._workers: list[Any] = []

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] = (),
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the workers and their process group. executable_cls: makes an object on every
        worker, which execute() hands to its function.

        Raises TimeoutError where Ray lacks the resources, and whatever the class raises."""
        check_call("executable_cls", executable_cls)
        if self._workers:
            raise wrong("start()", "called again", "one call before shutdown()")
        bundles = [{k: v for k, v in self._bundle.items() if v} for _ in range(self.num_workers)]
        self._group = placement_group(bundles, strategy=self._placement)
        try:
            self._begin(executable_cls, executable_args, executable_kwargs or {})
        except BaseException:
            self.shutdown()
            raise

    def _begin(self, kind: type | None, arguments: Sequence[Any], options: Mapping[str, Any]):
        if not self._group.wait(self._timeout_s):
            raise TimeoutError(
                f"Ray has not reserved {self._bundle} for each of {self.num_workers} workers "
                f"within {self._timeout_s:.0f} s; ask for less, or add machines to the cluster"
            )
        actor = ray.remote(_Worker)
        self._workers = [
            actor.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle["GPU"],
                runtime_env={"env_vars": self._env_vars},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self.num_workers)
        ]
        hosts = self._results([worker.host.remote() for worker in self._workers])
        address, port = hosts[0]
        addresses = [host for host, _ in hosts]
        self._results([
            worker.begin.remote(
                Place(
                    rank, self.num_workers, addresses[:rank].count(addresses[rank]),
                    addresses.count(addresses[rank]), address, port, "thinwire.ray",
                ),
                self._timeout_s,
            )
            for rank, worker in enumerate(self._workers)
        ])  # fmt: skip
        if kind is not None:
            self._results([w.make.remote(kind, arguments, options) for w in self._workers])

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """fn(*args, **kwargs) on every rank; the results by rank. Raises the error of a rank: where
        one died, a PeerLostError that names it; else the first rank's own."""
        return self._results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As run(), but returns Ray's references at once, whose ray.get() raises Ray's errors."""
        self._check_call("fn", fn)
        return [worker.call.remote(fn, args, kwargs or {}) for worker in self._workers]

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(executable) on every rank, with the object that start() made there; None without."""
        self._check_call("fn", fn)
        return self._results([worker.call_with_executable.remote(fn) for worker in self._workers])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """As execute(), on rank 0 alone."""
        self._check_call("fn", fn)
        return self._results([self._workers[0].call_with_executable.remote(fn)])[0]

    def shutdown(self) -> None:
        """Ends all workers and gives their resources back; may be called twice."""
        if self._workers:
            ends = [worker.end.remote() for worker in self._workers]
            ray.wait(ends, num_returns=len(ends), timeout=_GOODBYE_S)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _check_call(self, name: str, fn: object) -> None:
        if not callable(fn):
            raise wrong(name, fn, "a function")
        if not self._workers:
            raise Error("there are no workers; call start() first")

    def _results(self, references: Sequence[Any]) -> list[Any]:
        """Waits for all, so that no rank is still at it when an error is raised. Peers of a dead
        worker end by the errors of their collectives."""
        ray.wait(list(references), num_returns=len(references))
        results: list[Any] = []
        found: list[Exception] = []
        for rank, reference in enumerate(references):
            try:
                results.append(ray.get(reference))
            except ray.exceptions.RayActorError as error:
                raise PeerLostError(
                    f"the worker of rank {rank} died ({error}); look into Ray's log of it, then "
                    "shutdown() and start() again, from a checkpoint"
                ) from error
            except ray.exceptions.RayTaskError as error:
                found.append(error)
        if found:
            raise found[0]  # an instance of the rank's own error as well
        return results
