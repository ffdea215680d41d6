"""Horovod's PyTorch API over thinwire.

import thinwire.horovod as hvd  # in place of horovod.torch

A program for Horovod runs after changing this line; `compression=hvd.Compression.int4` sends 1/8 of
the bytes. Missing functions raise UnavailableError, which says what to use instead."""

from __future__ import annotations

from thinwire.errors import Error as HorovodInternalError
from thinwire.horovod.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from thinwire.horovod.compression import Compression, Compressor
from thinwire.horovod.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from thinwire.horovod.handles import Handle, poll, synchronize
from thinwire.horovod.missing import (
    SyncBatchNorm,
    elastic,
    start_timeline,
    stop_timeline,
)
from thinwire.horovod.objects import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from thinwire.horovod.ops import Adasum, Average, Max, Min, Op, Product, Sum
from thinwire.horovod.optimizer import DistributedOptimizer
from thinwire.horovod.reducing_optimizer import ReducingOptimizer
from thinwire.horovod.reductions import (
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from thinwire.horovod.transfers import (
    allgather_async,
    alltoall_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_reducescatter_async,
    reducescatter_async,
    sparse_allreduce_async,
)
from thinwire.horovod.world import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "ReducingOptimizer",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
