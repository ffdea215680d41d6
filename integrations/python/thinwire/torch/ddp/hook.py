"""The hook for torch.nn.parallel.DistributedDataParallel.

DDP checks the annotations of a hook, so this file does not import `annotations` from __future__."""

import torch
import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.ddp.state import CopiedState, State
from thinwire.torch.exchange.waiter import failed_future


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a DDP bucket to its mean over all ranks. Use: ddp.register_comm_hook(state, hook).

    Args:
        state: a State.
        bucket: its buffer is flat, float32, bfloat16 or float16, on the CPU or a GPU. The mean is
            written into it, bit-identical on all ranks.

    Returns:
        A future of the buffer. On a GPU the hook does not wait for the mean; the future orders
        streams. A failure makes backward() raise the typed error.
    """
    if not isinstance(state, (State, CopiedState)):
        return failed_future(
            InvalidArgumentError(
                f"hook got a {type(state).__name__} as its state, expected a State; call "
                "ddp.register_comm_hook(State(codec='int4'), hook)"
            )
        )
    return state.reduce_bucket(bucket)
