"""The launchers: by which variables each is known, and what they say.

A launcher that is started by another one leaves the outer one's variables in place (torchrun under
srun), so the list is in the order from the inner to the outer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from thinwire.errors import InvalidArgumentError
from thinwire.launch import hosts
from thinwire.launch.place import Place, Variables

_log = logging.getLogger("thinwire")


def _torch(variables: Variables) -> Place:
    """torchrun's and its likes': https://docs.pytorch.org/docs/stable/elastic/run.html. Kubeflow's
    PyTorchJob gives a pod its rank without local ones, since there is one process in a pod."""
    size, alone = variables.number("WORLD_SIZE"), variables.get("LOCAL_RANK") is None
    variables.text("MASTER_ADDR")
    variables.number("MASTER_PORT")
    return variables.place(
        variables.number("RANK"),
        size,
        0 if alone else variables.number("LOCAL_RANK"),
        1 if alone else variables.number("LOCAL_WORLD_SIZE"),
    )


def _slurm(variables: Variables) -> Place:
    """srun's: https://slurm.schedmd.com/srun.html. The batch script itself has a SLURM_PROCID as
    well, but no step."""
    size = variables.number("SLURM_STEP_NUM_TASKS")
    node = variables.number("SLURM_NODEID")
    counts = hosts.expand_counts(
        variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    )
    if node >= len(counts):
        raise variables.error(f"SLURM_NODEID is {node}, and tasks are on {len(counts)} nodes")
    nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    return variables.place(
        variables.number("SLURM_PROCID"), size, variables.number("SLURM_LOCALID"), counts[node],
        address=hosts.first_host(nodes), job=job,
    )  # fmt: skip


def _open_mpi(variables: Variables) -> Place:
    """https://docs.open-mpi.org, «environment variables»; versions 1.3 to 5."""
    return variables.place(
        variables.number("OMPI_COMM_WORLD_RANK"),
        variables.number("OMPI_COMM_WORLD_SIZE"),
        variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid"),
    )


def _hydra(variables: Variables) -> Place:
    """Hydra's, the process manager of MPICH and of Intel MPI."""
    return variables.place(
        variables.number("PMI_RANK"),
        variables.number("PMI_SIZE"),
        variables.number("MPI_LOCALRANKID"),
        variables.number("MPI_LOCALNRANKS"),
    )


def _lsf(variables: Variables) -> Place:
    """jsrun's, on LSF. The rank file's first host is the one that launches, and runs no ranks."""
    file = variables.text("LSB_DJOB_RANKFILE")
    try:
        with open(file, encoding="utf-8") as opened:
            named = opened.read().split()
    except OSError as error:
        raise variables.error(f"the file of LSB_DJOB_RANKFILE can't be read: {error}") from None
    if len(named) < 2:
        raise variables.error(f"{file} names {named}, expected the launching host and another")
    return variables.place(
        variables.number("JSM_NAMESPACE_RANK"),
        variables.number("JSM_NAMESPACE_SIZE"),
        variables.number("JSM_NAMESPACE_LOCAL_RANK"),
        variables.number("JSM_NAMESPACE_LOCAL_SIZE"),
        address=named[1],
        job=variables.get("LSB_JOBID"),
    )


def _dmlc(variables: Variables) -> Place:
    """ps-lite's, of MXNet and BytePS. Workers only: there are no servers here. DMLC_WORKER_ID
    numbers machines where bpslaunch starts several processes on each."""
    role = variables.text("DMLC_ROLE")
    if role not in ("worker", "joint"):
        raise variables.error(f"DMLC_ROLE is {role!r}, and thinwire has workers only")
    local_rank = variables.number("BYTEPS_LOCAL_RANK") if variables.get("BYTEPS_LOCAL_RANK") else 0
    local_size = variables.number("BYTEPS_LOCAL_SIZE") if variables.get("BYTEPS_LOCAL_SIZE") else 1
    machines = variables.number("DMLC_NUM_WORKER")
    # With one machine BytePS leaves the machine's number out.
    machine = variables.number("DMLC_WORKER_ID") if machines > 1 else 0
    root = variables.text("DMLC_PS_ROOT_URI")
    variables.number("DMLC_PS_ROOT_PORT")
    return variables.place(
        machine * local_size + local_rank, machines * local_size, local_rank, local_size,
        address=root, job=f"{root}:{variables.text('DMLC_PS_ROOT_PORT')}",
    )  # fmt: skip


class _Launcher(NamedTuple):
    name: str
    known_by: tuple[str, ...]  # all of them are set
    mend: str
    read: Callable[[Variables], Place]


_ALL = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_MPI = "name rank 0's host, as in `mpirun {}host-of-rank-0 ...`"

_LAUNCHERS = (
    _Launcher("torchrun", ("TORCHELASTIC_RUN_ID", "RANK"), f"torchrun sets {_ALL}", _torch),
    _Launcher("Ray Train", ("RAY_JOB_ID", "WORLD_SIZE"),
              f"Ray's TorchTrainer sets {_ALL} for its train function; call this there", _torch),
    _Launcher("torch's variables", ("RANK", "LOCAL_RANK"), f"set all of {_ALL}", _torch),
    _Launcher("a PyTorchJob of Kubeflow", ("RANK", "WORLD_SIZE"),
              "its operator sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT", _torch),
    _Launcher("Open MPI", ("OMPI_COMM_WORLD_RANK",), _MPI.format("-x MASTER_ADDR="), _open_mpi),
    _Launcher("LSF's jsrun", ("JSM_NAMESPACE_RANK",), "start it with jsrun, in a job", _lsf),
    _Launcher("MPICH or Intel MPI", ("PMI_RANK", "MPI_LOCALRANKID"),
              _MPI.format("-genv MASTER_ADDR "), _hydra),
    _Launcher("Slurm", ("SLURM_PROCID",),
              "start every rank with srun, as in `srun --ntasks=4 python train.py`", _slurm),
    _Launcher("DMLC's variables", ("DMLC_ROLE",),
              "start workers only, each with DMLC_ROLE=worker, DMLC_NUM_WORKER, DMLC_WORKER_ID, "
              "DMLC_PS_ROOT_URI (worker 0's host) and DMLC_PS_ROOT_PORT", _dmlc),
)  # fmt: skip


def _launcher_of(environment: Mapping[str, str]) -> _Launcher | None:
    return next(
        (each for each in _LAUNCHERS if all(environment.get(name) for name in each.known_by)), None
    )


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process, so that find() finds it. environment: os.environ."""
    return _launcher_of(os.environ if environment is None else environment) is not None


def find(environment: Mapping[str, str] | None = None) -> Place:
    """The place that the innermost launcher gives this process. environment: os.environ.

    MASTER_ADDR and MASTER_PORT, where they are set, go before what the launcher says. Raises
    InvalidArgumentError if there is no launcher, or if what it says is not whole; the message names
    the variable that is missing."""
    environment = os.environ if environment is None else environment
    if (launcher := _launcher_of(environment)) is not None:
        return launcher.read(Variables(environment, launcher.name, launcher.mend))
    known = ", ".join(dict.fromkeys(launcher.known_by[-1] for launcher in _LAUNCHERS))
    raise InvalidArgumentError(
        f"no launcher started this process: none of {known} is set; start it with `thinwire run "
        "-n 2 python train.py`, torchrun, srun or mpirun"
    )


def setup() -> Place:
    """find(), said to the logger `thinwire`, and set as torchrun's variables in this process, so
    that torch.distributed.init_process_group() works under every launcher."""
    place = find()
    os.environ.update(place.variables())
    _log.info("%s", place)
    return place
