"""The forecast of steps under each codec. probe() measures the link and the codecs by one or two
seconds of allreduces, Notes records the model's computing, predict() predicts the steps, and
choose() chooses a codec."""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire import config
from thinwire.codec import codec_info
from thinwire.errors import InvalidArgumentError
from thinwire.simulate import CodecCost, Layer, Link, Profile, simulate
from thinwire.torch.agree import mean_of_ranks, worst_of_ranks
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Membership

_TINY = 16  # elements; sent raw in one exchange
_SMALL = 64 << 10  # elements; one chunk
_MOST = 4 << 20  # elements of the largest probe
_ENOUGH_S = 0.25  # seconds; an allreduce that takes as long measures the rate well enough
_IDLE_S = 0.15  # seconds in which a link's token bucket fills
_REPEATS = 7
_CODEC_NUMEL = 1 << 20

# Seconds of computing that a second of codecs and sending delays, on a rank without a spare core.
FULL_CONTENTION = 1.0
# Processor seconds of an exchange, in addition to those for its bytes. A probe would measure mostly
# noise, so this is fitted to steps on 15 links and models
# (docs/decisions/0013-predicting-steps.md).
OVERHEAD_S = 0.2e-3


@dataclass(frozen=True)
class Measured:
    """The result of probe(), equal on all ranks."""

    link: Link
    costs: dict[str, CodecCost]


class Spent(NamedTuple):
    """Seconds of one allreduce; the mean of all ranks."""

    elapsed: float  # typical; a mean would depend on whether a packet was lost in the few samples
    best: float  # the fastest
    processor: float  # processor seconds of all threads of a rank, and of the kernel for packets


class _Probe:
    def __init__(
        self,
        session: Session,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        neighbours: int,
    ) -> None:
        """neighbours: the number of ranks on this machine."""
        self._session, self._group = session, process_group
        self._neighbours = neighbours
        self._tensor = torch.randn(_MOST, dtype=torch.float32, device=device)
        self._names = 0

    def time(
        self, numel: int, codec: int = 0, repeats: int = _REPEATS, pause_s: float = 0.0
    ) -> Spent:
        """Time allreduces with codec number `codec`, each after a pause."""
        tensor = self._tensor[:numel]
        self._names += 1
        name = f"probe {self._names}"
        bucket = Bucket(name, numel, "float32", parts=[Part(name, numel)], codecs=[codec])
        elapsed, processor = [], []
        packets_s = _packets_s()
        for _ in range(repeats + 1):  # the first one allocates residuals
            if pause_s:
                time.sleep(pause_s)
            start, before = time.perf_counter(), time.process_time()
            self._session.complete(self._session.submit(bucket, tensor))
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            elapsed.append(time.perf_counter() - start)
            processor.append(time.process_time() - before)
        packets_s = (_packets_s() - packets_s) / (repeats + 1) / self._neighbours
        elapsed, processor = _in_pairs(elapsed[1:]), processor[1:]
        found = [
            statistics.median(elapsed),
            min(elapsed),
            statistics.median(processor) + packets_s,
        ]
        return Spent(*mean_of_ranks(found, self._group))

    def cost(self, codec: int) -> CodecCost:
        """Return the seconds of the codec's stages, per element."""
        self.time(_CODEC_NUMEL, codec, repeats=1)  # touches memory for the first time
        before = self._session.communicator.stats()
        self.time(_CODEC_NUMEL, codec, repeats=2)
        after = self._session.communicator.stats()
        elements = 3 * _CODEC_NUMEL
        return CodecCost(*(
            (after[f"{stage}_s"] - before[f"{stage}_s"]) / elements
            for stage in ("encode", "reduce", "decode")
        ))  # fmt: skip


def _in_pairs(elapsed: Sequence[float]) -> list[float]:
    """Return means of pairs of successive exchanges. On a link with high latency two ranks
    alternate: the rank that starts one latency later finds the other's bytes there and does not
    wait, and the other rank waits for two latencies. In two exchanges each waits for two."""
    return [statistics.mean(pair) for pair in itertools.pairwise(elapsed)] or [*elapsed]


