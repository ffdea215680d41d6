"""Compression: how gradients and tensors go over the network, under Horovod's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.arguments import check_kind, wrong
from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.rules import Codec, Rules


@dataclass(frozen=True)
class Compressor:
    """A codec, or rules by name, and more options of GradientExchange; made by Compression."""

    codec: Codec
    options: Mapping[str, Any] = field(default_factory=dict)

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
    fp16 = Compressor("bf16")
    bf16 = Compressor("bf16")
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
