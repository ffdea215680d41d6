"""Steps of data-parallel training, simulated with the engine's own sequencers. They need no
ranks, no link and no model, only the times that these are known to take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire import _library
from thinwire.arguments import check_flag, check_kind
from thinwire.config import given


class Layer(NamedTuple):
    """Elements that are reduced at once: a large parameter, or several small neighbours."""

    numel: int
    forward_s: float  # the optimizer's step of it included
    backward_s: float


@dataclass(frozen=True)
class Profile:
    """The computing of a step, between its exchanges."""

    layers: tuple[Layer, ...]  # in forward order
    between_s: float = 0.0  # after backward, before the first layer is needed again

    @property
    def compute_s(self) -> float:
        """Seconds of a step without any exchange."""
        return self.between_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled_to(self, compute_s: float) -> Profile:
        """A profile of the same proportions and another sum."""
        by = compute_s / self.compute_s if self.compute_s > 0 else 1.0
        layers = (Layer(n, by * forward, by * backward) for n, forward, backward in self.layers)
        return Profile(tuple(layers), by * self.between_s)


@dataclass(frozen=True)
class CodecCost:
    """Seconds that one rank's codec takes for one element."""

    encode_s: float = 0.0
    reduce_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """The link between the ranks, and the costs of using it."""

    ranks: int
    bytes_per_s: float  # of each rank, each way
    latency_s: float = 0.0  # one way
    burst_bytes: float = 0.0  # that an idle link lets pass at once: a token bucket's
    overhead_s: float = 0.0  # of each exchange, beside its bytes
    cpu_s_per_byte: float = 0.0  # of the processor, for what a rank sends
    contention: float = 0.0  # with computing: 0 with cores to spare, 1 or more without
    local_size: int = 1  # ranks of a node, which are neighbours
    inside_bytes_per_s: float = 0.0  # of each rank inside a node; 0: there are no nodes


class Step(NamedTuple):
    """Times of a step, in seconds."""

    step_s: float
    bound_s: float  # the least that any order of chunks could take


def simulate(
    profile: Profile,
    link: Link,
    codec: str,
    policy: str,
    cost: CodecCost = CodecCost(),
    *,
    lanes: int | None = None,
    chunk_bytes: int | None = None,
    min_bytes: int | None = None,
    planned: bool = False,
    topology: str | None = None,
    transport: str | None = None,
) -> Step:
    """The mean step under a policy: "p3", or "wfbp" and "fifo", which wait for everything before
    the next forward pass. lanes, chunk_bytes, min_bytes: as State takes them. planned: the
    order is predicted, as it is above a millisecond of latency. InvalidArgumentError for a codec
    or policy that there is none of, and for times below zero. Where the link has nodes, the
    allreduces go by them if that pays, as in a group that has measured the link; topology: as State
    takes it, for a group that goes another way, as one between GPUs does. transport: as State takes
    it; "nccl" has larger chunks."""
    library = _library.load()
    check_kind("profile", profile, Profile, "a Profile")
    check_kind("link", link, Link, "a Link")
    check_kind("cost", cost, CodecCost, "a CodecCost")
    check_flag("planned", planned)
    settings = given(
        codec=codec, policy=policy, lanes=lanes, chunk_bytes=chunk_bytes, min_bytes=min_bytes,
        local_size=link.local_size, topology=topology, transport=transport,
    )  # fmt: skip
    options = _library.options_of(settings)
    options.size = link.ranks
    layers = (_library.Layer * len(profile.layers))(*_structs(profile.layers))
    simulation = _library.Simulation(
        ctypes.sizeof(_library.Simulation), ctypes.pointer(options), layers, len(layers),
        profile.between_s, int(policy != "p3"), int(planned), link.bytes_per_s,
        link.latency_s, link.burst_bytes, link.overhead_s, cost.encode_s, cost.reduce_s,
        cost.decode_s, link.cpu_s_per_byte, link.contention, 0, link.inside_bytes_per_s,
    )  # fmt: skip
    step, bound = ctypes.c_double(), ctypes.c_double()
    _library.check(
        library.tw_simulate(ctypes.byref(simulation), ctypes.byref(step), ctypes.byref(bound))
    )
    return Step(step.value, bound.value)


def _structs(layers: Sequence[Layer]) -> list[_library.Layer]:
    return [_library.Layer(*layer) for layer in layers]
