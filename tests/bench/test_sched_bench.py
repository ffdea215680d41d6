"""Simulated steps and the benchmark of orders give the results that can be computed by hand."""

import subprocess

import pytest
from thinwire.codec import encoded_bytes

from bench import harness, sched_bench

pytestmark = pytest.mark.skipif(
    not (harness.ROOT / "build/bench/simulate").exists(), reason="simulate is not built"
)
ANNOUNCED, PREDICTED, FIFO = sched_bench.ORDERS
RATE = 1e6  # of a link, bytes per second
FAST = 1e15
MILLION = 1 << 20  # elements in a chunk of the default size


def wire_s(numel: int, ranks: int = 2) -> float:
    """Return the seconds that a link of RATE needs: each rank sends the other ranks' shards, then
    its own shard to each of them."""
    return 2 * (ranks - 1) * encoded_bytes("int4", numel // ranks) / RATE


def simulate(
    *units: tuple[int, float, float], order: str = ANNOUNCED, ranks: int = 2, rate: float = RATE,
    latency_s: float = 0.0, jitter: float = 0.0, straggling: float = 0.0, seed: int = 1,
) -> harness.Row:  # fmt: skip
    """units: (elements, seconds of forward pass, seconds of backward pass), in forward order."""
    layers = " ".join(f"{number}" for unit in units for number in unit)
    line = f"{ranks} {rate} {latency_s} {jitter} {straggling} {seed} {order} {layers}"
    return harness.simulate("steps", [line])[0]


def is_close(row: harness.Row, step_s: float, ratio: float = 1.0) -> bool:
    return row == pytest.approx({"mean_s": step_s, "ratio": ratio}, abs=1e-5)


@pytest.mark.parametrize("order", sched_bench.ORDERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_link_takes_its_bytes(order, ranks):
    numel = 16 * MILLION
    row = simulate((numel, 0, 0), order=order, ranks=ranks)
    assert is_close(row, wire_s(numel, ranks))


@pytest.mark.parametrize("order", sched_bench.ORDERS)
def test_a_fast_link_leaves_the_slowest_ranks_computing(order):
    layers = ((4 * MILLION, 1.0, 2.0), (4 * MILLION, 3.0, 4.0))
    assert is_close(simulate(*layers, order=order, rate=FAST), 10.0)
    assert is_close(simulate(*layers, order=order, rate=FAST, straggling=0.3), 13.0)
    first, same, other = (
        simulate(*layers, order=order, rate=FAST, jitter=0.1, seed=seed)["mean_s"]
        for seed in (1, 1, 2)
    )
    assert 10.0 < first == same < 12.0 and 10.0 < other < 12.0 and other != first


def test_priority_hides_a_forward_pass_that_fifo_or_a_barrier_shows():
    """The last layer's bytes keep the link busy while the first one computes, if the first layer's
    bytes overtake them. A step then takes the last layer's backward pass, the time of all bytes,
    and the last layer's forward pass, which no order can beat. With fifo or a barrier the first
    layer's forward pass is added."""
    first, last = (2 * MILLION, 5.0, 0.1), (32 * MILLION, 0.05, 0.2)
    best = last[2] + wire_s(first[0]) + wire_s(last[0]) + last[1]
    for order in (ANNOUNCED, PREDICTED):
        assert is_close(simulate(first, last, order=order), best)
    behind = best + first[1]
    for order in (FIFO, "fifo announced 0 0 2 6", "p3 announced 1 0 2 6"):
        assert is_close(simulate(first, last, order=order), behind, behind / best)


def test_a_prediction_saves_the_latencies_of_asking_for_a_chunk():
    """Each of the two hops takes one latency. Before them, without a prediction, the other rank's
    report to rank 0 and rank 0's announcement take one each."""
    best = wire_s(MILLION) + 2 * 0.05
    assert is_close(simulate((MILLION, 0, 0), order=PREDICTED, latency_s=0.05), best)
    asked = best + 2 * 0.05
    announced = simulate((MILLION, 0, 0), order=ANNOUNCED, latency_s=0.05)
    assert is_close(announced, asked, asked / best)


@pytest.mark.parametrize("line", ["2 1e6 0 0 0 1", f"2 1e6 0 0 0 1 {FIFO}", "2 x"])
def test_a_line_that_is_no_setting_is_refused(line):
    with pytest.raises(subprocess.CalledProcessError):
        harness.simulate("steps", [line])


@pytest.mark.parametrize(
    ("name", "parameters", "multiplications"),
    [
        ("ResNet-50", 25_557_032, 3.8e9),  # arXiv 1512.03385, table 1, has the latter two
        ("VGG-19", 143_667_240, 19.6e9),
        # For each of 512 tokens: all matrices except the embedding's, and attention.
        ("BERT-Large", 335_141_888, 512 * 303e6 + 24 * 2 * 512 * 512 * 1024),
    ],
)
def test_models_have_their_published_size_and_cost(name, parameters, multiplications):
    model = sched_bench.MODELS[name]()
    numel, forward_s, backward_s = map(sum, zip(*model.units, strict=True))
    assert numel == pytest.approx(parameters, rel=1e-3)
    assert forward_s * sched_bench.FLOPS / model.batch == pytest.approx(
        2 * multiplications, rel=0.02
    )
    assert backward_s == pytest.approx(2 * forward_s)


def two_layers() -> sched_bench.Model:
    """The two layers of the test of priority, for a link of 1 Gb/s. The backward pass takes twice
    as long as the forward pass."""
    model = sched_bench.Model(batch=1)
    model.layer(2 * MILLION, 0.03 * sched_bench.FLOPS)
    model.layer(32 * MILLION, 0.001 * sched_bench.FLOPS)
    return model


def test_the_table_has_what_each_setting_says(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sched_bench, "MODELS", {"two layers": two_layers})
    monkeypatch.setattr(sched_bench, "LATENCIES_MS", (0.02, 30.0))
    out = tmp_path / "sched.json"
    monkeypatch.setattr("sys.argv", ["sched_bench", "--short", "--out", str(out)])
    assert sched_bench.main() == 0
    rows = harness.json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 4 * 2 * 3 * 2
    steady = {
        (row["ranks"], row["gbit"], row["latency_ms"]): row
        for row in rows
        if row["jitter"] == row["straggling"] == 0.0
    }
    near, far, fast = steady[2, 1.0, 0.02], steady[2, 1.0, 30.0], steady[2, 25.0, 0.02]
    p3 = 0.002 + wire_s(34 * MILLION) * RATE / (1e9 / 8) + 0.001
    assert near["fifo_over_p3"] == pytest.approx((p3 + 0.03) / p3, rel=1e-3)
    assert near["announced"] == pytest.approx(1.0, abs=1e-3)
    # The link has been idle for long when the first layer's gradient comes: nothing can overlap.
    assert fast["fifo_over_p3"] == pytest.approx(1.0, abs=1e-3)
    assert far["predicted"] < 1.01 < 1.3 < far["announced"]
    text = capsys.readouterr().out
    least, most = (f"{pick(r['fifo_over_p3'] for r in rows if r['latency_ms'] == 0.02):.3f}"
                   for pick in (min, max))  # fmt: skip
    (line,) = [line for line in text.splitlines() if line.startswith("| 0.02 |")]
    assert f"| {least}, " in line and line.endswith(f", {most} |")
    assert "96 settings" in text
