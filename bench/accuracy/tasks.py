"""Tasks of the accuracy benchmark: small models on real data, each with its recipe."""

from __future__ import annotations

import functools
import gzip
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from demo import data

Batch = tuple[torch.Tensor, torch.Tensor]

# The Jargon File, as Debian's package jargon-text ships it.
TEXT = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
_CONTEXT = 32  # characters per input of the language model
_VOCABULARY = 128
_CPU = torch.device("cpu")
_VALIDATION_IMAGES = 5000  # the last images of the training set


class CharLM(nn.Module):
    """An LSTM over characters: logits for the next character at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, _VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0]).transpose(1, 2)


class _Attention(nn.Module):
    """A residual block of a GPT: causal attention of `heads` heads, then two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm_out(x))))


class GPT(nn.Module):
    """A transformer over characters: logits for the next character at every place."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.place = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _VOCABULARY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x) + self.place)).transpose(1, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(data.PIXELS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@functools.cache
def _images(split: str, device: torch.device = _CPU) -> data.Images:
    images = data.load(split)
    return data.Images(images.pixels.to(device), images.labels.to(device))


@functools.cache
def _text(device: torch.device = _CPU) -> torch.Tensor:
    raw = gzip.decompress(TEXT.read_bytes())
    text = torch.frombuffer(bytearray(byte & 127 for byte in raw), dtype=torch.uint8)
    return text.to(device)


class FashionMNIST:
    train_size = 60000 - _VALIDATION_IMAGES

    def batch(self, rows: torch.Tensor) -> Batch:
        return _images("train", rows.device).batch(rows)

    def validation(self) -> Iterator[Batch]:
        for rows in torch.arange(self.train_size, 60000).split(1000):
            yield self.batch(rows)

    def test(self) -> Iterator[Batch]:
        images = _images("t10k")
        for rows in torch.arange(len(images)).split(1000):
            yield images.batch(rows)


class Jargon:
    """Windows of the text; the last tenth is for the test, the one before it for validation."""

    @property
    def train_size(self) -> int:
        return len(_text()) * 8 // 10 - _CONTEXT - 1

    def batch(self, rows: torch.Tensor) -> Batch:
        """Return the batch of these rows, which may have any shape and device."""
        places = rows[..., None] + torch.arange(_CONTEXT + 1, device=rows.device)
        windows = _text(rows.device)[places].long()
        return windows[..., :-1], windows[..., 1:]

    def validation(self) -> Iterator[Batch]:
        return self._tenth(8)

    def test(self) -> Iterator[Batch]:
        return self._tenth(9)

    def _tenth(self, number: int) -> Iterator[Batch]:
        size = len(_text())
        end = size * (number + 1) // 10 - _CONTEXT - 1
        for starts in torch.arange(size * number // 10, end, _CONTEXT).split(256):
            yield self.batch(starts)


@dataclass(frozen=True)
class Task:
    name: str
    make_model: Callable[[], nn.Module]
    data: FashionMNIST | Jargon
    batch: int  # of one worker
    steps: int
    rate: float  # the highest learning rate, which falls to 0 along a cosine
    optimizer: str = "sgd"  # or "adamw", or "muon", with AdamW for all but inner matrices
    momentum: float = 0.9  # of SGD
    warmup: float = 0.0  # the part of the steps in which the rate rises from 0
    dirichlet: float | None = None  # how much members' labels differ (rounds.split_of)

    def rate_factor(self, step: int) -> float:
        """Return the rate of a step, counted from 0, divided by the highest one. Warm-up: Goyal et
        al., arXiv 1706.02677, section 2.2; cosine: Loshchilov and Hutter, arXiv 1608.03983."""
        rising = int(self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * step / self.steps))


TASKS = {
    task.name: task
    for task in (
        Task("mlp", _mlp, FashionMNIST(), batch=64, steps=2340, rate=0.1),
        Task("cnn", _cnn, FashionMNIST(), batch=64, steps=2340, rate=0.1),
        # The best rate of the row above is one step below the rate at which it does not train, so
        # some seeds begin badly.
        Task("cnn warm-up", _cnn, FashionMNIST(), batch=64, steps=2340, rate=0.1, warmup=0.05),
        Task("charlm", CharLM, Jargon(), batch=16, steps=2400, rate=3.0),
        Task("charlm AdamW", CharLM, Jargon(), batch=16, steps=2400, rate=0.006,
             optimizer="adamw"),
        Task("gpt AdamW", GPT, Jargon(), batch=16, steps=2400, rate=0.004, optimizer="adamw"),
        Task("gpt Muon", GPT, Jargon(), batch=16, steps=2400, rate=0.004, optimizer="muon"),
        Task("gpt", GPT, Jargon(), batch=16, steps=2400, rate=0.2),
        # Members have different labels.
        *(
            Task(f"mlp Dirichlet {alpha}", _mlp, FashionMNIST(), batch=64, steps=2340, rate=0.1,
                 dirichlet=alpha)
            for alpha in (0.1, 0.5)
        ),
    )
}  # fmt: skip


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch]) -> tuple[float, float]:
    """Return (accuracy in percent, mean loss)."""
    hits = places = loss = 0.0
    for inputs, targets in batches:
        logits = model(inputs)
        hits += (logits.argmax(1) == targets).sum().item()
        loss += cross_entropy(logits, targets, reduction="sum").item()
        places += targets.numel()
    return 100 * hits / places, loss / places
