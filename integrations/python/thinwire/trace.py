"""Traces of several ranks, merged on one clock.

Every rank writes its trace by its own clock. No messages are needed to compare the clocks: no rank
can finish a chunk's exchange before every other rank has begun it. So each chunk gives two bounds
of the other ranks' offsets. Thousands of chunks make them tight, and the middle is used. (This is
Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989, section 4, with
exchanges in place of probes.)"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import InvalidArgumentError

Event = dict[str, Any]
_EXCHANGES = ("EXCHANGE", "GATHER")
# An exchange: stage, tensor, chunk, and the number of earlier exchanges of the same.
_Key = tuple[str, str, int, int]


@dataclass(frozen=True)
class Merged:
    events: list[Event]  # by the first rank's clock, from 0; microseconds
    offsets: dict[int, float]  # by rank: the microseconds that were added to its times
    uncertainty: float  # the largest error of an offset, in microseconds


def files_of(path: Path) -> list[Path]:
    """Return the ranks' files of the trace with this path, by rank."""
    found = {}
    for file in path.parent.glob(f"{path.stem}.rank*{path.suffix or '.json'}"):
        if number := re.search(r"\.rank(\d+)\.", file.name):
            found[int(number.group(1))] = file
    return [found[rank] for rank in sorted(found)]


def merge(files: Sequence[Path]) -> Merged:
    """Put all ranks' events on the first rank's clock. InvalidArgumentError for a file that is not
    a trace, a rank that appears twice, and a rank that exchanged nothing with the first one."""
    ranks: dict[int, list[Event]] = {}
    for file in files:
        events = _load(file)
        rank = events[0]["pid"]
        if rank in ranks:
            raise InvalidArgumentError(f"{file}: rank {rank} is there twice; pass one run's files")
        ranks[rank] = events
    if not ranks:
        raise InvalidArgumentError("there is no trace to merge; expected at least one file")
    first, *others = ranks
    offsets, uncertainty = {first: 0.0}, 0.0
    ours = dict(_exchanges(ranks[first]))
    for rank in others:
        low, high = _bounds(ours, dict(_exchanges(ranks[rank])))
        if low == float("-inf"):
            raise InvalidArgumentError(
                f"ranks {first} and {rank} have no exchange in common; pass one run's files"
            )
        offsets[rank] = (low + high) / 2
        uncertainty = max(uncertainty, abs(high - low) / 2)
    begin = min(
        event["ts"] + offsets[rank]
        for rank, events in ranks.items()
        for event in events
        if "ts" in event
    )
    moved = [
        {**event, "ts": event["ts"] + offsets[rank] - begin} if "ts" in event else event
        for rank, events in ranks.items()
        for event in events
    ]
    return Merged(moved, {rank: offset - begin for rank, offset in offsets.items()}, uncertainty)


def write(merged: Merged, out: Path) -> None:
    """Write Chrome JSON, which Perfetto and chrome://tracing show."""
    out.write_text("[" + ",\n".join(json.dumps(event) for event in merged.events) + "]\n")


def _load(file: Path) -> list[Event]:
    try:
        events = json.loads(file.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{file} is no trace: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{file} is no trace: {error}; did the run end in order?"
        ) from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InvalidArgumentError(f"{file} is no trace: expected a list of events")
    if not any("ts" in event for event in events):
        raise InvalidArgumentError(f"{file} has no events; did the run end in order?")
    for number, event in enumerate(events):
        if not _is_event(event):
            raise InvalidArgumentError(f"{file} is no trace: event {number} is {event!r:.200}")
    return events


def _is_event(event: Event) -> bool:
    """Return whether it has the fields that merge() reads, with the types of the engine's
    traces."""
    if not isinstance(event.get("pid"), int):
        return False
    if not _is_time(event.get("ts", 0)):
        return False
    if event.get("ph") != "X":
        return True
    if not _is_time(event.get("ts")) or not isinstance(event.get("name"), str):
        return False
    arguments = event.get("args", {})
    return event["name"] not in _EXCHANGES or (
        _is_time(event.get("dur"))
        and isinstance(arguments, dict)
        and isinstance(arguments.get("tensor"), str)
        and isinstance(arguments.get("chunk"), int)
    )


def _is_time(value: object) -> bool:
    """Return whether it is a number of microseconds, such that sums of a few are numbers as well:
    NaN and infinity are no JSON, and no clock has shown 1e18."""
    return isinstance(value, (int, float)) and -1e18 < value < 1e18


def _exchanges(events: Iterable[Event]) -> Iterable[tuple[_Key, tuple[float, float]]]:
    """Yield each exchange's key, begin and end."""
    seen: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"]):
        if event["name"] in _EXCHANGES:
            what = (event["name"], event["args"]["tensor"], event["args"]["chunk"])
            yield (*what, seen[what]), (event["ts"], event["ts"] + event["dur"])
            seen[what] += 1


def _bounds(
    ours: dict[_Key, tuple[float, float]], theirs: dict[_Key, tuple[float, float]]
) -> tuple[float, float]:
    """Return bounds of the offset of another rank's times: each rank's exchange ends after the
    other's has begun."""
    low, high = float("-inf"), float("inf")
    for key, (begin, end) in theirs.items():
        if key in ours:
            low = max(low, ours[key][0] - end)
            high = min(high, ours[key][1] - begin)
    return low, high
