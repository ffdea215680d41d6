"""Statistics as scalars; what needs Prometheus' and TensorBoard's own packages is in
tests/frameworks."""

import importlib.util

import pytest
import thinwire
import torch
from models import make_mlp, train, wrap
from ranks import run
from thinwire import observe
from thinwire.torch.optimizer import DistributedOptimizer


class Writer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.rows[tag] = value, step


def log_all(_rank: int):
    ddp, state = wrap(make_mlp(), "int4")
    train(ddp, 3)
    model = make_mlp()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
        optimizer.step()
    found = []
    for of in (state, optimizer):
        writer = Writer()
        observe.log_scalars(of, writer, 7, prefix="run")
        found.append((writer.rows, of.stats()))
    return found


def test_a_state_and_an_optimizer_become_scalars():
    for rows, stats in run(log_all)[0]:
        assert {step for _, step in rows.values()} == {7}
        assert rows["run/steps"][0] == 3
        for name in ("raw_bytes", "wire_bytes", "ratio", "all_reduces"):
            assert rows[f"run/{name}"][0] == stats[name]
        assert rows["run/ratio"][0] > 1
        for stage, seconds in stats["seconds"].items():
            assert rows[f"run/{stage}_s"][0] == seconds
        assert len(rows) == 6 + len(stats["seconds"])


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is not None, reason="it is installed"
)
def test_a_missing_package_is_an_error_that_says_what_to_install():
    with pytest.raises(thinwire.UnavailableError, match=r"pip install .*prometheus"):
        observe.prometheus_text(thinwire.torch.State())
