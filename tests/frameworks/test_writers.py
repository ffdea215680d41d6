"""Statistics as the real packages of dashboards take them."""

import pytest
from thinwire import observe
from thinwire.torch import State

STATS = {
    "steps": 3, "all_reduces": 6, "raw_bytes": 800, "wire_bytes": 100, "ratio": 8.0,
    "planned_chunks": 0, "transport": "gloo over TCP", "seconds": {"encode": 0.25, "gather": 0.5},
    "parameters": [],
}  # fmt: skip


class Fixed:
    """Known statistics."""

    def stats(self):
        return STATS


def test_prometheus_reads_the_text():
    parser = pytest.importorskip("prometheus_client.parser")
    text = observe.prometheus_text(Fixed(), {"rank": "0"})
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    rank = ("rank", "0")
    assert samples["thinwire_wire_bytes_total", rank] == 100
    assert samples["thinwire_compression_ratio", rank] == 8
    assert samples["thinwire_stage_seconds_total", rank, ("stage", "gather")] == 0.5
    assert len(samples) == 8
    assert "thinwire_steps_total 0.0" in observe.prometheus_text(State())


def test_tensorboard_reads_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        observe.log_scalars(Fixed(), writer, 1)
        observe.log_scalars(Fixed(), writer, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["scalars"]) == 8
    assert [(e.step, e.value) for e in events.Scalars("thinwire/encode_s")] == [
        (1, 0.25),
        (2, 0.25),
    ]
