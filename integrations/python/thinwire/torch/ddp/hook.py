"""The hook for torch.nn.parallel.DistributedDataParallel.

DDP checks the annotations of a hook, so they are not postponed in this file."""

import torch
import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.ddp.state import CopiedState, State
from thinwire.torch.exchange.waiter import failed_future


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of DDP's to the mean over all ranks: ddp.register_comm_hook(state, hook).

    Args:
        state: a State. On a GPU the hook does not wait for the result, and the future orders
            streams.
        bucket: its buffer is flat, float32, bfloat16 or float16, on the CPU or a GPU. The result
            has its shape, dtype and memory, and is bit-identical on all ranks.

    Returns:
        A future of the buffer. Errors come out of backward(), typed.
    """
    if not isinstance(state, (State, CopiedState)):
        return failed_future(
            InvalidArgumentError(
                f"hook got a {type(state).__name__} as its state, expected a State; call "
                "ddp.register_comm_hook(State(codec='int4'), hook)"
            )
        )
    return state.reduce_bucket(bucket)
