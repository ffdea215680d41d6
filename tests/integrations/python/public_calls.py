"""Valid calls of every public function, constructor and method of thinwire and thinwire.torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import thinwire
import thinwire.torch
import torch
import torch.distributed as dist
from thinwire import simulate
from thinwire.torch import GradientExchange, ParameterServerOptimizer, State
from thinwire.torch.advanced import (
    Communicator,
    DistributedState,
    GatheredState,
    NamedResiduals,
)
from thinwire.torch.backend import Options, register
from thinwire.torch.optimizer.module_compression import OptimizedCompression
from thinwire.torch.process_group import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

Call = tuple[Callable[..., Any], dict[str, Any]]


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4, bias=False)


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def optimized() -> OptimizedCompression:
    model = linear()
    return OptimizedCompression(model, None, sgd(model))


def bucket_of(exchange: GradientExchange) -> Any:
    return exchange.bucket("b", [("a", 8)], torch.float32)


@functools.cache
def served() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def functions() -> dict[str, Callable[[], Call]]:
    floats = {"input": torch.ones(8), "output": torch.ones(8)}
    none = {"codec": None, "name": None, "group": None, "async_op": False}
    link = simulate.Link(2, 1e9)
    profile = simulate.Profile((simulate.Layer(1000, 1e-3, 1e-3),))
    return {
        "codec_info": lambda: (thinwire.codec_info, {"spec": "int4"}),
        "encode": lambda: (
            thinwire.encode, {"spec": "int4", "x": torch.ones(4), "residual": torch.ones(4)},
        ),
        "decode": lambda: (thinwire.decode, {"spec": "fp32", "data": bytes(16), "n": 4}),
        "encoded_bytes": lambda: (thinwire.encoded_bytes, {"spec": "int4", "n": 4}),
        "simulate": lambda: (
            simulate.simulate,
            {
                "profile": profile, "link": link, "codec": "int4", "policy": "p3",
                "cost": simulate.CodecCost(), "lanes": None, "chunk_bytes": None,
                "min_bytes": None, "planned": False,
            },
        ),
        "all_reduce": lambda: (
            thinwire.torch.all_reduce,
            {"tensor": torch.ones(8), "op": dist.ReduceOp.SUM, **none, "strict": None},
        ),
        "all_gather_into_tensor": lambda: (
            thinwire.torch.all_gather_into_tensor,
            {"input_tensor": torch.ones(8), "output_tensor": torch.ones(8), **none,
             "strict": None},
        ),
        "reduce_scatter_tensor": lambda: (
            thinwire.torch.reduce_scatter_tensor,
            {**floats, "op": dist.ReduceOp.SUM, **none, "strict": None},
        ),
        "compress": lambda: (
            thinwire.torch.compress,
            {
                "model": DistributedDataParallel(linear()), "codec": None, "optimizer": None,
                "process_group": None,
            },
        ),
        "check_replicas": lambda: (
            thinwire.torch.check_replicas, {"module": linear(), "group": None, "step": None},
        ),
        "merge_state_dicts": lambda: (
            thinwire.torch.advanced.merge_state_dicts,
            {"saved": [State().state_dict()], "world": 1, "rank": 0},
        ),
    }  # fmt: skip


def constructors() -> dict[str, Callable[[], Call]]:
    def optimizer() -> Call:
        model = linear()
        return thinwire.torch.compress, {
            "model": model, "codec": None, "optimizer": sgd(model), "policy": "p3",
            "momentum": 0.0, "nesterov": False, "delay": 0, "warm_up_steps": 0,
            "process_group": None, "find_unused_parameters": False,
        }  # fmt: skip

    def exchange() -> Call:
        return GradientExchange, {
            "codec": None, "process_group": None, "momentum": 0.0, "nesterov": False,
            "parameters": None, "purpose": "exchange",
        }  # fmt: skip

    def state() -> Call:
        options = inspect.signature(State).parameters.values()
        return State, {p.name: p.default for p in options if p.kind is not p.VAR_KEYWORD}

    def communicator() -> Call:
        return Communicator, {
            "store": dist.HashStore(), "rank": 0, "size": 2, "key": "k", "codec": None,
        }  # fmt: skip

    def served() -> Call:
        model = linear()
        return ParameterServerOptimizer, {
            "optimizer": sgd(model), "model": model, "mode": "local", "codec": None,
            "overlap": True, "timeout_s": 20,
        }  # fmt: skip

    def shared() -> Call:
        model = linear()
        alone = ParameterServerOptimizer(sgd(model), model, mode="local", timeout_s=20)
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        return alone.share, {
            "dataset": data, "batch_size": 4, "epochs": 1, "shuffle": True, "seed": 0,
        }  # fmt: skip

    return {
        "ParameterServerOptimizer.share": shared,
        "Communicator": communicator, "ParameterServerOptimizer": served,
        "compress with an optimizer": optimizer, "GradientExchange": exchange,
        "State": state, "NamedResiduals": lambda: (NamedResiduals, {"group": None}),
        "GatheredState": lambda: (GatheredState, {"of": State()}),
    }  # fmt: skip


def exchange_methods() -> dict[str, Callable[[], Call]]:
    def submitting(name: str) -> Call:
        exchange = GradientExchange()
        return getattr(exchange, name), {"bucket": bucket_of(exchange), "buffer": torch.ones(8)}

    def waiting() -> Call:
        exchange = GradientExchange()
        return exchange.wait, {"submission": exchange.submit(bucket_of(exchange), torch.ones(8))}

    def taking() -> Call:
        exchange = GradientExchange(momentum=0.9)
        return exchange.take_momentum, {
            "optimizer": sgd(linear(), momentum=0.9), "name_of": lambda _: "w",
        }  # fmt: skip

    return {
        "bucket": lambda: (
            GradientExchange().bucket,
            {
                "name": "b", "parts": [("a", 8)], "dtype": torch.float32, "priority": 0,
                "shape": None,
            },
        ),
        "submit": lambda: submitting("submit"),
        "start": lambda: (lambda call: (call[0], {**call[1], "finish": None}))(submitting("start")),
        "wait": waiting,
        "end_step": lambda: (GradientExchange().end_step, {"repeats": True}),
        "between_steps": lambda: (
            GradientExchange().between_steps, {"device": torch.device("cpu"), "finish": None},
        ),
        "try_codecs": lambda: (GradientExchange().try_codecs, {"codecs": ("fp32", "int8")}),
        "fail": lambda: (GradientExchange().fail, {"error": thinwire.Error("enough")}),
        "recover": lambda: (GradientExchange().recover, {"process_group": None, "made": None}),
        "reduce": lambda: (GradientExchange().reduce, {"named": {"a": torch.ones(8)}}),
        "reduce_gradients": lambda: (
            GradientExchange().reduce_gradients, {"named": dict(linear().named_parameters())},
        ),
        "take_momentum": taking,
        "load_momentum": lambda: (
            GradientExchange(momentum=0.9).load_momentum, {"momentum": {"a": torch.ones(8)}},
        ),
        "load_state_dict": lambda: (
            GradientExchange().load_state_dict, {"saved": GradientExchange().state_dict()},
        ),
        "check_state_dict": lambda: (
            GradientExchange().check_state_dict, {"saved": GradientExchange().state_dict()},
        ),
    }  # fmt: skip


def other_methods() -> dict[str, Callable[[], Call]]:
    def marking() -> Call:
        bucket = bucket_of(GradientExchange())
        return bucket.mark_absent, {"index": 0, "absent": False}

    def clipping() -> Call:
        return optimized().clip_grad_norm_, {"max_norm": 1.0, "norm_type": 2.0}

    def loading() -> Call:
        made = optimized()
        return made.load_state_dict, {"saved": made.state_dict()}

    def alone() -> Communicator:
        return Communicator(None, 0, 1, "k")

    def configuring() -> Call:
        # For any number of ranks, but only one is here.
        return functools.partial(ProcessGroup(timeout_s=5).configure, world_size=1), {
            "store_addr": f"127.0.0.1:{served().port}/x", "rank": 0,
        }  # fmt: skip

    return {
        "Communicator.all_reduce": lambda: (
            alone().all_reduce,
            {"tensor": torch.ones(8), "op": dist.ReduceOp.SUM, "name": None, "async_op": False},
        ),
        "Communicator.fail": lambda: (alone().fail, {"error": thinwire.Error("enough")}),
        "ProcessGroup": lambda: (ProcessGroup, {"codec": None, "scope": None}),
        "Options": lambda: (Options, {"codec": None, "scope": None}),
        "ProcessGroup.configure": configuring,
        "register": lambda: (register, {"codec": None, "name": "wired"}),
        "Bucket.mark_absent": marking,
        "OptimizedCompression.clip_grad_norm_": clipping,
        "OptimizedCompression.load_state_dict": loading,
        "OptimizedCompression.recover": lambda: (optimized().recover, {"process_group": None}),
        "OptimizedCompression.step": lambda: (optimized().step, {"closure": None}),
        "GatheredState.load_state_dict": lambda: (
            GatheredState(State()).load_state_dict, {"saved": State().gathered_state_dict()},
        ),
        "DistributedState": lambda: (DistributedState, {"of": State()}),
        "DistributedState.load_state_dict": lambda: (
            DistributedState(State()).load_state_dict,
            {"saved": DistributedState(State()).state_dict()},
        ),
        "NamedResiduals.load_state_dict": lambda: (
            NamedResiduals().load_state_dict, {"saved": NamedResiduals().state_dict()},
        ),
        "State.load_momentum": lambda: (
            State(momentum=0.9).load_momentum, {"momentum": {"a": torch.ones(8)}},
        ),
        "State.load_state_dict": lambda: (State().load_state_dict, {"saved": State().state_dict()}),
        "State.check_state_dict": lambda: (
            State().check_state_dict, {"saved": State().state_dict()}
        ),
        "State.take_momentum": lambda: (
            State(momentum=0.9).take_momentum,
            {"optimizer": sgd(linear()), "name_of": None},
        ),
        "State.recover": lambda: (
            State().recover, {"process_group": None, "module": None, "optimizer": None},
        ),
        "State.reduce_bucket": lambda: (State().reduce_bucket, {"bucket": 5}),
    }  # fmt: skip


def file_methods(folder: str) -> dict[str, Callable[[], Call]]:
    def loading(kind: type) -> Call:
        user = kind()
        user.save(f"{folder}/good.safetensors")
        return user.load, {"path": f"{folder}/good.safetensors"}

    def alone() -> ParameterServerOptimizer:
        model = linear()
        return ParameterServerOptimizer(sgd(model), model, mode="local", timeout_s=20)

    kinds = {kind.__name__: kind for kind in (GradientExchange, NamedResiduals, State)}
    return {
        f"{kind_name}.{name}": make
        for kind_name, kind in (kinds | {"ParameterServerOptimizer": alone}).items()
        for name, make in (
            ("save", lambda kind=kind: (kind().save, {"path": f"{folder}/new.safetensors"})),
            ("load", lambda kind=kind: loading(kind)),
        )
    }


def thinwire_calls(folder: str) -> dict[str, Callable[[], Call]]:
    """Return the calls by name. `folder`: where calls may write."""
    methods = {f"GradientExchange.{name}": make for name, make in exchange_methods().items()}
    return functions() | constructors() | methods | other_methods() | file_methods(folder)
