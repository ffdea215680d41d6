"""Members that cannot train together: if none has trained yet, the difference is named on all of
them; otherwise the trained ones continue without the different one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import HANG_S
from thinwire import errors
from thinwire.torch import sites

WIDTH = 64


def model_of(hidden: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(hidden)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, hidden, dtype=dtype), torch.nn.Linear(hidden, 4, dtype=dtype)
    )


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7)


class Member:
    """Trains on its own thread."""

    def __init__(
        self,
        server: dist.TCPStore,
        name: str,
        model: torch.nn.Sequential | None = None,
        outer: Callable = sgd,
        fragments: Callable = lambda model: [model],
        **options,
    ) -> None:
        self.model = model_of() if model is None else model
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        self.diloco = sites.DiLoCo(
            sites.join(store, name, timeout_s=100, beat_s=0.05, dead_s=20), fragments(self.model),
            self.inner, outer(list(self.model.parameters())), 2, **options,
        )  # fmt: skip

    def step(self) -> None:
        dtype = self.model[0].weight.dtype
        self.model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        self.inner.step()
        self.inner.zero_grad()

    def train(self, done: Callable[[], bool]) -> list[tuple[str, ...]]:
        """Return the members of each round."""
        with self.diloco:
            while not done():
                self.step()
        return [report.members for report in self.diloco.reports]


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    ("what", "unlike"),
    [
        ("model or model_fragments", {"model": model_of(32)}),
        ("model or model_fragments", {"model": model_of(dtype=torch.bfloat16)}),
        ("model or model_fragments", {"fragments": list}),
        ("outer_optimizer", {"outer": torch.optim.Adam}),
        ("aggregate", {"aggregate": "median"}),
        ("codec", {"codec": "int8"}),
    ],
)
def test_what_differs_is_named_on_all(what, unlike):
    store = server()
    members = [Member(store, "basel"), Member(store, "bonn", **unlike)]
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(one.train, lambda: False) for one in members]
        for run in runs:
            with pytest.raises(errors.MismatchError, match=f"has another .*{what}.* than member 0"):
                run.result(timeout=HANG_S)


def test_members_of_one_name_are_told_where_the_other_one_is():
    store = server()
    places = r"have the name 'basel', at .*127\.0\.0\.1, process .* and .*127\.0\.0\.1, process"
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(Member(store, "basel").train, lambda: False) for _ in range(2)]
        for run in runs:
            with pytest.raises(errors.InvalidArgumentError, match=places + ".*give each a name"):
                run.result(timeout=HANG_S)


@pytest.mark.parametrize(
    ("error", "newcomer"),
    [
        (errors.InvalidArgumentError, {"name": "bonn"}),
        (errors.MismatchError, {"name": "bern", "codec": "int8"}),
    ],
)
def test_members_that_train_go_on_without_a_newcomer_that_is_unlike(caplog, error, newcomer):
    store, last, tried = server(), [], threading.Event()
    first = [Member(store, name) for name in ("basel", "bonn")]
    with caplog.at_level(logging.WARNING, "thinwire"), ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(one.train, lambda one=one: last and one.diloco.rounds >= last[0])
            for one in first
        ]
        while not all(one.diloco.rounds for one in first):
            tried.wait(0.01)
        with pytest.raises(error):
            Member(store, **newcomer).train(lambda: False)
        last.append(max(one.diloco.rounds for one in first) + 4)
        for run in runs:
            assert set(run.result(timeout=HANG_S)) == {("basel", "bonn")}
    assert newcomer["name"] in caplog.text
