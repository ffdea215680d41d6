"""A process's rank, world size and rendezvous, from the variables of the launcher that started it.

    import thinwire.launch
    place = thinwire.launch.setup()  # under torchrun, srun, mpirun, ...; sets torch's variables
    torch.distributed.init_process_group("gloo")

A launcher that is started by another one leaves the outer one's variables set (torchrun under
srun), so inner launchers are checked before outer ones. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.errors import InvalidArgumentError

__all__ = ["Place", "StoreRole", "find", "launched", "setup", "store_role"]

_log = logging.getLogger("thinwire")

# The range of ports that are derived from a job's name: above those of services, below those that a
# kernel uses for outgoing connections.
_FIRST_PORT, _LAST_PORT = 15000, 31999
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.05  # seconds between two checks of running ranks
DEFAULT_PORT = 29500  # torch's default, used if jobs cannot be told apart


@dataclass(frozen=True)
class Place:
    """A process's place in a job. address, port: where rank 0 listens for torch's rendezvous.
    source: text that names the launcher."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    source: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size}, on its host {self.local_rank} of {self.local_size}, "
            f"by {self.source}; rank 0 listens on {self.address}:{self.port}"
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets and
        torch.distributed.init_process_group reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class _Variables:
    """A launcher's variables. InvalidArgumentError, with the name and the fix, if one is missing or
    not a number."""

    def __init__(self, environment: Mapping[str, str], launcher: str, fix: str) -> None:
        self._environment, self._launcher, self._fix = environment, launcher, fix

    def get(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def text(self, *names: str) -> str:
        """Return the first of these that is set."""
        for name in names:
            if value := self._environment.get(name):
                return value
        raise self.error(f"{' or '.join(names)} is not set")

    def number(self, name: str, most: int | None = None) -> int:
        text = self.text(name)
        if not text.isdecimal() or (most is not None and int(text) > most):
            to = "" if most is None else f" to {most}"
            raise self.error(f"{name} is {text!r}, expected a whole number from 0{to}")
        return int(text)

    def port(self, name: str) -> int:
        """A larger number would be cut to 16 bits, and name another port."""
        return self.number(name, 65535)

    def error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"started by {self._launcher}, but {problem}; {self._fix}")

    def place(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        *,
        address: str | None = None,
        job: str | None = None,
    ) -> Place:
        """Return the place. MASTER_ADDR and MASTER_PORT override the launcher's values. address:
        rank 0's host, if the launcher gives it; None: loopback, if all ranks are on one host. job:
        equal on all ranks of a job, and different for other jobs, so that they use other ports."""
        for number, count, words in (
            (rank, size, "rank {} of {}"),
            (local_rank, local_size, "local rank {} of {}"),
        ):
            if number >= count:
                got = words.format(number, count)
                raise self.error(f"its variables say {got}, expected ranks from 0 to {count - 1}")
        named = self.get("MASTER_ADDR") or address
        if named is None and local_size < size:
            raise self.error(
                "nothing says on which host rank 0 runs (MASTER_ADDR is not set), and there are "
                f"{size} ranks, {local_size} of them here"
            )
        port = self.port("MASTER_PORT") if self.get("MASTER_PORT") else port_of(job)
        return Place(rank, size, local_rank, local_size, named or "127.0.0.1", port, self._launcher)


def port_of(job: str | None) -> int:
    """Return a port for a job's name."""
    if job is None:
        return DEFAULT_PORT
    return _FIRST_PORT + zlib.crc32(job.encode()) % (_LAST_PORT - _FIRST_PORT + 1)


def _torch(variables: _Variables) -> Place:
    """torchrun and similar: https://docs.pytorch.org/docs/stable/elastic/run.html."""
    variables.text("MASTER_ADDR")
    variables.port("MASTER_PORT")
    return variables.place(
        variables.number("RANK"),
        variables.number("WORLD_SIZE"),
        variables.number("LOCAL_RANK"),
        variables.number("LOCAL_WORLD_SIZE"),
    )


