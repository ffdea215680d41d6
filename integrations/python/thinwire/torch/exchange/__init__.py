"""GradientExchange: the common base of the adapters for DDP, plain modules and other frameworks.
docs/guides/add-a-framework.md says how to write another adapter."""

from __future__ import annotations

from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.gradient_exchange import GradientExchange

__all__ = ["Bucket", "GradientExchange", "Part"]
