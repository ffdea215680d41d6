"""The summary that stats() returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from thinwire.config import STAGES


class Ways(Protocol):
    """How an exchange runs, in words; None before its first use."""

    @property
    def transport(self) -> str | None: ...

    @property
    def topology(self) -> str | None: ...


def summary(counts: Mapping[str, float], steps: int, ways: Ways) -> dict[str, Any]:
    """A session's counts as stats() returns them: steps, all_reduces, raw_bytes (a ring of fp32
    would have sent them), wire_bytes (sent by this rank), ratio = raw / wire, planned_chunks (their
    order was predicted), and seconds per stage, summed over the lanes: queue, encode, exchange,
    reduce, gather, decode; transport, what the data runs on; and topology, the way that dense
    allreduces go. Both are None before the first use."""
    names = ("all_reduces", "raw_bytes", "wire_bytes", "planned_chunks")
    found = {name: int(counts.get(name, 0)) for name in names}
    wire = found["wire_bytes"]
    return {
        "steps": steps,
        **found,
        "ratio": found["raw_bytes"] / wire if wire else 1.0,
        "transport": ways.transport,
        "topology": ways.topology,
        "seconds": {stage: counts.get(f"{stage}_s", 0.0) for stage in STAGES},
    }
