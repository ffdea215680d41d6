"""Probe: measures the cost of a process group's link and of codecs by a second or two of
allreduces."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire import config
from thinwire.simulate import CodecCost, Link
from thinwire.torch.agree import mean_of_ranks
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Membership

_TINY = 16  # elements: raw, in one exchange
_SMALL = 64 << 10  # elements: one chunk
_MOST = 4 << 20  # elements of the largest probe
_ENOUGH_S = 0.25  # a probe of the rate need not take longer
_IDLE_S = 0.15  # a link's token bucket fills within this pause
_REPEATS = 7
_CODEC_NUMEL = 1 << 20

# Seconds of computing that a second of codecs and sending delays, on a rank without a spare core.
FULL_CONTENTION = 1.0
# Processor seconds of an exchange, beside those for its bytes. A probe sees mostly noise of it, so
# it is fitted to measured steps on 15 links and models (docs/decisions/0013-predicting-steps.md).
OVERHEAD_S = 0.2e-3


@dataclass(frozen=True)
class Measured:
    """Equal on all ranks."""

    link: Link
    costs: dict[str, CodecCost]


class Spent(NamedTuple):
    """Seconds of one allreduce; the mean of all ranks."""

    elapsed: float  # typical: a mean would go by whether a packet was lost on these few occasions
    best: float  # undisturbed
    processor: float  # of all threads of a rank, and of the kernel for its packets


class _Probe:
    def __init__(
        self,
        session: Session,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        neighbours: int,
    ) -> None:
        """neighbours: ranks on this machine."""
        self._session, self._group = session, process_group
        self._neighbours = neighbours
        self._tensor = torch.randn(_MOST, device=device)
        self._names = 0

    def time(
        self, numel: int, codec: int = 0, repeats: int = _REPEATS, pause_s: float = 0.0
    ) -> Spent:
        """Allreduces with codec number `codec`, each after a pause."""
        tensor = self._tensor[:numel]
        self._names += 1
        name = f"probe {self._names}"
        bucket = Bucket(name, numel, "float32", parts=[Part(name, numel)], codecs=[codec])
        elapsed, processor = [], []
        packets_s = _packets_s()
        for _ in range(repeats + 1):  # the first lays out residuals
            if pause_s:
                time.sleep(pause_s)
            start, before = time.perf_counter(), time.process_time()
            self._session.complete(self._session.submit(bucket, tensor))
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            elapsed.append(time.perf_counter() - start)
            processor.append(time.process_time() - before)
        packets_s = (_packets_s() - packets_s) / (repeats + 1) / self._neighbours
        elapsed, processor = elapsed[1:], processor[1:]
        found = [
            statistics.median(elapsed),
            min(elapsed),
            statistics.median(processor) + packets_s,
        ]
        return Spent(*mean_of_ranks(found, self._group))

    def cost(self, codec: int) -> CodecCost:
        """Seconds of the codec's stages, per element."""
        self.time(_CODEC_NUMEL, codec, repeats=1)  # touches memory for the first time
        before = self._session.communicator.stats()
        self.time(_CODEC_NUMEL, codec, repeats=2)
        after = self._session.communicator.stats()
        elements = 3 * _CODEC_NUMEL
        return CodecCost(*(
            (after[f"{stage}_s"] - before[f"{stage}_s"]) / elements
            for stage in ("encode", "reduce", "decode")
        ))  # fmt: skip


def _packets_s() -> float:
    """Processor seconds that this machine's kernel has spent on packets, which no process is
    charged with (irq and softirq, proc(5)); for virtual links they are half as much again as those
    of the processes. 0 where the kernel does not count them."""
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return (int(total[6]) + int(total[7])) / os.sysconf("SC_CLK_TCK")


def _ranks_here(process_group: dist.ProcessGroup | None) -> int:
    """How many ranks of the group run on this machine."""
    hosts: list[object] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(hosts, socket.gethostname(), process_group)
    return hosts.count(socket.gethostname())


def _ranks_to_a_core(neighbours: int) -> float:
    """Computing threads of the ranks on this machine, to each of its cores."""
    return neighbours * torch.get_num_threads() / len(os.sched_getaffinity(0))


def _bytes(numel: int, ranks: int) -> float:
    """Bytes that a rank sends for `numel` elements of fp32."""
    return 2 * (ranks - 1) / ranks * 4 * numel


def _contention(ranks_to_a_core: float) -> float:
    """How far computing and codecs share cores: 0 if every rank has a core to spare."""
    spare = 1.0 / ranks_to_a_core - 1.0
    return FULL_CONTENTION * min(1.0, max(0.0, 1.0 - spare))


def _link(on: _Probe, ranks: int) -> Link:
    """Rate and latency of the link, and the processor's time for it."""
    latency = on.time(_TINY, repeats=20).best / 2  # one exchange, there and here
    idle = on.time(_SMALL, repeats=3, pause_s=_IDLE_S)
    small = on.time(_SMALL)
    numel, large = _SMALL, small
    while large.elapsed < _ENOUGH_S and numel < _MOST:
        numel *= 2
        large = on.time(numel)
    more = _bytes(numel - _SMALL, ranks)
    # The typical time counts here, not the best: where many ranks send to one, packets are lost,
    # and steps take longer for it.
    bytes_per_s = more / max(large.elapsed - small.elapsed, 1e-9)
    cpu_s_per_byte = max(0.0, large.processor - small.processor) / more
    return Link(
        ranks,
        bytes_per_s,
        latency_s=latency,
        burst_bytes=max(0.0, small.best - idle.best) * bytes_per_s,
        overhead_s=OVERHEAD_S,
        cpu_s_per_byte=cpu_s_per_byte,
    )


def probe(
    codecs: Sequence[str],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
) -> Measured:
    """Measures the link of a group, and each codec on it. All ranks call it."""
    # Under p3 nothing larger than min_bytes goes outside the order, so all but the tiny tensor go
    # in chunks, whose stages are counted.
    raw_bytes = 4 * _TINY * (dist.get_world_size(process_group) - 1)
    settings = config.resolve(
        codec=";".join(("fp32", *codecs)), policy="p3", lanes=2, min_bytes=raw_bytes,
        topology="flat",
    )  # fmt: skip
    session = Session(Membership(process_group, "probe"), settings)
    try:
        ranks = session.size
        neighbours = _ranks_here(process_group)
        on = _Probe(session, process_group, device, neighbours)
        link = _link(on, ranks)
        if device.type == "cpu":
            crowd = _ranks_to_a_core(neighbours)
            link = replace(
                link,
                # The processor takes longer for a rank where ranks share a core.
                overhead_s=link.overhead_s * max(1.0, crowd),
                cpu_s_per_byte=link.cpu_s_per_byte * max(1.0, crowd),
                contention=mean_of_ranks([_contention(crowd)], process_group)[0],
            )
        else:
            link = replace(link, cpu_s_per_byte=0.0)
        costs = {}
        for index, codec in enumerate(codecs):
            cost = on.cost(index + 1)
            stages = [cost.encode_s, cost.reduce_s, cost.decode_s]
            costs[codec] = CodecCost(*mean_of_ranks(stages, process_group))
        return Measured(link, costs)
    finally:
        session.close()
