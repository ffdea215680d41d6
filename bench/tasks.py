"""Tasks of the accuracy benchmark: three small models on real data, each with its recipe."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from thinwire.demo import data
from torch import nn
from torch.nn.functional import cross_entropy

Batch = tuple[torch.Tensor, torch.Tensor]

# The Jargon File, as Debian's package jargon-text ships it.
TEXT = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
_CONTEXT = 32  # characters that the language model reads at once
_VOCABULARY = 128


class CharLM(nn.Module):
    """An LSTM over characters: logits for the next one at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, _VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0]).transpose(1, 2)


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
def _images(split: str) -> data.Images:
    return data.load(split)


@functools.cache
def _text() -> torch.Tensor:
    raw = gzip.decompress(TEXT.read_bytes())
    return torch.frombuffer(bytearray(byte & 127 for byte in raw), dtype=torch.uint8)


class FashionMNIST:
    train_size = 60000

    def batch(self, rows: torch.Tensor) -> Batch:
        return _images("train").batch(rows)

    def test(self) -> Iterator[Batch]:
        images = _images("t10k")
        for rows in torch.arange(len(images)).split(1000):
            yield images.batch(rows)


class Jargon:
    """Windows of the text; the last tenth is for the test."""

    @property
    def train_size(self) -> int:
        return len(_text()) * 9 // 10 - _CONTEXT - 1

    def batch(self, rows: torch.Tensor) -> Batch:
        windows = _text()[rows[:, None] + torch.arange(_CONTEXT + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def test(self) -> Iterator[Batch]:
        starts = torch.arange(len(_text()) * 9 // 10, len(_text()) - _CONTEXT - 1, _CONTEXT)
        for rows in starts.split(256):
            yield self.batch(rows)


@dataclass(frozen=True)
class Task:
    name: str
    make_model: Callable[[], nn.Module]
    data: FashionMNIST | Jargon
    batch: int  # of one worker
    steps: int
    rate: float  # learning rate at the start; it falls to 0 along a cosine
    momentum: float = 0.9


TASKS = {
    task.name: task
    for task in (
        Task("mlp", _mlp, FashionMNIST(), batch=64, steps=2340, rate=0.1),
        Task("cnn", _cnn, FashionMNIST(), batch=64, steps=2340, rate=0.1),
        Task("charlm", CharLM, Jargon(), batch=16, steps=2400, rate=3.0),
    )
}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """(accuracy in percent, mean loss) on the test set."""
    hits = places = loss = 0.0
    for inputs, targets in task.data.test():
        logits = model(inputs)
        hits += (logits.argmax(1) == targets).sum().item()
        loss += cross_entropy(logits, targets, reduction="sum").item()
        places += targets.numel()
    return 100 * hits / places, loss / places
