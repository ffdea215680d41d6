"""Cases of the fault matrix: which rank of which group is struck, when, and how.

A case is plain data determined by its seed, so a line of a report suffices to repeat it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

PHASES = (
    "store",  # at one of its operations on the rendezvous store, which is not carried out
    "connecting",  # it has read all addresses, and connects or agrees on a data plane
    "idle",  # it is connected, and makes no calls
    "first",  # in its first collective
    "raw",  # in a step of small tensors, which go uncompressed in one exchange
    "direct",  # in a step of middle-sized tensors, which go encoded in one exchange
    "chunks",  # in a step of a large tensor, chunk by chunk
    "mixed",  # in a step of all three
    "between",  # between two steps
    "closing",  # all ranks close, and the victim does not finish
)
BLOWS = ("SIGKILL", "SIGSTOP", "abort")
NOT_CONNECTED = ("store", "connecting", "idle", "closing")  # there is no call that could be aborted
TRANSPORTS = ("gloo", "auto")  # auto: UCX, where it is installed
TOPOLOGIES = ("hierarchical", "auto")  # used between nodes; auto: depends on the measured links
CODECS = ("fp32", "bf16", "int8", "int4", "onebit", "topk:density=0.01")

# Elements of the tensors that a step reduces; min_bytes and one_hop_bytes decide how each goes.
TENSORS = {
    "raw": (1000, 1),
    "direct": (60_000, 40_000),
    "chunks": (1_500_000,),
    "mixed": (1000, 60_000, 600_000),
}


@dataclass(frozen=True)
class Case:
    """One group whose rank `victim` gets a `blow` in `phase`: a signal, or "abort", which means
    that a thread of the victim fails the group. moment: when in the phase, from 0 to below 1."""

    seed: int
    world: int
    victim: int
    blow: str
    phase: str
    moment: float
    codec: str
    lanes: int
    chunk_bytes: int
    planned: bool | None
    policy: str
    checksum: bool
    timeout_s: float
    transport: str = "gloo"
    node_size: int = 0  # ranks per node; 0: all ranks are on one node, and detect that
    topology: str = "auto"
    loops: int = 1

    @property
    def tensors(self) -> tuple[int, ...]:
        """The numbers of elements of a step's tensors."""
        return TENSORS.get(self.phase, TENSORS["mixed"])

    @property
    def nodes(self) -> int:
        """The number of nodes; 0: none are set up."""
        return self.world // self.node_size if self.node_size else 0

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: rank {self.victim} of {self.world} gets {self.blow} in "
            f"{self.phase!r} at {self.moment:.2f}, {self.codec}, {self.lanes} lanes, "
            f"{self.chunk_bytes} B chunks, planned={self.planned}, {self.policy}, "
            f"checksum={self.checksum}, T={self.timeout_s} s, transport={self.transport}, "
            f"{self.topology} by nodes of {self.node_size}, {self.loops} loops"
        )

    def on_one_node(self) -> Case:
        """Return the same case with all ranks on one node."""
        return replace(self, node_size=0, topology="auto")

    def on_two_nodes(self, topology: str) -> Case:
        """Return the same case with four ranks on two nodes, two ranks each."""
        return replace(
            self, world=4, victim=self.victim % 4, transport="auto", node_size=2, topology=topology
        )


def draw(seed: int, phase: str, blow: str, timeout_s: float) -> Case:
    """Return the case that the seed determines for the phase and the blow."""
    chance = random.Random(f"{seed} {phase} {blow}")
    world = chance.choice((2, 3, 4))
    case = Case(
        seed=seed,
        world=world,
        victim=chance.randrange(world),
        blow=blow,
        phase=phase,
        moment=chance.random(),
        codec=chance.choice(CODECS),
        lanes=chance.choice((1, 4)),
        chunk_bytes=chance.choice((64 << 10, 1 << 20)),
        planned=chance.choice((None, True)),
        policy=chance.choice(("wfbp", "p3")),
        checksum=chance.choice((False, True)),
        timeout_s=timeout_s,
        transport=chance.choice(TRANSPORTS),
    )
    if world == 4 and chance.random() < 0.5:
        case = replace(case, node_size=2, topology=chance.choice(TOPOLOGIES))
    return replace(case, loops=chance.choice((1, 1, 3)))


def matrix(count: int, seed: int, stop_s: float, kill_s: float = 8.0) -> list[Case]:
    """Return at least `count` cases, equally many for each phase and blow. stop_s: timeout of the
    cases that stop a rank, and so their duration; kill_s: timeout of the others."""
    kinds = [
        (phase, blow)
        for phase in PHASES
        for blow in BLOWS
        if blow != "abort" or phase not in NOT_CONNECTED
    ]
    rounds = -(-count // len(kinds))
    return [
        draw(seed + number, phase, blow, stop_s if blow == "SIGSTOP" else kill_s)
        for number in range(rounds)
        for phase, blow in kinds
    ]
