"""Compressed gradients for PyTorch, on the CPU and on NVIDIA GPUs::

    import thinwire.torch as tw

    compression = tw.compress(model, codec="int4")           # DDP, FSDP2, replicate, plain modules
    compression = tw.compress(ddp, codec="onebit", optimizer=optimizer)
    ddp.register_comm_hook(tw.State(codec="int4"), tw.hook)  # torch's own spelling
    exchange = tw.GradientExchange(codec="int4")             # for custom training loops

thinwire.torch.advanced has the parts that these are built from."""

from __future__ import annotations

from thinwire.options import Options
from thinwire.torch.agree import check_replicas
from thinwire.torch.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from thinwire.torch.compress import compress
from thinwire.torch.ddp import State, hook
from thinwire.torch.exchange.compression import Compression
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.parameter_server import ParameterServerOptimizer

__all__ = [
    "Compression",
    "GradientExchange",
    "Options",
    "ParameterServerOptimizer",
    "State",
    "all_gather_into_tensor",
    "all_reduce",
    "check_replicas",
    "compress",
    "hook",
    "reduce_scatter_tensor",
]
