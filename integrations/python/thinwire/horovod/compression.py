"""Compression: the encoding of gradients and tensors on the network, with Horovod's names."""

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
    """A codec, or rules by name, and other options of GradientExchange; made by Compression.

    compress() and decompress() are for programs that call Horovod's compressors directly: they cast
    to `cast`, if it is set, and back."""

    codec: Codec
    options: Mapping[str, Any] = field(default_factory=dict)
    cast: torch.dtype | None = None

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return (the tensor to send, the context for decompress())."""
        check_kind("tensor", tensor, torch.Tensor, "a torch.Tensor")
        if self.cast is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(self.cast), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the received tensor in the dtype of the tensor that compress() got."""
        check_kind("tensor", tensor, torch.Tensor, "a torch.Tensor")
        check_kind("ctx", ctx, (torch.dtype, type(None)), "what compress() returned, or None")
        return tensor if ctx is None else tensor.to(ctx)

    @property
    def single_codec(self) -> str:
        """Return the codec for a single collective. InvalidArgumentError for rules or options that
        only DistributedOptimizer supports."""
        if not isinstance(self.codec, str) or self.codec == "auto" or self.options:
            raise wrong(
                "compression", self,
                "one codec without options for a single tensor, such as Compression.int4; rules, "
                "'auto' and options are for DistributedOptimizer",
            )  # fmt: skip
        return self.codec


class Compression:
    """Horovod's `none` and `fp16`, and thinwire's codecs.

    none: fp32, exact. fp16: as many bytes as Horovod's, but as bfloat16, which gradients do not
    overflow; sums are in fp32. bf16, int8, int4: the codecs with these names."""

    none = Compressor("fp32")
    fp16 = Compressor("bf16", cast=torch.float16)
    bf16 = Compressor("bf16", cast=torch.bfloat16)
    int8 = Compressor("int8")
    int4 = Compressor("int4")

    @staticmethod
    def thinwire(codec: Codec, **options: Any) -> Compressor:
        """Return a Compressor for any codec.

        Args:
            codec: a spec such as "int4:hadamard=1", rules by parameter name, or "auto".
            options: those of GradientExchange (min_bytes, momentum, timeout_s, ...), for
                DistributedOptimizer.

        Raises:
            InvalidArgumentError: the codec is unknown.
        """
        check_kind("codec", codec, (str, Mapping), "a codec's spec such as 'int4', or rules")
        if isinstance(codec, Mapping):
            Rules(codec).check_specs()
        elif codec != "auto":
            codec_info(codec)
        return Compressor(codec, options)


def check_compression(compression: object) -> None:
    """InvalidArgumentError unless it is a Compressor of Compression."""
    if not isinstance(compression, Compressor):
        raise InvalidArgumentError(
            f"compression is {compression!r}, expected Compression.none, .fp16, .int4 or "
            "Compression.thinwire('...'); compressors of one's own are codecs here "
            "(docs/guides/add-a-codec.md)"
        )
