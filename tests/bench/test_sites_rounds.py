"""The arithmetic of the benchmark of rounds between sites, and a short run of each of its parts."""

import pytest

from bench import harness, lab, sites


def test_the_peak_is_that_of_any_window():
    looks = [(0.00, 0), (0.05, 10), (0.10, 30), (0.12, 90), (0.19, 100), (0.31, 101)]
    assert sites.peak_of(looks, 0.1) == 80  # from 0.05 to 0.12
    assert sites.peak_of(looks[:1], 0.1) == 0


def test_losses_are_smoothed_over_the_last_looks():
    points = [(float(t), loss) for t, loss in enumerate([8.0, 4.0, 6.0, 2.0, 4.0])]
    assert sites.smoothed(points) == [(0.0, 8.0), (1.0, 6.0), (2.0, 6.0), (3.0, 5.0), (4.0, 4.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "subjects"),
    [
        ([], {"fp32", "int4", "adaptive 2"}),
        (["--streaming"], {"computation", "blocking", "streaming"}),
        (["--slow"], {"one slow, by the clock", "one slow, by steps"}),
    ],
)
def test_each_part_runs(options, subjects):
    argv = ["--rounds=2", "--megaparameters=0.05", "--members=2", *options]
    with lab.open_lab(2, lab.LOOPBACK) as place:
        rows = harness.run_ranks(place, argv, 200, "bench.sites")
    assert subjects <= {row["subject"] for row in rows}
    assert all(row.get("seconds", row.get("round_s")) > 0 for row in rows)
