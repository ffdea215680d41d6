"""What Horovod has and thinwire has not: each call says what to use."""

from __future__ import annotations

from typing import Any, NoReturn

from thinwire.arguments import wrong
from thinwire.errors import UnavailableError


class _AllRanks:
    """The only process set there is."""

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = _AllRanks()


def check_process_set(process_set: object) -> None:
    """InvalidArgumentError unless it means all ranks."""
    if process_set is not None and process_set is not global_process_set:
        raise wrong(
            "process_set", process_set,
            "global_process_set; for some of the ranks use torch.distributed.new_group and "
            "thinwire.torch.all_reduce(..., group=...)",
        )  # fmt: skip


class Missing:
    """Stands where Horovod has a function, a class or a module; to use it is an
    UnavailableError."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def _refuse(self) -> NoReturn:
        raise UnavailableError(f"thinwire.horovod has no {self._name}; {self._instead}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own protocols look for these
            raise AttributeError(name)
        self._refuse()


_GROUPS = "use torch.distributed.new_group, and thinwire.torch.all_reduce(..., group=...)"
ProcessSet = Missing("ProcessSet", _GROUPS)
add_process_set = Missing("add_process_set", _GROUPS)
remove_process_set = Missing("remove_process_set", _GROUPS)
elastic = Missing(
    "elastic",
    "use thinwire.torch.compress() and its recover(), docs/how-to/recover.md",
)
join = Missing(
    "join",
    "give all ranks as many batches (DistributedSampler does), or wrap the model in torch's DDP, "
    "compress() thinwire to it, and use `with ddp.join():`",
)
alltoall = Missing("alltoall", "use torch.distributed.all_to_all_single")
alltoall_async = Missing("alltoall_async", "use torch.distributed.all_to_all_single")
sparse_allreduce_async = Missing(
    "sparse_allreduce_async",
    "use allreduce_async(tensor.to_dense()), or DistributedOptimizer(..., sparse_as_dense=True)",
)
SyncBatchNorm = Missing("SyncBatchNorm", "use torch.nn.SyncBatchNorm.convert_sync_batchnorm")
start_timeline = Missing("start_timeline", "set THINWIRE_TRACE=run.json, and see `thinwire trace`")
stop_timeline = Missing("stop_timeline", "set THINWIRE_TRACE=run.json, and see `thinwire trace`")
