"""The matrix's outcome as a table: the number of cases, and how long errors took."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from verdict import Verdict

UNITS = {"kill": "ms", "abort": "ms", "close": "ms", "timeout": "T", "missed": "ms"}


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that at least this part of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a row for each blow and phase, and one each for all kills and all timeouts. Kills and
    closes are in milliseconds from the blow, stops in timeouts from the submission. "missed" counts
    the cases that had closed before the blow."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    cases: dict[tuple[str, ...], int] = defaultdict(int)
    for verdict in verdicts:
        name = verdict.case.blow
        for key in ((name, verdict.case.phase, verdict.kind), ("all", "phases", verdict.kind)):
            groups[key] += verdict.latencies
            cases[key] += 1
    rows = [f"{'blow':8} {'phase':11} {'kind':8} {'cases':>5} {'errors':>6}  median    p99  worst"]
    for key, values in sorted(groups.items()):
        scale, digits = (1000, 0) if UNITS[key[2]] == "ms" else (1, 3)
        numbers = " ".join(
            f"{scale * number:6.{digits}f}"
            for number in (percentile(values, 0.5), percentile(values, 0.99), max(values))
        ) if values else "     -"  # fmt: skip
        row = f"{key[0]:8} {key[1]:11} {key[2]:8} {cases[key]:5} {len(values):6}"
        rows.append(f"{row}  {numbers} {UNITS[key[2]]}")
    return "\n".join(rows)
