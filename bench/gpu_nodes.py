"""Allreduces among GPUs of several nodes: bytes on a node's network card, and seconds, from the
simulator and from formulas. Nothing here is measured.

    python -m bench.gpu_nodes          writes the tables of docs/explanation/gpu-nodes.md

The simulator is the library's own (thinwire.simulate): its algorithms say how many bytes each rank
sends inside its node and between nodes, and its sequencers order them. Times of uncompressed
allreduces come from a formula, at the full rate of the slowest link and without other costs than
bytes, so the comparison favours them. The assumed rates are constants below and on the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from thinwire.codec import codec_info
from thinwire.simulate import CodecCost, Layer, Link, Profile, simulate

from bench import figures, harness

PAGE = harness.ROOT / "docs/explanation/gpu-nodes.md"
SHAPES = ((1, 8), (2, 4), (2, 8), (4, 8))  # nodes, GPUs of each
CODECS = ("int8", "int4")
CARDS = (10, 25, 100)  # Gb/s of a node's network card

BUCKET = 25 << 18  # elements of DDP's bucket of 25 MiB
BUCKETS = 16
NUMEL = BUCKETS * BUCKET
BY = "\N{MULTIPLICATION SIGN}"
PROFILE = Profile(tuple(Layer(BUCKET, 0.0, 0.0) for _ in range(BUCKETS)))  # the exchange alone
LATENCY_S = 20e-6  # one way
OVERHEAD_S = 50e-6  # of each exchange of a chunk, in addition to its bytes


@dataclass(frozen=True)
class Inside:
    """The links of the GPUs of a node, and the memory that their codecs work on.

    bytes_per_s: of each GPU, in each direction, while all of them send. memory_bytes_per_s: of a
    codec. linked: whether NVLink lets them access one another's memory; else they exchange through
    host memory."""

    name: str
    bytes_per_s: float
    memory_bytes_per_s: float
    linked: bool

    def cost(self) -> CodecCost:
        """Return the seconds per element from the bytes moved: encoding reads gradient and residual
        and writes residual and code, reducing reads codes and writes part of a sum, and decoding
        the reverse."""
        return CodecCost(*(moved / self.memory_bytes_per_s for moved in (13.0, 5.0, 5.0)))


# Two thirds of an A100's NVLink by its data sheet (300 GB/s); and a PCIe slot without peer access,
# through host memory, which all GPUs of the node share.
INSIDE = (Inside("NVLink", 200e9, 1e12, True), Inside("PCIe", 6e9, 0.5e12, False))


PLAIN = "do not compress"


def chosen(nodes: int, gpus: int, linked: bool = True) -> str:
    """Return the topology that `auto` uses between GPUs over NCCL, or its advice:
    schedule/join/links.cc, ChooseTopology. There it does not measure, but asks each GPU how it
    reaches the others."""
    if nodes == 1:
        return PLAIN if linked else "flat"
    if gpus == 1:
        return "flat"
    return "hierarchical" if linked else "grid"


def inside_of_grid(codec: str) -> float:
    """Return the bytes inside nodes if elements are encoded there (topology="grid"), divided by
    those of unencoded elements (HierarchicalBytes of schedule/collective/settle.h)."""
    info = codec_info(codec)
    return (info.up_bits + info.down_bits) / (32 + info.down_bits)


def _link(nodes: int, gpus: int, between: float, inside: float) -> Link:
    """Return the link. between: bytes per second of a node's card, which its GPUs share."""
    if nodes == 1:
        return Link(gpus, inside)
    return Link(nodes * gpus, between / gpus, local_size=gpus, inside_bytes_per_s=inside)


FREE = CodecCost()


def _step_s(link: Link, codec: str, topology: str, cost: CodecCost = FREE) -> float:
    return simulate(PROFILE, link, codec, "wfbp", cost, topology=topology).step_s


def sent(nodes: int, gpus: int, codec: str, topology: str) -> tuple[float, float]:
    """Return the bytes that a rank sends per element: inside its node, and between nodes. They are
    the seconds of a simulation in which one kind of link sends a byte per second, and the other has
    practically no limit. topology: "flat" or "hierarchical"."""
    endless = 1e18
    if nodes == 1:
        return _step_s(_link(1, gpus, 1.0, 1.0), codec, topology) / NUMEL, 0.0
    inside = _step_s(_link(nodes, gpus, endless, 1.0), codec, topology)
    between = _step_s(_link(nodes, gpus, 1.0 * gpus, endless), codec, topology)
    return inside / NUMEL, between / NUMEL


def on_card(nodes: int, gpus: int, codec: str, topology: str) -> float:
    """Return the bytes that a node's card sends, in units of the gradients in fp32."""
    return sent(nodes, gpus, codec, topology)[1] * gpus / 4


def ring_on_card(nodes: int, gpus: int) -> float:
    """Return the same for NCCL's ring of fp32, which leaves each node once."""
    ranks = nodes * gpus
    return 0.0 if nodes == 1 else 2 * (ranks - 1) / ranks


def least_on_card(nodes: int) -> float:
    """Return the least for any allreduce of uncompressed fp32: nodes sum inside first. NCCL's trees
    between two nodes reach it."""
    return 2 * (nodes - 1) / nodes


