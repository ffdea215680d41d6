"""Arguments of a wrong kind are typed errors that name what was expected, before any sending."""

from collections.abc import Callable
from typing import Any

import pytest
import thinwire
import torch
from models import make_mlp
from ranks import run
from thinwire.torch import GradientExchange, State, all_reduce, hook, reduce_scatter_tensor
from torch.nn.parallel import DistributedDataParallel


def bucket_of(name: Any, part: Any = "a") -> None:
    GradientExchange().bucket(name, [(part, 3)], torch.float32)


def hook_without_state() -> None:
    ddp = DistributedDataParallel(make_mlp())
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(1, 96)).sum().backward()


class OfOthers(torch.Tensor):
    """Like DTensor and torchao's tensors, which hold no elements."""

    def __new__(cls, held: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


ones = torch.ones(8)
sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
# The call, and words of its message.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "codec=4": (lambda: State(4), "codec is 4"),
    "codec=[]": (lambda: State([]), r"codec is \[\]"),
    "lanes=2.5": (lambda: State(lanes=2.5), "lanes is 2.5, expected a whole number from 1 to 64"),
    "lanes=99": (lambda: State(lanes=99), "1 to 64"),
    "chunk_bytes=10": (lambda: State(chunk_bytes=10), "from 4096"),
    "policy": (lambda: State(policy="wfpb"), "policy is 'wfpb', expected one of"),
    "interface": (lambda: State(interface="nope0"), "no network interface 'nope0'"),
    "interfaces": (lambda: State(interface="lo,eth0"), "the name of one network interface"),
    "trace=5": (lambda: State(trace=5), "trace is 5"),
    "trace": (lambda: State(trace="/nowhere/run.json"), "folder that exists.*/nowhere"),
    "clip_value": (lambda: State(clip_value="x"), "clip_value is 'x'"),
    "clip_value=10**400": (lambda: State(clip_value=10**400), "clip_value is 1000.*above 0"),
    "clip_norm=10**400": (lambda: State(clip_norm=10**400), "clip_norm is 1000.*above 0"),
    "checksum": (lambda: State(checksum=torch.ones(2)), "checksum is .*True or False"),
    "DTensor": (lambda: all_reduce(OfOthers(ones)), "a OfOthers, which is made of other tensors"),
    "name=5": (lambda: all_reduce(ones, name=5), "name is 5, expected text"),
    "name NUL": (lambda: all_reduce(ones, name="a\0b"), "without NUL"),
    "scatter's name": (lambda: reduce_scatter_tensor(ones, ones, name=5), "name is 5"),
    "scatter's output": (lambda: reduce_scatter_tensor(5, ones), "output.*got int"),
    "bucket's name": (lambda: bucket_of("a\0"), "without NUL"),
    "part's name": (lambda: bucket_of("a", "b\0"), "without NUL"),
    "expanded": (lambda: all_reduce(torch.ones(1).expand(8)), "expanded.*clone"),
    "expanded in a step": (
        lambda: GradientExchange().reduce({"x": torch.ones(1, 2).expand(4, 2)}), "'x'.*expanded",
    ),
    "no state": (hook_without_state, "hook got a NoneType.*expected a State"),
    "encode's spec": (lambda: thinwire.encode(4, ones), "spec: expected a codec's spec.*got 4"),
    "decode's spec": (lambda: thinwire.decode(4, b"", 1), "spec: expected a codec's spec.*got 4"),
    "decode's n": (lambda: thinwire.decode("int4", b"", "a"), "n is 'a', expected a whole number"),
    "decode's data": (lambda: thinwire.decode("int4", 5, 1), "data: expected bytes.*int"),
    "names=[]": (lambda: State(names=["a"]), "names is a list, expected a dict"),
    "names' keys": (lambda: State(names={"a": ones}), "names has str"),
    "names' values": (lambda: State(names={ones: 5}), "names has Tensor: 5"),
    "group=5": (lambda: State(process_group=5), "process group is 5, expected"),
    "all_reduce's group": (lambda: all_reduce(ones, group="world"), "process group is 'world'"),
    "reduce([])": (lambda: GradientExchange().reduce([ones]), "got a list, expected a dict"),
    "reduce's name": (lambda: GradientExchange().reduce({5: ones}), "5 is no name"),
    "gradients of 5": (lambda: GradientExchange().reduce_gradients({"a": 5}), "'a': got int"),
    "load 5": (lambda: State().load_state_dict(5), "expected a thinwire state dict.*'int'"),
    "load {}": (lambda: State().load_state_dict({}), "a dict without a format"),
    "load []": (lambda: State().load_state_dict([]), "one state dict of each rank"),
    "load half": (lambda: State().load_state_dict({"format": 2}), "is damaged: codec is None"),
    "load no tensors": (
        lambda: State().load_state_dict(State().state_dict() | {"residuals": {"a": {"first": 1}}}),
        "residuals for 'a' are no tensors",
    ),
    "parameters": (lambda: GradientExchange(parameters=["a"]), "parameters is .*element counts"),
    "n=True": (lambda: thinwire.encoded_bytes("int4", True), "n is True, expected a whole number"),
    "spec NUL": (lambda: thinwire.codec_info("int4\0"), "spec such as"),
}  # fmt: skip


def all_cases(_rank: int) -> list[str]:
    found = []
    for name, (call, words) in CASES.items():
        try:
            with pytest.raises(thinwire.InvalidArgumentError, match=words):
                call()
        except (Exception, pytest.fail.Exception) as error:
            found.append(f"{name}: {error!r}")
    return found


def test_arguments_of_a_wrong_kind_are_typed_errors():
    assert run(all_cases, world=1) == [[]]
