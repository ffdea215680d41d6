"""Rank, world size and rendezvous from launchers' variables, as recorded or documented.
tests/frameworks starts ranks by mpirun and srun themselves."""

import logging
import os
from unittest import mock

import pytest
import thinwire.launch
from thinwire.launch import DEFAULT_PORT, Place, expand_counts, find, first_host, port_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NODELIST": "gpu[003-005],login1",
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "11",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1577713665", "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "7", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3",
}  # fmt: skip
RAY = {
    "RAY_JOB_ID": "01000000", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "41235",
}  # fmt: skip

CASES = {
    "torchrun": (TORCHRUN, Place(3, 4, 1, 2, "node1", 29400, "torchrun")),
    "srun": (SLURM, Place(9, 11, 1, 3, "gpu003", port_of("4711.0"), "Slurm")),
    "torchrun under srun": (SLURM | TORCHRUN, Place(3, 4, 1, 2, "node1", 29400, "torchrun")),
    "srun with a named host": (
        SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "7"}, Place(9, 11, 1, 3, "ib0", 7, "Slurm"),
    ),
    "mpirun": (OPEN_MPI, Place(1, 2, 1, 2, "127.0.0.1", port_of("1577713665"), "Open MPI")),
    "mpirun on two hosts": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                    "MASTER_ADDR": "a"},
        Place(1, 2, 0, 1, "a", port_of("1577713665"), "Open MPI"),
    ),
    "hydra": (HYDRA, Place(2, 3, 2, 3, "127.0.0.1", DEFAULT_PORT, "MPICH or Intel MPI")),
    "Ray Train": (RAY, Place(1, 2, 0, 1, "10.0.0.4", 41235, "Ray Train")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_launchers_variables_are_read(name):
    environment, place = CASES[name]
    assert find(environment) == place
    assert place.source in str(place) and f"rank {place.rank} of {place.size}" in str(place)


def test_setup_says_which_launcher_it_took(caplog):
    caplog.set_level(logging.INFO, logger="thinwire")
    with mock.patch.dict(os.environ, OPEN_MPI, clear=True):
        place = thinwire.launch.setup()
        assert {name: os.environ[name] for name in place.variables()} == place.variables()
    assert caplog.messages == [str(place)] and "by Open MPI" in str(place)


@pytest.mark.parametrize("environment, missing, words", [
    (TORCHRUN, "WORLD_SIZE", "by torchrun, but WORLD_SIZE is not set"),
    (TORCHRUN, "MASTER_ADDR", "MASTER_ADDR is not set"),
    (SLURM, "SLURM_STEP_NUM_TASKS", "by Slurm, but SLURM_STEP_NUM_TASKS is not set; .*srun"),
    (SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "by Open MPI, but OMPI_COMM_WORLD_SIZE"),
    (HYDRA, "PMI_SIZE", "by MPICH or Intel MPI, but PMI_SIZE"),
    (RAY, "MASTER_ADDR", "by Ray Train, but MASTER_ADDR is not set; .*train function"),
])  # fmt: skip
def test_what_is_missing_is_named(environment, missing, words):
    rest = {name: value for name, value in environment.items() if name != missing}
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        find(rest)


@pytest.mark.parametrize("change, words", [
    ({"RANK": "x"}, "RANK is 'x', expected a whole number"),
    ({"RANK": "4"}, "rank 4 of 4, expected ranks from 0 to 3"),
    ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', expected a whole number from 0 to 65535"),
])  # fmt: skip
def test_what_can_not_be_is_named(change, words):
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        find(TORCHRUN | change)


def test_other_ways_to_be_wrong():
    with pytest.raises(thinwire.InvalidArgumentError, match=r"no launcher started this.*srun"):
        find({"HOME": "/root"})
    two_hosts = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(thinwire.InvalidArgumentError, match=r"-x MASTER_ADDR=host-of-rank-0"):
        find(two_hosts)
    with pytest.raises(thinwire.InvalidArgumentError, match="SLURM_NODEID is 5"):
        find(SLURM | {"SLURM_NODEID": "5"})


def test_slurms_lists():
    assert expand_counts("4(x2),3") == [4, 4, 3] and expand_counts("1") == [1]
    with pytest.raises(thinwire.InvalidArgumentError, match="4y"):
        expand_counts("4y")
    for nodes, first in {
        "gpu[003-005,010],login1": "gpu003", "a": "a", "a,b": "a", "n[7]": "n7",
        "rack1-n[02,09]-ib,x": "rack1-n02-ib",
    }.items():  # fmt: skip
        assert first_host(nodes) == first
    with pytest.raises(thinwire.InvalidArgumentError, match="names of hosts"):
        first_host(",a")
