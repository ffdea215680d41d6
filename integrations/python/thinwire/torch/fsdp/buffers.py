"""Buffers: where FSDP2's collectives of ours have their tensors from."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Buffers:
    """What torch.distributed.fsdp asks of a collective beside its call."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a collective to read or write, from torch's own allocator."""
        return torch.empty(*size, dtype=dtype, device=device)
