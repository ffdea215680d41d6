"""Compression: how gradients and tensors go over the network, under Horovod's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.arguments import check_kind, wrong
from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.rules import Codec, Rules


@dataclass(frozen=True)
class Compressor:
    """A codec, or rules by name, and more options of GradientExchange; made by Compression.

    compress() and decompress() are for programs that call Horovod's compressors themselves: they
    cast to `cast`, if there is one, and back."""

    codec: Codec
    options: Mapping[str, Any] = field(default_factory=dict)
    cast: torch.dtype | None = None

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """(the tensor to send, what decompress() needs)"""
        check_kind("tensor", tensor, torch.Tensor, "a torch.Tensor")
        if self.cast is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(self.cast), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The received tensor in the dtype that compress() was given."""
        check_kind("tensor", tensor, torch.Tensor, "a torch.Tensor")
        check_kind("ctx", ctx, (torch.dtype, type(None)), "what compress() returned, or None")
        return tensor if ctx is None else tensor.to(ctx)

    @property
    def single_codec(self) -> str:
        """For a single collective. InvalidArgumentError for what only DistributedOptimizer can
        take."""
        if not isinstance(self.codec, str) or self.codec == "auto" or self.options:
            raise wrong(
                "compression", self,
                "one codec without options for a single tensor, such as Compression.int4; rules, "
                "'auto' and options are for DistributedOptimizer",
            )  # fmt: skip
        return self.codec


class Compression:
    """Horovod's `none` and `fp16`, and thinwire's codecs.

    none: fp32, exact. fp16: as many bytes as Horovod's, of bfloat16, which no gradient overflows;
    sums are made in fp32. bf16, int8, int4: the codecs of these names."""

    none = Compressor("fp32")
    fp16 = Compressor("bf16", cast=torch.float16)
    bf16 = Compressor("bf16", cast=torch.bfloat16)
    int8 = Compressor("int8")
    int4 = Compressor("int4")

    @staticmethod
    def thinwire(codec: Codec, **options: Any) -> Compressor:
        """Any codec: a spec such as "int4:hadamard=1", rules by parameter name, or "auto".

        options: of GradientExchange (min_bytes, momentum, timeout_s, ...), for
          DistributedOptimizer. InvalidArgumentError for an unknown codec."""
        check_kind("codec", codec, (str, Mapping), "a codec's spec such as 'int4', or rules")
        if isinstance(codec, Mapping):
            Rules(codec).check_specs()
        elif codec != "auto":
            codec_info(codec)
        return Compressor(codec, options)


def check_compression(compression: object) -> None:
    """InvalidArgumentError unless it is one of Compression's."""
    if not isinstance(compression, Compressor):
        raise InvalidArgumentError(
            f"compression is {compression!r}, expected Compression.none, .fp16, .int4 or "
            "Compression.thinwire('...'); compressors of one's own are codecs here "
            "(docs/guides/add-a-codec.md)"
        )
