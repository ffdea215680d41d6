"""The arithmetic of the benchmarks of rounds between sites, and a short run."""

import pytest

from bench import harness, lab, sites_loss


def test_losses_are_smoothed_over_the_last_looks(monkeypatch):
    monkeypatch.setattr(sites_loss, "LOOKS", 4)
    points = [(float(t), loss) for t, loss in enumerate([8.0, 4.0, 6.0, 2.0, 4.0])]
    assert sites_loss.smoothed(points) == [
        (0.0, 8.0),
        (1.0, 6.0),
        (2.0, 6.0),
        (3.0, 5.0),
        (4.0, 4.0),
    ]


@pytest.mark.slow
def test_rounds_run():
    argv = ["--rounds=2", "--megaparameters=0.05", "--members=2"]
    with lab.open_lab(2, lab.LOOPBACK) as place:
        rows = harness.run_ranks(place, argv, 200, "bench.sites")
    assert {"fp32", "int4", "adaptive 2"} <= {row["subject"] for row in rows}
    assert all(row["seconds"] > 0 and row["sent_bytes"] > 0 for row in rows)
