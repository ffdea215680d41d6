"""CopiedState: what copying or unpickling makes of a State."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.waiter import failed_future

if TYPE_CHECKING:
    from thinwire.torch.exchange.rules import Codec


class CopiedState:
    """Stands in a copied DDP model (copy.deepcopy, pickle, AveragedModel) for the original's State.

    Connections and residuals belong to the original alone. DDP does not register hooks again in a
    copy, so a copy that is only evaluated never uses this; whoever does is told the mend."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # of the original when it was copied

    def reduce_bucket(self, _bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Fails, out of backward()."""
        return failed_future(self._error())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for methods that may not be there
            raise AttributeError(name)
        raise self._error()

    def _error(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            "this is a copy of a State (deepcopy, pickle or AveragedModel), which has no "
            "connections and no residuals; wrap the copied module in a new DDP model and call "
            "attach(ddp, codec=...), and load_state_dict() if it is to go on with residuals"
        )