def _packets_s() -> float:
    """Return the processor seconds that this machine's kernel has spent on packets and not counted
    for a process (irq and softirq, proc(5)). With virtual links they add half as much to the time
    of the processes. 0 if the kernel does not count them."""
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return (int(total[6]) + int(total[7])) / os.sysconf("SC_CLK_TCK")


def _ranks_here(process_group: dist.ProcessGroup | None) -> int:
    """Return how many ranks of the group run on this machine."""
    hosts: list[object] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(hosts, socket.gethostname(), process_group)
    return hosts.count(socket.gethostname())


def _ranks_to_a_core(neighbours: int) -> float:
    """Return the computing threads of the ranks on this machine, per core."""
    return neighbours * torch.get_num_threads() / len(os.sched_getaffinity(0))


def _bytes(numel: int, ranks: int) -> float:
    """Return the bytes that a rank sends for `numel` elements of fp32."""
    return 2 * (ranks - 1) / ranks * 4 * numel


def _contention(ranks_to_a_core: float) -> float:
    """Return how far computing and codecs share cores: 0 if every rank has a core to spare."""
    spare = 1.0 / ranks_to_a_core - 1.0
    return FULL_CONTENTION * min(1.0, max(0.0, 1.0 - spare))


def _link(on: _Probe, ranks: int) -> Link:
    """Measure the rate and latency of the link, and the processor's time for it."""
    latency = on.time(_TINY, repeats=20).best  # one exchange, which all ranks send at once
    idle = on.time(_SMALL, repeats=3, pause_s=_IDLE_S)
    small = on.time(_SMALL)
    numel, large = 2 * _SMALL, on.time(2 * _SMALL)
    while large.elapsed < _ENOUGH_S and numel < _MOST:
        numel *= 2
        large = on.time(numel)
    more = _bytes(numel - _SMALL, ranks)
    # This uses the typical time and not the best one: if many ranks send to one, packets are lost,
    # and steps take longer.
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
    """Measure the link of a group, and each codec on it. All ranks call it."""
    # Under p3 all tensors larger than min_bytes go in chunks, whose stages are counted: here, all
    # but the tiny tensor.
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
                # If ranks share a core, the processor takes longer for each of them.
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


_Times = dict[int, float]  # seconds, by bucket number
Finish = Callable[[], None]


class Notes:
    """The times of one rank. Buckets are numbered in forward order."""

    def __init__(self) -> None:
        self._numels: dict[int, int] = {}
        self._needed: list[_Times] = [{}]  # by step
        self._ready: list[_Times] = []
        self._sending = False

    def submitted(self, bucket: int, numel: int, at: float) -> None:
        if not self._sending:  # the first bucket of a backward pass
            self._sending = True
            self._ready.append({})
            self._needed.append({})
        self._ready[-1][bucket] = at
        self._numels[bucket] = numel

    def waited_for(self, bucket: int, at: float) -> None:
        self._sending = False
        self._needed[-1].setdefault(bucket, at)

    def steps(self) -> int:
        """Return the number of backward passes so far."""
        return len(self._ready)

    def profile(self, leave_out: int, process_group: dist.ProcessGroup | None) -> Profile:
        """Return the mean profile of all ranks, scaled to the slowest rank of each step, because
        the others wait for it in real steps. It ignores the first `leave_out` steps. All ranks call
        it."""
        buckets = sorted(self._numels)
        steps = [
            _gaps(buckets, needed, ready, after)
            for needed, ready, after in zip(
                self._needed[leave_out:], self._ready[leave_out:], self._needed[leave_out + 1 :],
                strict=False,
            )
            if after
        ]  # fmt: skip
        slowest = worst_of_ranks([sum(step) for step in steps], process_group)
        parts = [statistics.median(values) for values in zip(*steps, strict=True)]
        parts = mean_of_ranks(parts, process_group)
        stretch = statistics.median(slowest) / sum(parts)
        forward, backward = parts[: len(buckets)], parts[len(buckets) : -1]
        layers = [
            Layer(self._numels[bucket], stretch * ahead, stretch * back)
            for bucket, ahead, back in zip(buckets, forward, backward, strict=True)
        ]
        return Profile(tuple(layers), stretch * parts[-1])


