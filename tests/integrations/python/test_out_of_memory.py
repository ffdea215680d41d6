"""The message that users read when a device is out of memory."""

from __future__ import annotations

import sys
import types

import pytest
from thinwire import errors

OUT_OF_MEMORY = 9  # TW_OUT_OF_MEMORY


class Allocator(types.SimpleNamespace):
    """Stands in for torch.cuda: reserved and allocated bytes per device."""

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self.bytes)

    def memory_reserved(self, device: int) -> int:
        return self.bytes[device][0]

    def memory_allocated(self, device: int) -> int:
        return self.bytes[device][1]


def message_with(monkeypatch: pytest.MonkeyPatch, torch: object) -> str:
    monkeypatch.setitem(sys.modules, "torch", torch)
    error = errors.from_status(OUT_OF_MEMORY, "no 64 bytes of cuda:1")
    assert isinstance(error, errors.OutOfMemoryError)
    assert isinstance(error, MemoryError)
    return str(error)


def test_it_says_what_torch_holds(monkeypatch):
    held = [(0, 0), (3 << 30, 1 << 30)]
    torch = types.SimpleNamespace(cuda=Allocator(initialized=True, bytes=held))
    assert message_with(monkeypatch, torch) == (
        "no 64 bytes of cuda:1; torch's caching allocator holds 3072 MiB of cuda:1, "
        "2048 MiB of that unused"
    )


def test_it_says_that_torch_holds_nothing(monkeypatch):
    torch = types.SimpleNamespace(cuda=Allocator(initialized=True, bytes=[(0, 0)]))
    assert message_with(monkeypatch, torch).endswith("allocator holds nothing")


def test_a_torch_without_a_gpu_is_not_asked(monkeypatch):
    torch = types.SimpleNamespace(cuda=Allocator(initialized=False))
    assert message_with(monkeypatch, torch) == "no 64 bytes of cuda:1"
    assert message_with(monkeypatch, None) == "no 64 bytes of cuda:1"


def test_other_errors_say_nothing_of_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert str(errors.from_status(2, "other sizes")) == "other sizes"
