"""`thinwire doctor --canary`: compares every codec and collective of a group with fp64.

All ranks know all ranks' inputs, so each of them can compute every result in fp64. A case is a
codec, a collective and a topology. It uses tensors of several sizes, at the borders of blocks and
chunks, in several steps, with the same inputs and with error feedback. A case must have three
properties:

1. Results have the same bits on all ranks, also those of encode(), but not of a reduce-scatter.
2. The sum of t results differs from t times the exact one by at most `limits()`. After one step
   this is the error of a call; after more it is the guarantee of error feedback.
3. The difference of the two sums is what the ranks' residuals hold, up to fp32's rounding: nothing
   is lost.

The group's topologies are tried one after another. It writes no files, and uses the existing torch
group."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire import config, launch
from thinwire.codec import codec_info, decode, encode
from thinwire.config import Config
from thinwire.error_limits import (
    BLOCK,
    CODECS,
    SLACK,
    STEPS,
    Limits,
    Route,
    Size,
    blocks,
    limits,
    loss,
    size_of,
    spread,
    tiny,
)
from thinwire.errors import InvalidArgumentError
from thinwire.options import TOPOLOGIES
from thinwire.torch.agree import digest, from_rank_0, tensor_from_rank
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.waiter import Pending
from thinwire.torch.group import Membership

RAW = "raw"  # in place of a codec: tensors that are small and not compressed

_CHUNK_BYTES = 65536
_CHUNK = _CHUNK_BYTES // 4
_EVERYTHING = 1 << 40  # min_bytes with which no tensor is compressed
_TIMEOUT_S = 15.0


class Case(NamedTuple):
    """A case to check. collective: "encode" (of one rank, no exchange) or a key of
    comm.COLLECTIVES. op: "sum", "mean" or "" (none)."""

    codec: str
    collective: str
    op: str
    topology: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


class Verdict(NamedTuple):
    """The result of a case, equal on all ranks.

    error: the largest error divided by its limit. lost: the error that residuals do not account
    for, divided by fp32's rounding. faults: texts by rank. All None: there was no time left."""

    case: Case
    error: float | None
    lost: float | None
    faults: tuple[str, ...]


def values(count: int, rank: int, parts: int = 1) -> torch.Tensor:
    """Return a rank's input with a row for each part, float32. It uses no random generator, whose
    values could differ between versions. Blocks differ by factors of two, and some are zeros."""
    place = torch.arange(count)
    mixed = place + 1 + (rank * 1009 + torch.arange(parts)[:, None]) * 0x9E3779B1
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
    mixed = mixed ^ mixed >> 15
    block = place // BLOCK
    scale = torch.where(block % 7 == 3, 0.0, torch.exp2((5 * block % 9 - 4).float()))
    return ((mixed & 0xFFFFFF) - (1 << 23)).float() / (1 << 23) * scale


class _Known(NamedTuple):
    """The sums of all ranks' inputs, and limits of their magnitude.

    rows: in fp64, the sum of each part, or in an all-gather each rank's input. size: limits of any
    rank's and part's input. total: limits of a row."""

    rows: torch.Tensor
    size: Size
    total: Size