def _slurm(variables: _Variables) -> Place:
    """srun: https://slurm.schedmd.com/srun.html. The batch script itself also has a SLURM_PROCID,
    but no step."""
    size = variables.number("SLURM_STEP_NUM_TASKS")
    node = variables.number("SLURM_NODEID")
    counts = expand_counts(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if node >= len(counts):
        raise variables.error(f"SLURM_NODEID is {node}, and tasks are on {len(counts)} nodes")
    nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    return variables.place(
        variables.number("SLURM_PROCID"), size, variables.number("SLURM_LOCALID"), counts[node],
        address=first_host(nodes), job=job,
    )  # fmt: skip


def expand_counts(text: str) -> list[int]:
    """Return Slurm's tasks by node: "4(x2),3" is [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise InvalidArgumentError(
                f"Slurm's tasks by node are {text!r}, expected counts such as '4(x2),3'"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu003-ib of "gpu[003-005,010]-ib,login1"."""
    found = re.match(r"([^,\[]*)(?:\[([^\]]*)\]([^,\[]*))?", nodes)
    prefix, ranges, suffix = found.groups() if found else ("", None, None)
    first = re.split(r"[-,]", ranges)[0] if ranges else ""
    host = f"{prefix}{first}{suffix or ''}"
    if not host:
        raise InvalidArgumentError(f"Slurm's list of nodes is {nodes!r}, expected names of hosts")
    return host


def _open_mpi(variables: _Variables) -> Place:
    """Open MPI 1.3 to 5: https://docs.open-mpi.org, "environment variables"."""
    return variables.place(
        variables.number("OMPI_COMM_WORLD_RANK"),
        variables.number("OMPI_COMM_WORLD_SIZE"),
        variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid"),
    )


def _hydra(variables: _Variables) -> Place:
    """Hydra, the process manager of MPICH and of Intel MPI."""
    return variables.place(
        variables.number("PMI_RANK"),
        variables.number("PMI_SIZE"),
        variables.number("MPI_LOCALRANKID"),
        variables.number("MPI_LOCALNRANKS"),
    )


class _Launcher(NamedTuple):
    name: str
    known_by: tuple[str, ...]  # all of them are set
    fix: str
    read: Callable[[_Variables], Place]


_ALL = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_MPI = "name rank 0's host, as in `mpirun {}host-of-rank-0 ...`"

_LAUNCHERS = (
    _Launcher("torchrun", ("TORCHELASTIC_RUN_ID", "RANK"), f"torchrun sets {_ALL}", _torch),
    _Launcher("Ray Train", ("RAY_JOB_ID", "WORLD_SIZE"),
              f"Ray's TorchTrainer sets {_ALL} for its train function; call this there", _torch),
    _Launcher("torch's variables", ("RANK", "LOCAL_RANK"), f"set all of {_ALL}", _torch),
    _Launcher("Open MPI", ("OMPI_COMM_WORLD_RANK",), _MPI.format("-x MASTER_ADDR="), _open_mpi),
    _Launcher("MPICH or Intel MPI", ("PMI_RANK", "MPI_LOCALRANKID"),
              _MPI.format("-genv MASTER_ADDR "), _hydra),
    _Launcher("Slurm", ("SLURM_PROCID",),
              "start every rank with srun, as in `srun --ntasks=4 python train.py`", _slurm),
)  # fmt: skip


def _launcher_of(environment: Mapping[str, str]) -> _Launcher | None:
    return next(
        (each for each in _LAUNCHERS if all(environment.get(name) for name in each.known_by)), None
    )


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher started this process, so that find() succeeds. environment: None:
    os.environ."""
    return _launcher_of(os.environ if environment is None else environment) is not None


def find(environment: Mapping[str, str] | None = None) -> Place:
    """Return this process's place, from the innermost launcher. MASTER_ADDR and MASTER_PORT, if
    they are set, override the launcher's values.

    Args:
        environment: None: os.environ.

    Raises:
        InvalidArgumentError: there is no launcher, or one of its variables is missing; the message
            names the variable.
    """
    environment = os.environ if environment is None else environment
    if (launcher := _launcher_of(environment)) is not None:
        return launcher.read(_Variables(environment, launcher.name, launcher.fix))
    known = ", ".join(dict.fromkeys(launcher.known_by[-1] for launcher in _LAUNCHERS))
    raise InvalidArgumentError(
        f"no launcher started this process: none of {known} is set; start it with `torchrun "
        "--nproc-per-node 2 train.py`, srun or mpirun"
    )


def setup() -> Place:
    """Return find(), log it to the logger `thinwire`, and set torchrun's variables in this process,
    so that torch.distributed.init_process_group() works under every launcher. Raises the errors of
    find()."""
    place = find()
    os.environ.update(place.variables())
    _log.info("%s", place)
    return place


@dataclass(frozen=True)
class StoreRole:
    """A process's part in a parameter server (thinwire.kvstore).

    Attributes:
        role: "worker", "server" or "scheduler"; only MXNet's launchers start a scheduler, which has
            the rendezvous store of the others.
        rank: workers are numbered from 0, servers from `workers`, and workers that join later from
            `workers` + `servers`. None: in the order in which they connect to the scheduler.
        workers: the number of workers at the start.
        servers: the number of servers.
        address: the host of the members' rendezvous store.
        port: its port.
        bigarray_bound: keys with fewer elements are not cut, as MXNet's variable says; 0: none.
    """

    role: str
    rank: int | None
    workers: int
    servers: int
    address: str
    port: int
    bigarray_bound: int = 0

    @property
    def joins_later(self) -> bool:
        return self.rank is not None and self.rank >= self.workers + self.servers


_STORE_ROLES = ("worker", "server", "scheduler")


def store_role(environment: Mapping[str, str] | None = None) -> StoreRole:
    """Return the role that MXNet's variables (DMLC_ROLE and others) give this process, else that of
    find() with THINWIRE_SERVERS=s: the last s ranks serve. A RANK of WORLD_SIZE or more is a worker
    that joins later.

    Args:
        environment: None: os.environ.

    Raises:
        InvalidArgumentError: a variable, which the message names, is missing or not valid.
    """
    environment = os.environ if environment is None else environment
    mxnet = _Variables(environment, "MXNet's variables", "set DMLC_ROLE, DMLC_NUM_WORKER, "
                       "DMLC_NUM_SERVER, DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")  # fmt: skip
    bound = "MXNET_KVSTORE_BIGARRAY_BOUND"
    bigarray_bound = mxnet.number(bound) if mxnet.get(bound) else 0
    if (role := mxnet.get("DMLC_ROLE")) is not None:
        if role not in _STORE_ROLES:
            raise mxnet.error(f"DMLC_ROLE is {role!r}, expected worker, server or scheduler")
        members = mxnet.number("DMLC_NUM_WORKER"), mxnet.number("DMLC_NUM_SERVER")
        if 0 in members:
            raise mxnet.error("there are {} workers and {} servers, expected 1 or more of each"
                              .format(*members))  # fmt: skip
        meeting = mxnet.text("DMLC_PS_ROOT_URI"), mxnet.port("DMLC_PS_ROOT_PORT")
        return StoreRole(role, None, *members, *meeting, bigarray_bound)
    rank, size = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    joins_later = rank.isdecimal() and size.isdecimal() and int(rank) >= int(size)
    if joins_later:  # no launcher has such a rank; use rank 0's address
        alone = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = {**environment, **alone}
    place = find(environment)
    torch = _Variables(environment, place.source, "set THINWIRE_SERVERS=s on all ranks: the last s "
                       "of them serve, and the others train")  # fmt: skip
    servers = torch.number("THINWIRE_SERVERS")
    if not 0 < servers < place.size:
        raise torch.error(f"THINWIRE_SERVERS is {servers}, expected 1 to {place.size - 1}, so that "
                          f"of {place.size} ranks one or more train")  # fmt: skip
    workers = place.size - servers
    number = int(rank) if joins_later else place.rank
    role = "server" if workers <= number < place.size else "worker"
    meeting = place.address, place.port
    return StoreRole(role, number, workers, servers, *meeting, bigarray_bound)


@contextlib.contextmanager
def gloo_group() -> Iterator[None]:
    """In a launched rank: a context with torch's default group over Gloo, and one torch thread."""
    import torch
    import torch.distributed as dist

    setup()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


_MOST_HERE = 256  # each is a process that imports torch


def start_here(ranks: int) -> int:
    """Start this command again as `ranks` ranks on this machine. If one fails, end the others.
    Return the exit status of the first rank that failed, else 0."""
    if ranks > _MOST_HERE:
        raise InvalidArgumentError(
            f"--ranks is {ranks}, expected at most {_MOST_HERE} on one machine; start more on "
            "several machines with a launcher such as torchrun"
        )
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    begun: list[subprocess.Popen[bytes]] = []
    try:
        # Python loses a KeyboardInterrupt during a function that runs after a fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        follow = functools.partial(_follow, os.getpid(), mask)
        try:
            for rank in range(ranks):
                place = Place(rank, ranks, rank, ranks, "127.0.0.1", port, "thinwire")
                command = [sys.executable, "-m", "thinwire", *sys.argv[1:]]
                variables = os.environ | place.variables() | {"OMP_NUM_THREADS": "1"}
                begun.append(subprocess.Popen(command, env=variables, preexec_fn=follow))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while not any(ended := [each.poll() for each in begun]) and None in ended:
            time.sleep(_LOOK_S)
        return next(filter(None, ended), 0)
    finally:
        for each in begun:
            each.terminate()
        for each in begun:
            each.wait()


def _follow(parent: int, mask: set[signal.Signals]) -> None:
    """Prepare a new process, in which SIGINT is blocked: take it out of the terminal's process
    group, so that only its parent gets Ctrl-C, and send it SIGTERM when the thread that has started
    it ends."""
    os.setpgid(0, 0)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that came since the fork
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