def _gaps(buckets: Sequence[int], needed: _Times, ready: _Times, after: _Times) -> list[float]:
    """Return the seconds of one step: forward of every bucket, backward of every bucket, and the
    time between backward and forward. The last bucket's forward and the loss count as its backward,
    because the step waits for nothing in between."""
    asked = [max(needed[b] for b in buckets[: i + 1]) for i in range(len(buckets))]
    made = [max(ready[b] for b in buckets[i:]) for i in range(len(buckets))]
    forward = [later - at for at, later in itertools.pairwise(asked)] + [0.0]
    backward = [at - before for at, before in itertools.pairwise(made)]
    return [*forward, *backward, made[-1] - asked[-1], min(after.values()) - made[0]]


class StepObserver:
    """Notes when the steps of a GradientExchange submit buckets and wait for them.

    Its clock does not count the time for which a step waits for the exchange, so that the notes
    tell how long the model computes between two buckets.

    With submit() and wait(), a bucket's priority is its number in forward order. With start(),
    buckets come in backward order, and their priorities count from 0 in that order, so the number
    in forward order is the negated priority; the step ends when all of them are done."""

    def __init__(self) -> None:
        self.notes = Notes()
        self._waited_s = 0.0
        self._step: list[int] = []  # started buckets, by number in forward order
        self._last_start = 0.0
        self._last_done = 0.0

    def forget(self) -> None:
        """Drop all notes so far. Call it between steps."""
        self.notes = Notes()
        self._step.clear()

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":  # wait, to note when it was computed and not when it was queued
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter() - self._waited_s

    def submitting(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Call before a submit()."""
        if bucket.parts:
            self.notes.submitted(bucket.priority, bucket.numel, self._now(tensor.device))

    @contextmanager
    def waiting(self, bucket: Bucket, device: torch.device) -> Iterator[None]:
        """The context for a wait()."""
        if not bucket.parts:
            yield
            return
        start = self._now(device)
        self.notes.waited_for(bucket.priority, start)
        yield
        self._waited_s += self._now(device) - start

    def starting(self, bucket: Bucket, tensor: torch.Tensor, finish: Finish | None) -> Finish:
        """Call before a start(); return the function that start() must call when the bucket is
        done."""
        number = -bucket.priority
        if number in self._step:
            self._end_step()
        self._last_start = self._now(tensor.device)
        self.notes.submitted(number, bucket.numel, self._last_start)
        self._step.append(number)

        def done() -> None:
            if finish is not None:
                finish()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            self._last_done = time.perf_counter()

        return done

    def _end_step(self) -> None:
        """Call when the next step has begun: then all buckets of the last one are done."""
        for number in self._step:
            self.notes.waited_for(number, self._last_start)
        self._waited_s += max(0.0, self._last_done - self._waited_s - self._last_start)
        self._step.clear()


# From the most accurate to the least.
CODECS = ("fp32", "bf16", "int8", "int4", "adaptive", "onebit", "topk")
POLICIES = ("fifo", "wfbp", "p3")
# The codecs that may be recommended by default. adaptive has lost more than a tenth of a point of
# accuracy (docs/decisions.md#32-adaptives-floor-is-0), and the others need momentum.
ACCURATE = CODECS[:4]
# Predictions that differ by at most this factor count as equal, and accuracy decides.
TIE = 1.03
# Seconds that a step must gain before another policy than DDP's ("wfbp") is worthwhile; two
# measurements on one machine differ by less.
WORTH_S = 5e-4
PLAN_ABOVE_S = 1e-3  # above this latency the engine predicts a step's order, as Options::far
PLAIN = ("fp32", "wfbp")  # DDP without thinwire


@dataclass(frozen=True)
class Prediction:
    codec: str
    policy: str
    step_s: float


def codecs_on(device: torch.device, codecs: Sequence[str]) -> tuple[str, ...]:
    """Return those of `codecs` that run on the device of the gradients."""
    return tuple(c for c in codecs if device.type == "cpu" or codec_info(c).has_kernels)


def predict(
    profiles: dict[str, Profile],
    link: Link,
    costs: dict[str, CodecCost],
    policies: Sequence[str],
    **options: Any,
) -> tuple[Prediction, ...]:
    """Predict a step for every codec in `costs` and every policy. profiles: of rehearsals under
    "p3" and "wfbp". The model computes the same under both, so a difference between the two is
    noise, and their mean is used."""
    mean_s = sum(profile.compute_s for profile in profiles.values()) / len(profiles)
    even = {policy: profile.scaled_to(mean_s) for policy, profile in profiles.items()}
    rows = []
    for codec, cost in costs.items():
        for policy in policies:
            profile = even.get(policy) or even["wfbp"]
            planned = link.latency_s > PLAN_ABOVE_S
            step = simulate(profile, link, codec, policy, cost, planned=planned, **options)
            rows.append(Prediction(codec, policy, step.step_s))
    return tuple(rows)


_MB = 1 << 20
DDP_CAP_MB = 25  # DDP's default bucket_cap_mb, with which the first bucket is closed at 1 MiB
CAPS_MB = (DDP_CAP_MB, 1, 2, 4, 8, 16, 50, 100)  # the values of bucket_cap_mb to predict


def bucketed(profile: Profile, cap_mb: int) -> Profile:
    """Merge the profile's layers into the buckets that DDP makes with bucket_cap_mb: neighbours in
    backward order, until a bucket has at least so many bytes of fp32. Larger layers are not cut."""
    limit = _MB if cap_mb == DDP_CAP_MB else cap_mb * _MB
    buckets: list[list[Layer]] = [[]]
    size = 0
    for layer in reversed(profile.layers):
        if size >= limit:
            buckets.append([])
            size, limit = 0, cap_mb * _MB
        buckets[-1].append(layer)
        size += 4 * layer.numel
    layers = (Layer(*map(sum, zip(*bucket, strict=True))) for bucket in reversed(buckets))
    return replace(profile, layers=tuple(layers))


def predict_caps(
    profile: Profile, link: Link, codec: str, cost: CodecCost, **options: Any
) -> dict[int, float]:
    """Return the seconds of a step under DDP with a codec, by bucket_cap_mb. profile: under
    "wfbp"."""
    planned = link.latency_s > PLAN_ABOVE_S
    return {
        cap: simulate(
            bucketed(profile, cap), link, codec, PLAIN[1], cost, planned=planned, **options
        ).step_s
        for cap in CAPS_MB
    }


def choose_cap(seconds: dict[int, float]) -> int:
    """Return the recommended bucket_cap_mb of predict_caps(). Of the values that are as good as the
    fastest it is DDP's default, else the largest: each bucket costs a call of DDP's hook, which the
    simulator does not model."""
    limit = TIE * min(seconds.values())
    near = [cap for cap, step_s in seconds.items() if step_s <= limit]
    return DDP_CAP_MB if DDP_CAP_MB in near else max(near)


def choose(rows: Sequence[Prediction], allowed: Sequence[str], tie: float = TIE) -> Prediction:
    """Return the row of the most accurate codec whose best policy takes at most `tie` times as long
    as the fastest row. Its policy is DDP's, unless another one gains more than TIE and WORTH_S."""
    mine = [row for row in rows if row.codec in allowed]
    if not mine:
        raise InvalidArgumentError(
            f"allowed is {tuple(allowed)}, expected some of {sorted({row.codec for row in rows})}"
        )
    limit = tie * min(row.step_s for row in mine)
    order = list(dict.fromkeys(row.codec for row in rows))
    near = [row for row in mine if row.step_s <= limit]
    accurate = min(near, key=lambda row: order.index(row.codec)).codec
    rows_of_codec = [row for row in mine if row.codec == accurate]
    best = min(rows_of_codec, key=lambda row: row.step_s)
    limit = max(TIE * best.step_s, best.step_s + WORTH_S)
    of_ddp = [row for row in rows_of_codec if row.policy == PLAIN[1] and row.step_s <= limit]
    return of_ddp[0] if of_ddp else best
