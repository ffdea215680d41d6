"""thinwire.horovod on two ranks and on three. All checks of a world size share one run of the
processes. Each check is a function that all ranks call: of horovod_collectives.py or
horovod_training.py for two ranks, of horovod_process_sets.py for three."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import horovod_collectives
import horovod_process_sets
import horovod_training
import pytest
import thinwire.horovod as hvd
import torch
import torch.distributed as dist
from horovod_training import net, trained, wrapped
from ranks import outcomes_of, reserved_port, run
from thinwire.horovod.world import Seat, numbers_of
from thinwire.torch import private

pytestmark = pytest.mark.xdist_group("horovod")

Checks = dict[str, Callable[[int], None]]


def checks_of(*modules: ModuleType) -> Checks:
    return {
        name: check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_") and check.__module__ == module.__name__
    }


# The last check leaves the group and joins again.
ON_TWO = checks_of(horovod_training, horovod_collectives)
ON_THREE = checks_of(horovod_process_sets)


def every_check(rank: int, checks: Checks) -> dict[str, str]:
    """Return each check's error by name. The first failure ends the run, since the ranks may no
    longer be in step."""
    hvd.init()
    outcome: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check(rank)
            outcome[name] = ""
            hvd.barrier()
        except (Exception, pytest.fail.Exception):
            outcome[name] = traceback.format_exc()
            break
    return outcome


LIMITS = {"environment": {"THINWIRE_TIMEOUT_S": "100"}}


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, str]]:
    return run(every_check, ON_TWO, **LIMITS)


@pytest.fixture(scope="module")
def of_three() -> list[dict[str, str]]:
    return run(every_check, ON_THREE, world=3, **LIMITS)


def check(outcomes: list[dict[str, str]], name: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(name, "it was not reached") == "", f"rank {rank}\n{outcome.get(name)}"


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_ranks(of_two, name):
    check(of_two, name)


@pytest.mark.parametrize("name", ON_THREE)
def test_on_three_ranks(of_three, name):
    check(of_three, name)


# The names of Horovod 0.28's PyTorch API: each exists, or its error says what to use instead.
NAMES = re.findall(
    r"\w+",
    """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
    is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
    nccl_built ddl_built ccl_built cuda_built rocm_built start_timeline stop_timeline allreduce
    allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_
    grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather
    allgather_async grouped_allgather grouped_allgather_async allgather_object broadcast
    broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_parameters
    broadcast_optimizer_state reducescatter reducescatter_async grouped_reducescatter
    grouped_reducescatter_async alltoall alltoall_async join barrier poll synchronize Average
    Sum Adasum Min Max Product Compression DistributedOptimizer SyncBatchNorm elastic ProcessSet
    global_process_set add_process_set remove_process_set HorovodInternalError
    """,
)


def test_every_name_of_horovods_is_here():
    assert not set(NAMES) - set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert all(hasattr(hvd.Compression, name) for name in ("none", "fp16"))
    options = inspect.signature(hvd.DistributedOptimizer).parameters
    assert {
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set",
    } <= set(options)  # fmt: skip


def alone(_: int) -> None:
    """Use Horovod without a launcher and without a process group."""
    dist.destroy_process_group()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
    assert hvd.allreduce(torch.tensor([3.0])).item() == 3.0
    assert hvd.allgather(torch.tensor([3])).tolist() == [3]
    model = net()
    trained(model, wrapped(model), 0, range(2))
    hvd.shutdown()
    assert not dist.is_initialized()


def test_a_process_without_a_launcher_is_alone():
    run(alone, world=1)


def anew_while_rank_0_is_late(rank: int) -> list[float]:
    """Rank 1 initializes again before rank 0 does. The store in which they meet is rank 0's, and
    still has rank 0's address of the first time."""
    dist.destroy_process_group()
    ports, hold = Path(os.environ["PORT_FILE"]), contextlib.ExitStack()
    if rank == 0:
        port = hold.enter_context(reserved_port())
        ports.with_suffix(".new").write_text(str(port))
        ports.with_suffix(".new").rename(ports)
    while not ports.exists():
        time.sleep(0.01)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": ports.read_text(), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    destroy = dist.destroy_process_group

    kept = []

    def late(*arguments: object) -> None:
        kept.append(private.store_of(dist.group.WORLD))  # keeps its server alive
        destroy(*arguments)
        time.sleep(0.5 * (rank == 0))

    dist.destroy_process_group = late
    found = []
    for _ in range(2):
        hvd.init()
        found.append(hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item())
        hvd.shutdown()
    hold.close()
    return found


def test_a_rank_may_initialize_again_before_the_others_have_shut_down(tmp_path):
    environment = {"PORT_FILE": str(tmp_path / "port"), "THINWIRE_TIMEOUT_S": "100"}
    assert run(anew_while_rank_0_is_late, environment=environment) == [[3.0, 3.0]] * 2


def test_numbers_of_hosts():
    """There are two hosts, with two ranks and with one, whose ranks alternate."""
    seats = [Seat("a", 0, 2), Seat("b", 0, 1), Seat("a", 1, 2)]
    expected = [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]
    for unknown in (False, True):  # without a launcher the host names are compared
        given = [Seat(seat.host, None, None) for seat in seats] if unknown else seats
        found = [numbers_of(rank, given) for rank in range(3)]
        assert [numbers[2:6] for numbers in found] == expected
        assert not any(numbers.homogeneous for numbers in found)


def one_rank_ends(rank: int) -> None:
    hvd.init()
    if rank == 1:
        handle = hvd.allreduce_async(torch.ones(4), name="x")
        hvd.allreduce_async(torch.ones(4), name="x")
        hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async(torch.ones(4), name="x"))
    hvd.allreduce(torch.ones(4, dtype=torch.int64))


def test_a_rank_that_fails_alone_ends_the_others_with_a_typed_error():
    others, failed = outcomes_of(one_rank_ends, environment={"THINWIRE_TIMEOUT_S": "20"})
    assert (failed.error, others.error) == ("InvalidArgumentError", "PeerLostError")
    assert "'x' is in flight" in failed.message and "rank" in others.message
