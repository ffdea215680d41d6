"""Every public function and method of thinwire.horovod, with valid arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thinwire.horovod as hvd
import torch
from public_calls import Call, linear, sgd


def horovod_functions() -> dict[str, Callable[[], Call]]:
    """Calls that only name Horovod's other arguments; they have these in their signature."""
    sets = {"name": None, "process_set": None}
    factors = {"prescale_factor": 1.0, "postscale_factor": 1.0}
    reduction = {
        "average": None,
        "op": None,
        "compression": hvd.Compression.none,
        **sets,
        **factors,
    }
    scatter = {key: value for key, value in reduction.items() if key != "average"}

    def one() -> dict[str, Any]:
        return {"tensor": torch.ones(4), **reduction}

    def several() -> dict[str, Any]:
        return {"tensors": [torch.ones(4)], **reduction}

    def rooted() -> dict[str, Any]:
        return {"tensor": torch.ones(4), "root_rank": 0, **sets}

    def handled() -> dict[str, Any]:
        return {"handle": hvd.allreduce_async(torch.ones(4))}

    arguments: dict[str, Callable[[], dict[str, Any]]] = {
        "ProcessSet": lambda: {"ranks": [0]}, "add_process_set": lambda: {"process_set": [0]},
        "allgather": lambda: {"tensor": torch.ones(4), **sets},
        "allgather_async": lambda: {"tensor": torch.ones(4), **sets},
        "allgather_object": lambda: {"obj": 5, **sets},
        "allreduce": one, "allreduce_": one, "allreduce_async": one, "allreduce_async_": one,
        "alltoall": lambda: {"tensor": torch.ones(4), "splits": [4], **sets},
        "alltoall_async": lambda: {"tensor": torch.ones(4), "splits": [4], **sets},
        "barrier": lambda: {"process_set": None},
        "broadcast": rooted, "broadcast_": rooted, "broadcast_async": rooted,
        "broadcast_async_": rooted,
        "broadcast_object": lambda: {"obj": 5, "root_rank": 0, **sets},
        "broadcast_optimizer_state": lambda: {"optimizer": sgd(linear()), "root_rank": 0},
        "broadcast_parameters": lambda: {
            "params": linear().state_dict(), "root_rank": 0, "prefix": None,
        },
        "grouped_allgather": lambda: {"tensors": [torch.ones(4)], **sets},
        "grouped_allgather_async": lambda: {"tensors": [torch.ones(4)], **sets},
        "grouped_allreduce": several, "grouped_allreduce_": several,
        "grouped_allreduce_async": several, "grouped_allreduce_async_": several,
        "grouped_reducescatter": lambda: {"tensors": [torch.ones(4)], **scatter},
        "grouped_reducescatter_async": lambda: {"tensors": [torch.ones(4)], **scatter},
        "init": lambda: {"comm": None, "process_sets": None},
        "join": lambda: {"device": -1},
        "poll": handled, "synchronize": handled,
        "remove_process_set": lambda: {"process_set": hvd.global_process_set},
        "reducescatter": lambda: {"tensor": torch.ones(4), **scatter},
        "reducescatter_async": lambda: {"tensor": torch.ones(4), **scatter},
        "sparse_allreduce_async": lambda: {"tensor": torch.eye(4).to_sparse(), "op": None, **sets},
    }  # fmt: skip
    return {
        f"horovod.{name}": lambda name=name, make=make: (getattr(hvd, name), make())
        for name, make in arguments.items()
    }


def horovod_optimizer() -> dict[str, Callable[[], Call]]:
    def wrapping() -> Call:
        model = linear()
        return hvd.DistributedOptimizer, {
            "optimizer": sgd(model), "named_parameters": model.named_parameters(),
            "compression": hvd.Compression.none, "backward_passes_per_step": 1, "op": hvd.Average,
            "gradient_predivide_factor": 1.0, "num_groups": 0, "groups": None,
            "sparse_as_dense": False, "process_set": None,
        }  # fmt: skip

    def wrapped() -> Any:
        return hvd.DistributedOptimizer(sgd(linear()))

    def loading() -> Call:
        optimizer = wrapped()
        return optimizer.load_state_dict, {"state_dict": optimizer.state_dict()}

    owner = "horovod.ReducingOptimizer"
    return {
        "horovod.DistributedOptimizer": wrapping,
        "horovod.Compression.thinwire": lambda: (hvd.Compression.thinwire, {"codec": "int4"}),
        f"{owner}.add_param_group": lambda: (wrapped().add_param_group, {"param_group": {}}),
        f"{owner}.load_state_dict": loading,
        f"{owner}.set_backward_passes_per_step": lambda: (
            wrapped().set_backward_passes_per_step, {"passes": 1},
        ),
        f"{owner}.step": lambda: (wrapped().step, {"closure": None}),
        f"{owner}.zero_grad": lambda: (wrapped().zero_grad, {"set_to_none": True}),
    }  # fmt: skip


def horovod_calls() -> dict[str, Callable[[], Call]]:
    """Return the calls by name."""
    return horovod_functions() | horovod_optimizer()
