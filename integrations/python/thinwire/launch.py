"""Where a process stands among all: rank, size and rendezvous, of whichever launcher started it.

    import thinwire.launch
    place = thinwire.launch.setup()  # under torchrun, srun, mpirun, ...; sets torch's variables
    torch.distributed.init_process_group("gloo")

A launcher that is started by another one leaves the outer one's variables in place (torchrun under
srun), so launchers are looked for from the inner to the outer. Nothing here needs torch."""

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

# Ports that are derived from a job's name: above those of services, below those that a kernel
# gives to outgoing connections.
_FIRST_PORT, _LAST_PORT = 15000, 31999
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.05  # between two looks at ranks that run
DEFAULT_PORT = 29500  # torch's own, where nothing tells jobs apart


@dataclass(frozen=True)
class Place:
    """address, port: where rank 0 listens for torch's rendezvous. source: the launcher, in
    words."""

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
        """Those of torchrun, which torch.distributed.init_process_group reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class _Variables:
    """A launcher's variables. A missing one, or one that is no number, is an InvalidArgumentError
    that names it and the fix."""

    def __init__(self, environment: Mapping[str, str], launcher: str, fix: str) -> None:
        self._environment, self._launcher, self._fix = environment, launcher, fix

    def get(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def text(self, *names: str) -> str:
        """The first of these that is set."""
        for name in names:
            if value := self._environment.get(name):
                return value
        raise self.error(f"{' or '.join(names)} is not set")

    def number(self, name: str) -> int:
        text = self.text(name)
        if not text.isdecimal():
            raise self.error(f"{name} is {text!r}, expected a whole number from 0")
        return int(text)

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
        """MASTER_ADDR and MASTER_PORT go before what the launcher says. address: rank 0's host, if
        the launcher tells; None: loopback, if all ranks are on one host. job: the same on all ranks
        of a job, and another one for other jobs, which keeps their ports apart."""
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
        port = self.number("MASTER_PORT") if self.get("MASTER_PORT") else port_of(job)
        return Place(rank, size, local_rank, local_size, named or "127.0.0.1", port, self._launcher)


def port_of(job: str | None) -> int:
    """A port for a job's name."""
    if job is None:
        return DEFAULT_PORT
    return _FIRST_PORT + zlib.crc32(job.encode()) % (_LAST_PORT - _FIRST_PORT + 1)


def _torch(variables: _Variables) -> Place:
    """torchrun's and its likes': https://docs.pytorch.org/docs/stable/elastic/run.html."""
    variables.text("MASTER_ADDR")
    variables.number("MASTER_PORT")
    return variables.place(
        variables.number("RANK"),
        variables.number("WORLD_SIZE"),
        variables.number("LOCAL_RANK"),
        variables.number("LOCAL_WORLD_SIZE"),
    )


def _slurm(variables: _Variables) -> Place:
    """srun's: https://slurm.schedmd.com/srun.html. The batch script itself has a SLURM_PROCID as
    well, but no step."""
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
    """Slurm's tasks by node: "4(x2),3" is [4, 4, 3]."""
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
    """The first of Slurm's list: "gpu[003-005,010]-ib,login1" begins with gpu003-ib."""
    found = re.match(r"([^,\[]*)(?:\[([^\]]*)\]([^,\[]*))?", nodes)
    prefix, ranges, suffix = found.groups() if found else ("", None, None)
    first = re.split(r"[-,]", ranges)[0] if ranges else ""
    host = f"{prefix}{first}{suffix or ''}"
    if not host:
        raise InvalidArgumentError(f"Slurm's list of nodes is {nodes!r}, expected names of hosts")
    return host


def _open_mpi(variables: _Variables) -> Place:
    """https://docs.open-mpi.org, «environment variables»; versions 1.3 to 5."""
    return variables.place(
        variables.number("OMPI_COMM_WORLD_RANK"),
        variables.number("OMPI_COMM_WORLD_SIZE"),
        variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid"),
    )


def _hydra(variables: _Variables) -> Place:
    """Hydra's, the process manager of MPICH and of Intel MPI."""
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
    """Return True if a launcher started this process, so that find() finds it. environment:
    os.environ."""
    return _launcher_of(os.environ if environment is None else environment) is not None


def find(environment: Mapping[str, str] | None = None) -> Place:
    """The place that the innermost launcher gives this process. environment: os.environ.

    MASTER_ADDR and MASTER_PORT, where they are set, go before what the launcher says. Raises
    InvalidArgumentError if there is no launcher, or if one of its variables is missing; the message
    names the variable."""
    environment = os.environ if environment is None else environment
    if (launcher := _launcher_of(environment)) is not None:
        return launcher.read(_Variables(environment, launcher.name, launcher.fix))
    known = ", ".join(dict.fromkeys(launcher.known_by[-1] for launcher in _LAUNCHERS))
    raise InvalidArgumentError(
        f"no launcher started this process: none of {known} is set; start it with `torchrun "
        "--nproc-per-node 2 train.py`, srun or mpirun"
    )


def setup() -> Place:
    """find(), said to the logger `thinwire`, and set as torchrun's variables in this process, so
    that torch.distributed.init_process_group() works under every launcher."""
    place = find()
    os.environ.update(place.variables())
    _log.info("%s", place)
    return place


@dataclass(frozen=True)
class StoreRole:
    """A process's part in a parameter server (thinwire.kvstore).

    Attributes:
        role: "worker", "server" or "scheduler"; the last one is where the others meet, and only
            MXNet's launchers start it.
        rank: workers are numbered from 0, servers from `workers`, and workers that join later from
            `workers` + `servers`. None: by the order in which they come to the scheduler.
        workers: how many there are at the start.
        servers: how many there are.
        address: of the host where members meet.
        port: of that host.
        bigarray_bound: keys with fewer elements stay whole, as MXNet's variable says; 0: none.
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
    """The part that MXNet's variables (DMLC_ROLE and its likes) give this process, else that of
    find() with THINWIRE_SERVERS=s: the last s ranks serve. A RANK of WORLD_SIZE or more is a worker
    that joins later. environment: os.environ.

    Raises InvalidArgumentError, which names the variable, if one is missing or can't be."""
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
        meeting = mxnet.text("DMLC_PS_ROOT_URI"), mxnet.number("DMLC_PS_ROOT_PORT")
        return StoreRole(role, None, *members, *meeting, bigarray_bound)
    rank, size = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    joins_later = rank.isdecimal() and size.isdecimal() and int(rank) >= int(size)
    if joins_later:  # no launcher has such a rank; it meets the others where rank 0 does
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
    """In a launched rank: torch's default group over Gloo, on one thread, until the end."""
    import torch
    import torch.distributed as dist

    setup()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def start_here(ranks: int) -> int:
    """Start this command again as so many ranks on this machine. Return its exit status: that of
    the first rank that fails, which ends the others."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    begun: list[subprocess.Popen[bytes]] = []
    try:
        # Python loses a KeyboardInterrupt that comes in a function which runs after a fork.
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
    """In a new process, where SIGINT is blocked: out of the terminal's signals, so that Ctrl-C is
    for its parent alone, and SIGTERM when the thread that has started it ends."""
    os.setpgid(0, 0)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that has come since the fork goes
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
