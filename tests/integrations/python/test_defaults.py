"""Defaults: timeout and host come from torch's process group, rules from the model's structure."""

from __future__ import annotations

import datetime

import pytest
import thinwire.torch as tw
import torch
import torch.distributed as dist
from models import data, digest
from ranks import run
from thinwire.torch.group import Membership
from torch.nn.parallel import DistributedDataParallel


def deadlines(rank: int):
    group = dist.new_group(timeout=datetime.timedelta(minutes=7))
    dist.barrier()  # a rank that leaves at once would end the other's connecting
    return Membership(group, "test").group().timeout_s, Membership(None, "test").group().timeout_s


def test_the_deadline_is_that_of_the_group():
    assert run(deadlines) == [(420.0, 1800.0)] * 2  # the second is Gloo's default


def host(rank: int, port: int):
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()  # a rank that leaves now would end the other's connecting
    return Membership(None, "test").group().host


def test_the_host_is_that_of_the_groups_own_store():
    with_port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = with_port.port
    del with_port
    assert run(host, port) == ["127.0.0.1"] * 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(50, 96)
        self.norm = torch.nn.LayerNorm(96)
        self.out = torch.nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x + self.words(torch.arange(len(x)))))


def structured(rank: int, codec, ddp: bool):
    model = Model()
    wrapped = DistributedDataParallel(model) if ddp else model
    made = tw.compress(wrapped, codec, min_bytes=0)
    wrapped(data(0, rank)).square().sum().backward()
    table = {row["name"]: row["codec"] for row in made.stats()["parameters"]}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return table, digest(model)


@pytest.mark.parametrize("ddp", [True, False])
def test_rules_go_by_structure(ddp):
    rules = {"1d": "fp32", "embedding": "int8", "*": "int4"}
    by_name = {"*.bias": "fp32", "norm.*": "fp32", "words.*": "int8", "*": "int4"}
    ours, names = run(structured, rules, ddp), run(structured, by_name, ddp)
    assert ours == names and ours[0] == ours[1]
    assert ours[0][0]["words.weight"] == "int8" and ours[0][0]["norm.weight"] == "fp32"


@pytest.mark.parametrize("ddp", [True, False])
def test_biases_and_norms_go_exactly_by_default(ddp):
    table = run(structured, None, ddp)[0][0]
    assert table == {
        "norm.bias": "fp32", "norm.weight": "fp32", "out.bias": "fp32", "out.weight": "int4",
        "words.weight": "int4",
    }  # fmt: skip


def test_the_environments_codec_comes_before_the_default():
    table = run(structured, None, True, environment={"THINWIRE_CODEC": "int8"})[0][0]
    assert set(table.values()) == {"int8"}
