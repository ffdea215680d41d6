"""Statistics for dashboards: TensorBoard's scalars, and Prometheus' text format.

log_scalars(state, writer, step)         # a SummaryWriter, or what else has add_scalar
text = prometheus_text(state, {"job": "resnet"})

Both take what compress() returns, or anything else with a stats() like it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from thinwire.arguments import check_kind, check_whole, wrong
from thinwire.errors import UnavailableError

__all__ = ["log_scalars", "prometheus_text", "scalars"]


class _HasStats(Protocol):
    def stats(self) -> dict[str, Any]: ...


class _Meaning(NamedTuple):
    """What a key of stats() is to Prometheus, which wants base units, and whether it only grows."""

    metric: str
    grows: bool
    help: str


_MEANINGS = {
    "steps": _Meaning("steps", True, "training steps that were exchanged"),
    "all_reduces": _Meaning("all_reduces", True, "allreduces of this rank"),
    "raw_bytes": _Meaning("raw_bytes", True, "bytes that a ring of fp32 would have sent"),
    "wire_bytes": _Meaning("wire_bytes", True, "bytes that this rank has sent"),
    "planned_chunks": _Meaning("planned_chunks", True, "chunks whose order was predicted"),
    "exact_reductions": _Meaning("exact_reductions", True, "reductions that went uncompressed"),
    "ratio": _Meaning("compression_ratio", False, "raw bytes to wire bytes"),
}


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of stats() by name; seconds of a stage under its name and `_s`."""
    check_kind("stats", stats, Mapping, "what stats() returns")
    found = {key: float(stats[key]) for key in _MEANINGS if key in stats}
    return found | {f"{stage}_s": float(s) for stage, s in stats.get("seconds", {}).items()}


def _stats_of(of: _HasStats) -> dict[str, Any]:
    if not callable(getattr(of, "stats", None)):
        raise wrong("of", of, "what compress() returned, or another object with stats()")
    return of.stats()


def log_scalars(of: _HasStats, writer: Any, step: int, prefix: str = "thinwire") -> None:
    """Writes the statistics of this rank as scalars "thinwire/wire_bytes", "thinwire/encode_s", ...

    writer: a torch.utils.tensorboard.SummaryWriter, or any object with add_scalar(tag, value,
      step). It waits until nothing is in flight, so call it between steps. Bytes and seconds are
      sums since the start."""
    check_whole("step", step, 0)
    check_kind("prefix", prefix, str, "text")
    if not callable(getattr(writer, "add_scalar", None)):
        raise wrong("writer", writer, "a SummaryWriter, or another object with add_scalar")
    for name, value in scalars(_stats_of(of)).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


def prometheus_text(of: _HasStats, labels: Mapping[str, str] | None = None) -> str:
    """The statistics of this rank in Prometheus' text format, by the package prometheus_client: for
    a file of node_exporter's textfile collector, a Pushgateway, or a handler of one's own.

    labels: of every sample, such as {"rank": "0"}. Call it between steps, as log_scalars(), and not
    from a server's thread. Raises InvalidArgumentError, UnavailableError without the package."""
    snapshot = _Snapshot(_stats_of(of), _check_labels(labels))
    try:
        client = importlib.import_module("prometheus_client")
    except ImportError as error:
        raise UnavailableError(
            "prometheus_text needs prometheus_client; pip install 'thinwire[prometheus]'"
        ) from error
    registry = client.CollectorRegistry()
    registry.register(snapshot)
    return client.generate_latest(registry).decode()


def _check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None:
        return {}
    check_kind("labels", labels, Mapping, "a dict of text by name, or None")
    for name, value in labels.items():
        if not isinstance(name, str) or not name.isidentifier() or not isinstance(value, str):
            raise wrong("labels", labels, "a dict of text by name, or None")
    return dict(labels)


class _Snapshot:
    """A collector of prometheus_client over one stats()."""

    def __init__(self, stats: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        self._stats, self._labels = stats, labels

    def collect(self) -> Any:
        core = importlib.import_module("prometheus_client.core")
        names, values = list(self._labels), list(self._labels.values())
        for key, meaning in _MEANINGS.items():
            if key not in self._stats:
                continue
            kind = core.CounterMetricFamily if meaning.grows else core.GaugeMetricFamily
            family = kind(f"thinwire_{meaning.metric}", meaning.help, labels=names)
            family.add_metric(values, float(self._stats[key]))
            yield family
        stages = core.CounterMetricFamily(
            "thinwire_stage_seconds", "seconds of each stage, summed over the lanes",
            labels=[*names, "stage"],
        )  # fmt: skip
        for stage, seconds in self._stats.get("seconds", {}).items():
            stages.add_metric([*values, stage], float(seconds))
        yield stages
