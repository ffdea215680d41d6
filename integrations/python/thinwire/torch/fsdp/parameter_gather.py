"""ParameterGather: FSDP2's all-gather of parameters, compressed, for those who ask for it.

As ZeRO++ quantises weights by blocks: Wang et al., arXiv 2306.10209, section 3.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config
from thinwire.arguments import check_kind, wrong
from thinwire.codec import codec_info
from thinwire.torch import tensors
from thinwire.torch.collectives import Work, start_on
from thinwire.torch.exchange.session import Session
from thinwire.torch.fsdp.buffers import Buffers
from thinwire.torch.group import Membership


class ParameterGather(Buffers):
    """torch.distributed.fsdp's interface of an all-gather, for all units of a model.

    Nothing is kept from one call to the next: the forward and the backward pass of a step see the
    same weights, and the optimizer's shards stay exact."""

    def __init__(self, codec: object, group: dist.ProcessGroup, options: Mapping[str, Any]) -> None:
        """InvalidArgumentError for a codec that has no all-gather, or needs feedback to be of
        use."""
        check_kind("gather", codec, str, "a codec such as 'int8' or 'bf16'")
        info = codec_info(codec)
        if info.entries or info.momentum == "required" or "stochastic" in info.spec:
            expected = (
                "int8, bf16 or another codec that rounds each parameter to the nearest value, so "
                "that all passes of a step compute with the same ones"
            )
            raise wrong("gather", codec, expected)
        self._session = Session(
            Membership(group, "fsdp gather"), config.resolve(**{**options, "codec": codec})
        )
        self._session.close_with(self)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | dist.Work | None:
        """output_tensor: the shards of all ranks. input_tensor: this rank's, which is a part of the
        output. Bytes, of which FSDP2 makes parameters of several dtypes, go exactly."""
        if input_tensor.dtype not in tensors.DTYPES:
            return dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        dtype = tensors.DTYPES[input_tensor.dtype]
        mine = input_tensor.clone()  # the engine's input and output must not overlap
        work = Work(start_on(self._session, "all_gather", mine, output_tensor, dtype))
        if async_op:
            return work
        work.wait()
        return None

    def stats(self, steps: int) -> dict[str, Any]:
        """As GradientExchange.stats(), without parameters."""
        return self._session.summary(steps)

    def describe(self) -> str:
        return self._session.describe()

    def close(self) -> None:
        self._session.close()