@dataclass(frozen=True)
class Case:
    """A machine and a network."""

    nodes: int
    gpus: int
    inside: Inside
    card_gbits: int  # 0: one node, without a card

    @property
    def name(self) -> str:
        """The first cells of its row."""
        card = f"{self.card_gbits} Gb/s" if self.nodes > 1 else "none"
        return f"{self.nodes} {BY} {self.gpus}, {self.inside.name} | {card}"

    @property
    def way(self) -> str:
        """The topology that `auto` uses, or PLAIN."""
        return chosen(self.nodes, self.gpus, self.inside.linked)

    @property
    def card(self) -> float:
        """The card's bytes per second."""
        return self.card_gbits * 1e9 / 8

    def seconds(self, codec: str, topology: str) -> float:
        """Return the seconds of exchanging NUMEL elements."""
        if topology == PLAIN:
            return self.ring_seconds()
        link = replace(
            _link(self.nodes, self.gpus, self.card, self.inside.bytes_per_s),
            latency_s=LATENCY_S, overhead_s=OVERHEAD_S,
        )  # fmt: skip
        cost = self.inside.cost()
        if topology == "grid":
            # The simulator puts a grid's rows on the links between nodes. A hierarchy has the same
            # hops; a grid has fewer bytes inside, and encodes all of a rank's elements.
            rate = link.inside_bytes_per_s / inside_of_grid(codec)
            link = replace(link, inside_bytes_per_s=rate)
            cost = replace(cost, encode_s=cost.encode_s * (self.gpus + 1))
            topology = "hierarchical"
        return _step_s(link, codec, topology, cost)

    def ring_seconds(self) -> float:
        """Return the seconds of NCCL's ring of fp32, from the bytes of its slowest link."""
        ranks = self.nodes * self.gpus
        each = 2 * (ranks - 1) / ranks * 4 * NUMEL
        on_links = each / self.inside.bytes_per_s
        return on_links if self.nodes == 1 else max(on_links, each / self.card)

    def least_seconds(self) -> float:
        """Return the seconds of the best allreduce of uncompressed fp32, from the bytes of its
        slowest link."""
        inside = 2 * (self.gpus - 1) / self.gpus * 4 * NUMEL / self.inside.bytes_per_s
        if self.nodes == 1:
            return inside
        return max(inside, least_on_card(self.nodes) * 4 * NUMEL / self.card)


def cases() -> Iterator[Case]:
    """Yield all cases of the page, in its order."""
    for nodes, gpus in SHAPES:
        for inside in INSIDE:
            for card in CARDS if nodes > 1 else (0,):
                yield Case(nodes, gpus, inside, card)


def _bytes_table() -> str:
    head = [f"nodes {BY} GPUs", "NCCL's ring", "least uncompressed", "way"]
    rows = []
    for nodes, gpus in SHAPES[1:]:
        way = chosen(nodes, gpus)
        plain = [f"{ring_on_card(nodes, gpus):.2f}", f"{least_on_card(nodes):.2f}", way]
        ways = [f"{on_card(nodes, gpus, codec, t):.2f}" for t in (way, "flat") for codec in CODECS]
        rows.append([f"{nodes} {BY} {gpus}", *plain, *ways])
    head += [f"{codec}{of}" for of in ("", ", if flat") for codec in CODECS]
    return harness.markdown(head, rows)


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f}" if value >= 0.1 else f"{1e3 * value:.1f}"


def _seconds_table(codec: str) -> str:
    head = [f"nodes {BY} GPUs, inside", "card", "NCCL's ring", "least uncompressed", "way taken"]
    head += ["its time", "ring over it", "flat", "grid"]
    rows = []
    for case in cases():
        time = case.seconds(codec, case.way)
        others = ("flat", "grid") if case.nodes > 1 else ("flat",)
        rows.append([
            case.name, _ms(case.ring_seconds()), _ms(case.least_seconds()), case.way, _ms(time),
            f"{case.ring_seconds() / time:.1f} {BY}",
            *(_ms(case.seconds(codec, topology)) for topology in others), *[""] * (2 - len(others)),
        ])  # fmt: skip
    return harness.markdown(head, rows)


def _assumptions() -> str:
    lines = [
        f"{one.bytes_per_s / 1e9:.0f} GB/s of each GPU and direction by {one.name}, and codecs "
        f"that move {one.memory_bytes_per_s / 1e12:.1f} TB/s there;"
        for one in INSIDE
    ]
    lines += [
        f"{1e6 * LATENCY_S:.0f} µs of latency, and {1e6 * OVERHEAD_S:.0f} µs for each exchange of "
        f"a chunk; {NUMEL / 1e6:.0f} million elements in {BUCKETS} buckets of 25 MiB."
    ]
    return "\n".join(f"- {line}" for line in lines)


TABLES = {"bytes": _bytes_table, "assumed": _assumptions} | {
    codec: partial(_seconds_table, codec) for codec in CODECS
}


def page() -> str:
    """Return the text of PAGE with new tables."""
    return figures.filled(PAGE.read_text(), TABLES)


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
