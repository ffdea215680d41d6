"""The hook for torch.nn.parallel.DistributedDataParallel.

DDP checks the annotations of a hook, so they are not postponed in this file."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire import _library, config
from thinwire.errors import InvalidArgumentError
from thinwire.torch import private, tensors
from thinwire.torch.ddp.copied_state import CopiedState
from thinwire.torch.ddp.state import State
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.exchange.waiter import failed_future


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of the bucket over all ranks, for ddp.register_comm_hook(state, hook).

    bucket.buffer(): flat, float32, bfloat16 or float16, on the CPU or a GPU; the result has its
    shape, dtype and memory, and is bit-identical on all ranks. On a GPU the hook does not wait for
    it, and the future orders streams. Errors come out of backward(), typed."""
    if not isinstance(state, (State, CopiedState)):
        return failed_future(
            InvalidArgumentError(
                f"hook got a {type(state).__name__} as its state, expected a State; call "
                "ddp.register_comm_hook(State(codec='int4'), hook)"
            )
        )
    return state.reduce_bucket(bucket)


def attach(ddp: DistributedDataParallel, codec: Codec | None = None, **options: Any) -> State:
    """Registers the hook on a DDP model; residuals and checkpoints carry its parameters' names.

    options: as State takes them, but for process_group and names. InvalidArgumentError for anything
    but a DDP model of dense parameters in float32, bfloat16 or float16; UnavailableError for one on
    a GPU where the CUDA part is missing."""
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidArgumentError(
            f"attach got a {type(ddp).__name__}, expected a DistributedDataParallel model; wrap it "
            "first"
        )
    delayed = private.delayed_parameters(ddp)
    names = {
        parameter: private.plain_name(name)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    rank = dist.get_rank(ddp.process_group)
    tensors.check_parameters(names, rank)
    tensors.check_modules(ddp.module, rank)
    if any(parameter.is_cuda for parameter in names):
        _library.cuda_devices(config.cuda_library())
    state = State(codec, ddp.process_group, names=names, **options)
    if delayed:
        state.note_bypassed(_names_of(delayed, ddp.module))
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise InvalidArgumentError(f"rank {rank}: the hook can't be registered: {error}") from error
    return state


def _names_of(parameters: list[torch.Tensor], module: torch.nn.Module) -> dict[str, int]:
    """Elements by name."""
    ids = set(map(id, parameters))
    named = module.named_parameters()
    return {private.plain_name(name): p.numel() for name, p in named if id(p) in ids}
