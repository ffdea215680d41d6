"""Streaming DiLoCo gives the same parameters as torchft's own after the same number of steps."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "integrations" / "python")]

from models import data, loss_of, make_mlp  # noqa: E402
from ranks import run  # noqa: E402

WIDTH = 64
STEPS = 32


def beside_torchft(rank: int, fragments: int, delay: int, alpha: float):
    from thinwire.torch import sites
    from torchft.local_sgd import DiLoCo

    from bench.sites import Manager

    results = []
    for kind in (sites.DiLoCo, DiLoCo):
        model = make_mlp(width=WIDTH)
        parts = [model] if fragments == 1 else [model[0], model[2:]]
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        outers = [
            torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for part in parts
        ]
        members = sites.static() if kind is sites.DiLoCo else Manager()
        options = {"codec": "fp32"} if kind is sites.DiLoCo else {}
        with kind(
            members, parts, inner, outers, 8, fragment_sync_delay=delay,
            fragment_update_alpha=alpha, **options,
        ):  # fmt: skip
            for number in range(STEPS):
                inner.zero_grad()
                loss_of(model, data(number, rank, WIDTH)).backward()
                inner.step()
        results.append([p.detach().clone() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"),
    [(1, 0, 0.0), (1, 3, 0.0), (1, 3, 0.5), (2, 0, 0.5), (2, 2, 0.0), (2, 3, 0.25)],
)
def test_diloco_is_torchfts(fragments, delay, alpha):
    pytest.importorskip("torchft", reason="`make test-frameworks` installs it")
    assert max(run(beside_torchft, fragments, delay, alpha)) < 1e-6