@functools.lru_cache(maxsize=64)  # all codecs have the same inputs
def _known(collective: str, count: int, ranks: int) -> _Known:
    parts = ranks if collective == "reduce_scatter" else 1
    gathers = collective == "all_gather"
    rows = torch.zeros(ranks if gathers else parts, count, dtype=torch.float64)
    element, norm = torch.zeros(count), torch.zeros(-(-count // BLOCK))
    for rank in range(ranks):
        x = values(count, rank, parts)
        element = torch.maximum(element, x.abs().amax(0))
        norm = torch.maximum(norm, blocks(x).norm(dim=-1).amax(0))
        rows[[rank] if gathers else slice(None)] += x
    largest = rows.abs().amax(0)
    size = Size(element.double(), norm.double() * SLACK)
    return _Known(rows, size, size_of(largest, None, count))


class _Use:
    """One size of a case: its input, the exact result, and the results of the steps.

    The exact result has a row for each part of the output: one row, except in an all-gather."""

    def __init__(self, case: Case, count: int, rank: int, ranks: int) -> None:
        """count: elements of the output, or in an all-gather those of the input."""
        self.case, self.count = case, count
        self.results: list[torch.Tensor] = []
        self.scale = 1 / ranks if case.op == "mean" else 1.0
        self.known = _known(case.collective, count, ranks)
        scatters = case.collective == "reduce_scatter"
        self.input = values(count, rank, ranks if scatters else 1).flatten()
        rows = self.known.rows[rank : rank + 1] if scatters else self.known.rows
        self.exact = rows * self.scale
        self.bucket = Bucket(
            f"canary {case}, {count}", self.input.numel(), "float32",
            op=case.op or "sum", collective=case.collective,
        )  # fmt: skip

    def start(self, session: Session) -> Pending:
        if self.case.collective == "all_reduce":
            return session.start(self.bucket, self.input.clone())
        result = torch.empty(self.exact.numel())
        return session.start(self.bucket, self.input, result=result)

    def finish(self, pending: Pending) -> None:
        pending.wait()
        self.results.append(pending.future.value())

    def kept(self, memory: Residuals, rank: int, ranks: int) -> torch.Tensor:
        """Return this rank's share of the residuals of all parts of the result, in its units."""
        kept = torch.zeros(self.input.numel(), dtype=torch.float64)
        if (of_this := memory.get(self.bucket.name)) is not None:
            kept += of_this.first.double() * self.scale + of_this.second.double()
        if self.case.collective != "all_gather":
            return kept
        mine = torch.zeros(ranks, self.count, dtype=torch.float64)
        mine[rank] = kept
        return mine.flatten()

    def judge(
        self, kept: torch.Tensor | None, after_steps: Iterable[Limits]
    ) -> tuple[float, float, str]:
        """Return the largest error divided by its limit, the unaccounted error divided by fp32's
        rounding, and the text of a fault, or "". kept: kept() of all ranks; None: no feedback."""
        got, errors, fault, limit = torch.zeros_like(self.exact), 0.0, "", None
        for step, limit in zip(range(1, STEPS + 1), after_steps, strict=True):
            got += self.results[step - 1].view_as(got)
            expected = step * self.exact
            error, words = _compare(got, expected, limit.error)
            errors = max(errors, error)
            if words and not fault:
                fault = f"{self.count} elements, sum of {step} result(s): {words}"
        if kept is None:
            return errors, 0.0, fault
        rounding = size_of(limit.rounding, None, self.count)
        lost, words = _compare(got, STEPS * self.exact - kept.view_as(got), rounding)
        if words and not fault:
            fault = (
                f"{self.count} elements, sum of {STEPS} results, less what residuals hold: {words}"
            )
        return errors, lost, fault


def _compare(got: torch.Tensor, expected: torch.Tensor, limit: Size) -> tuple[float, str]:
    """Return the largest difference divided by its limit, and a text if it is above 1."""
    difference = got - expected
    of_element = (difference.abs() / limit.element).nan_to_num(nan=math.inf)
    of_block = (blocks(difference).norm(dim=-1) / limit.norm).nan_to_num(nan=math.inf)
    worst = max(of_element.max().item(), of_block.max().item())
    if worst <= 1:
        return worst, ""
    if of_element.max() <= 1:  # the norm is above its limit, and no single element is
        block = of_block.argmax().item() % of_block.shape[-1]
        within = spread(torch.arange(of_block.shape[-1]) == block, got.shape[-1])
        of_element = torch.where(within, of_element, -1.0)
    at = of_element.argmax().item()
    allowed = limit.element[at % limit.element.numel()].item()
    return worst, (
        f"element {at} is {got.flatten()[at].item():.9g}, expected "
        f"{expected.flatten()[at].item():.9g} within {allowed:.3g}; the error is {worst:.3g} times "
        "what it may be"
    )


class _Report(NamedTuple):
    """One rank's results of a case."""

    digests: list[int]  # of the result of each size and step
    error: float
    lost: float
    fault: str


def _encoded(case: Case, rank: int) -> tuple[_Report, list[torch.Tensor]]:
    """Encode rank 0's input on all ranks. They must get the same bytes on any processor."""
    up = codec_info(case.codec).up
    wires, error, fault = [], 0.0, ""
    for count in _sizes(_CHUNK):
        x = values(count, 0)[0]
        wire = encode(up, x)
        wires.append(torch.frombuffer(bytearray(wire), dtype=torch.uint8))
        size = size_of(x.abs().double(), None, count)
        limit = loss(up, size).plus(tiny(size))
        decoded = torch.as_tensor(decode(up, wire, count)).double()
        of_this, words = _compare(decoded[None], x.double()[None], limit)
        error = max(error, of_this)
        if words and not fault:
            fault = f"rank {rank}, {case}, {count} elements: {words}"
    return _Report([digest(wire) for wire in wires], error, 0.0, fault), wires


def _exchanged(case: Case, session: Session) -> tuple[_Report, list[torch.Tensor]]:
    rank, ranks = session.rank, session.size
    chunk = _CHUNK if case.collective == "all_reduce" else _CHUNK // ranks
    uses = [_Use(case, count, rank, ranks) for count in _sizes(chunk)]
    for _ in range(STEPS):
        pending = [use.start(session) for use in uses]  # together: their chunks are ordered
        for use, each in zip(uses, pending, strict=True):
            use.finish(each)
    route, memory = _route(case, session), session.memory()
    kept = [use.kept(memory, rank, ranks) for use in uses]
    together = torch.cat(kept)
    dist.all_reduce(together)
    error, lost, fault = 0.0, 0.0, ""
    for use, of_all in zip(uses, together.split([each.numel() for each in kept]), strict=True):
        if case.collective == "reduce_scatter":
            of_all = of_all.view(ranks, -1)[rank]
        adding = 1 if case.collective == "all_gather" else ranks
        after_steps = limits(route, use.known.size, use.known.total, adding, use.scale)
        of_this = use.judge(of_all if route.feedback else None, after_steps)
        error, lost = max(error, of_this[0]), max(lost, of_this[1])
        fault = fault or (f"rank {rank}, {case}, {of_this[2]}" if of_this[2] else "")
    results = [result for use in uses for result in use.results]
    return _Report([digest(result) for result in results], error, lost, fault), results


def _route(case: Case, session: Session) -> Route:
    if case.codec == RAW:
        return Route("fp32", None, two_level=False, feedback=False)
    info = codec_info(session.communicator.codec(0))
    if case.collective == "all_gather":
        return Route(info.down, None, two_level=False, feedback=info.uses_feedback)
    one_hop = case.collective == "reduce_scatter" or info.entries
    return Route(
        info.up, None if one_hop else info.down, feedback=info.uses_feedback,
        two_level=case.topology == "grid" and not info.entries,
    )  # fmt: skip


def _sizes(chunk: int) -> list[int]:
    """Return different element counts at the borders of blocks and of chunks."""
    wanted = (
        1, BLOCK - 1, BLOCK + 1, 3 * BLOCK, chunk - 1, chunk + 1, chunk + chunk // 4 + 1,
        2 * chunk + BLOCK + 3,
    )  # fmt: skip
    return sorted({count for count in wanted if count > 0})


def _settle(case: Case, report: _Report, results: list[torch.Tensor]) -> Verdict:
    """Combine all ranks' reports into one verdict. Ranks whose bits differ from those of most ranks
    are at fault; ranks without another fault are trusted first."""
    reports: list[_Report] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    faults = {rank: each.fault for rank, each in enumerate(reports) if each.fault}
    if case.collective != "reduce_scatter":
        believed = [rank for rank in range(len(reports)) if rank not in faults]
        for index in range(len(results)):
            seen = [each.digests[index] for each in reports]
            if len(set(seen)) == 1:
                continue
            common = Counter(seen[rank] for rank in believed or range(len(seen))).most_common(1)
            faults |= _name_element(case, results[index], seen, common[0][0], faults)
            break
    return Verdict(
        case, max(each.error for each in reports), max(each.lost for each in reports),
        tuple(faults[rank] for rank in sorted(faults)),
    )  # fmt: skip


def _name_element(
    case: Case, mine: torch.Tensor, seen: list[int], common: int, known: dict[int, str]
) -> dict[int, str]:
    """Return the faults of ranks with another result than most: the first element that differs."""
    source, rank = seen.index(common), dist.get_rank()
    theirs = tensor_from_rank(source, mine, None)
    words = ""
    if seen[rank] != common:
        integers, unit = {1: (torch.uint8, "byte"), 4: (torch.int32, "element")}[
            mine.element_size()
        ]
        at = int((mine.view(integers) != theirs.view(integers)).nonzero()[0])
        words = (
            f"rank {rank}, {case}, {mine.numel()} {unit}s: {unit} {at} is {mine[at].item():.9g}, "
            f"expected {theirs[at].item():.9g}, as rank {source} has it; ranks must have the same "
            "bits"
        )
    of_ranks = [""] * len(seen)
    dist.all_gather_object(of_ranks, words)
    return {rank: each for rank, each in enumerate(of_ranks) if each and rank not in known}


def check_group(
    codecs: Sequence[str],
    topologies: Sequence[str],
    seconds: float,
    say: Callable[[Verdict], None] = lambda verdict: None,
    settings: Config | None = None,
) -> list[Verdict]:
    """Run all cases on torch's default group, whose backend must support host tensors. All ranks
    call it with the same arguments.

    Args:
        codecs: specs, or RAW.
        topologies: of options.TOPOLOGIES. Those that the group's ranks cannot form are left out,
            except flat.
        seconds: no case begins later than this, by rank 0's clock.
        say: called with each verdict.
        settings: of the sessions, except codec, topology, sizes and files. None: the environment's.

    Raises:
        Error: an exchange failed, for example with a TimeoutError.
    """
    end, verdicts = time.monotonic() + seconds, []
    settings = config.resolve() if settings is None else settings
    for topology in topologies:
        for codec in codecs:
            session = Session(Membership(None, "canary"), _settings(settings, codec, topology))
            try:
                communicator, _, _ = session.connect(torch.empty(0))
                if topology != "flat" and communicator.topology().startswith("flat"):
                    break
                for case in _cases(codec, topology, first=topology == topologies[0]):
                    verdict = Verdict(case, None, None, ())
                    if from_rank_0(time.monotonic() < end, None):
                        verdict = _run(case, session)
                    verdicts.append(verdict)
                    say(verdict)
            finally:
                session.close()
    return verdicts


def _settings(settings: Config, codec: str, topology: str) -> Config:
    """Return settings with which all tensors are compressed, or none, and no file is written."""
    raw = codec == RAW
    return dataclasses.replace(
        settings, codec="int4" if raw else codec, topology=topology, chunk_bytes=_CHUNK_BYTES,
        min_bytes=_EVERYTHING if raw else 0, momentum=0.0, trace=None, flight=None,
        timeout_s=settings.timeout_s or _TIMEOUT_S,
    )  # fmt: skip


def _cases(codec: str, topology: str, *, first: bool) -> list[Case]:
    """Return the cases. first: include collectives that do not depend on the topology."""
    cases = [Case(codec, "all_reduce", op, topology) for op in ("sum", "mean")]
    if not first or codec == RAW:
        return cases
    if not codec_info(codec).entries:
        cases.append(Case(codec, "reduce_scatter", "mean", "flat"))
        cases.append(Case(codec, "all_gather", "", "flat"))
    return [Case(codec, "encode", "", ""), *cases]


def _run(case: Case, session: Session) -> Verdict:
    if case.collective == "encode":
        return _settle(case, *_encoded(case, session.rank))
    return _settle(case, *_exchanged(case, session))


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status: 1 if a case is wrong. Without a launcher it starts
    ranks on this machine."""
    codecs, topologies = arguments.codecs or [*CODECS, RAW], arguments.topologies.split(",")
    _check(codecs, topologies, arguments)
    if not launch.launched():
        return launch.start_here(arguments.ranks)
    with launch.gloo_group():
        if dist.get_world_size() < 2:
            raise InvalidArgumentError("the launcher started 1 rank, expected at least 2")
        say = _print if dist.get_rank() == 0 else lambda verdict: None
        verdicts = check_group(codecs, topologies, arguments.seconds, say)
        if dist.get_rank() == 0:
            print(_summary(verdicts), flush=True)
        return int(any(verdict.faults for verdict in verdicts))


def _check(codecs: list[str], topologies: list[str], arguments: argparse.Namespace) -> None:
    for spec in codecs:
        if spec != RAW:
            info = codec_info(spec)
            for hop in (info.up, info.down):
                loss(hop, size_of(torch.zeros(1), None, 1))  # raises for a codec that it lacks
    for topology in topologies:
        if topology not in TOPOLOGIES or topology == "auto":
            raise InvalidArgumentError(
                f"--topologies has {topology!r}, expected flat, grid or hierarchical"
            )
    if arguments.ranks < 2 or not arguments.seconds > 0:
        raise InvalidArgumentError(
            f"--ranks is {arguments.ranks} and --seconds {arguments.seconds}, expected at least 2 "
            "ranks and more than 0 seconds"
        )


def _print(verdict: Verdict) -> None:
    case = verdict.case
    what = " ".join(part for part in (case.collective, case.op) if part)
    place = f"{case.codec:26} {what:20} {case.topology or '-':13}"
    if verdict.error is None:
        print(f"{'not run':8} {place}", flush=True)
        return
    mark = "wrong" if verdict.faults else "ok"
    figures = f"error {verdict.error:5.3g} of its limit, lost {verdict.lost:5.3g} of rounding"
    print(f"{mark:8} {place} {figures}", flush=True)
    for fault in verdict.faults:
        print(f"         {fault}", flush=True)


def _summary(verdicts: Sequence[Verdict]) -> str:
    wrong = sum(bool(verdict.faults) for verdict in verdicts)
    not_run = sum(verdict.error is None for verdict in verdicts)
    ranks = dist.get_world_size()
    text = f"{ranks} ranks, {len(verdicts)} cases: {wrong} wrong"
    if not_run:
        text += f", {not_run} not run, since the time was over: --seconds gives more"
    return text
