"""For Accelerate 1: prepare() with compressed gradients."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import check_kind
from thinwire.errors import InvalidArgumentError
from thinwire.torch import compress
from thinwire.torch.advanced import GatheredState
from thinwire.torch.exchange.rules import check_no_momentum


def prepare(accelerator: Accelerator, *objects: Any, **options: Any) -> tuple[Any, ...]:
    """Call accelerator.prepare(*objects), then compress() on the DDP model among them.

    save_state() and load_state() include the residuals of all ranks, in any world size.

    Args:
        accelerator: the program's Accelerator.
        objects: as accelerator.prepare() takes them.
        options: codec and other options of compress(), except momentum.

    Returns:
        The prepared objects in their order, and then the State; None in its place in a program of
        one process.

    Raises:
        InvalidArgumentError: there are several processes, but not exactly one DDP model.
    """
    check_kind("accelerator", accelerator, Accelerator, "an Accelerator, and then the objects")
    check_no_momentum("Accelerate", options)
    prepared = accelerator.prepare(*objects) if objects else ()
    prepared = (prepared,) if len(objects) == 1 else prepared
    models = [each for each in prepared if isinstance(each, DistributedDataParallel)]
    if accelerator.num_processes == 1:
        return *prepared, None
    if len(models) != 1:
        raise InvalidArgumentError(
            f"prepare got {len(models)} models that Accelerate wraps in DistributedDataParallel, "
            f"expected one ({accelerator.distributed_type}); for FSDP2 take "
            "thinwire.torch.compress(model), for several models compress() to each"
        )
    state = compress(models[0], **options)
    accelerator.register_for_checkpointing(GatheredState(state))
    return *prepared, state
