"""Simulates steps of data-parallel training with the engine's own sequencers, from measured times,
without ranks, a link or a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire import _library
from thinwire.arguments import check_flag, check_kind
from thinwire.config import given


class Layer(NamedTuple):
    """Elements that are reduced together: a large parameter, or several small neighbours."""

    numel: int
    forward_s: float  # including the optimizer's step of it
    backward_s: float


@dataclass(frozen=True)
class Profile:
    """The compute times of a step, without its exchanges."""

    layers: tuple[Layer, ...]  # in forward order
    between_s: float = 0.0  # from the end of backward to the next forward pass

    @property
    def compute_s(self) -> float:
        """Return the seconds of a step without any exchange."""
        return self.between_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled_to(self, compute_s: float) -> Profile:
        """Return a profile with the same proportions and this sum."""
        by = compute_s / self.compute_s if self.compute_s > 0 else 1.0
        layers = (Layer(n, by * forward, by * backward) for n, forward, backward in self.layers)
        return Profile(tuple(layers), by * self.between_s)


@dataclass(frozen=True)
class CodecCost:
    """Seconds per element of the codec's stages on one rank."""

    encode_s: float = 0.0
    reduce_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """The link between the ranks, and the costs of using it."""

    ranks: int
    bytes_per_s: float  # of each rank, in each direction
    latency_s: float = 0.0  # one way
    burst_bytes: float = 0.0  # bytes that an idle link lets pass at once (a token bucket)
    overhead_s: float = 0.0  # of each exchange, in addition to its bytes
    cpu_s_per_byte: float = 0.0  # processor time for each byte that a rank sends
    contention: float = 0.0  # of codecs with computing: 0 with cores to spare, 1 or more without
    local_size: int = 1  # ranks of a node, which have consecutive numbers
    inside_bytes_per_s: float = 0.0  # of each rank inside a node; 0: there are no nodes


class Step(NamedTuple):
    """Times of a step, in seconds."""

    step_s: float
    bound_s: float  # a lower bound for any order of chunks


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
    """Return the mean step under a policy.

    If the link has nodes, allreduces are hierarchical if that is faster, as in a group that has
    measured the link.

    Args:
        profile: the compute times.
        link: the link.
        codec: a spec.
        policy: "p3"; or "wfbp" or "fifo", where the next forward pass waits for all means.
        cost: the times of the codec.
        lanes, chunk_bytes, min_bytes: as State takes them.
        planned: whether the order is predicted, as it is above 1 ms of latency.
        topology: as State takes it, for groups with another topology, such as between GPUs.
        transport: as State takes it; "nccl" has larger chunks.

    Raises:
        InvalidArgumentError: a codec or policy is unknown, or a time is below 0.
    """
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
