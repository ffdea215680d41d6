"""The devices that a test runs on."""

from __future__ import annotations

import pytest
import torch
from thinwire import _library, errors


def why_no_gpu() -> str:
    """Return why tensors on a GPU cannot be reduced here; empty if they can."""
    if not torch.cuda.is_available():
        return "this torch sees no GPU"
    try:
        _library.cuda_devices()
    except errors.UnavailableError as error:
        return str(error)
    return ""


on_gpu = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())
EACH_DEVICE = ["cpu", pytest.param("cuda", marks=on_gpu)]
