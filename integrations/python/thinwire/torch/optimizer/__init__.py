"""Plain modules and their optimizers over GradientExchange, without DDP."""

from __future__ import annotations

from thinwire.torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
