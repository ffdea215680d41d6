"""Fashion-MNIST (Xiao et al., arXiv 1708.07747) from Debian's package dataset-fashion-mnist."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path("/usr/share/datasets/fashion-mnist")
PIXELS = 28 * 28
CLASSES = 10
_MEAN, _DEVIATION = 0.2860, 0.3530  # of the training images, in [0, 1]


@dataclass(frozen=True)
class Images:
    """pixels: uint8 (n, 784); labels: int64 (n)."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised float32 pixels (b, 784), and labels (b)."""
        pixels = self.pixels[rows].float().div_(255).sub_(_MEAN).div_(_DEVIATION)
        return pixels, self.labels[rows]


def load(split: str, folder: Path = FOLDER) -> Images:
    """split: "train" (60,000 images) or "t10k" (10,000)."""
    pixels = _read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = _read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    return Images(pixels.reshape(len(pixels), PIXELS), labels.long())


def _read_idx(path: Path) -> torch.Tensor:
    """An IDX file of bytes: two zeros, the type (8), the number of dimensions, the sizes."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: apt-get install dataset-fashion-mnist")
    content = bytearray(gzip.decompress(path.read_bytes()))
    kind, dimensions = content[2], content[3]
    if kind != 8:
        raise SystemExit(f"{path} holds elements of type {kind}, expected 8 (bytes)")
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)
