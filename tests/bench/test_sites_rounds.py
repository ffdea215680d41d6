"""The benchmark of rounds between sites completes a short run."""

import pytest

from bench import harness, lab


@pytest.mark.slow
def test_rounds_run():
    argv = ["--rounds=2", "--megaparameters=0.05", "--members=2"]
    with lab.open_lab(2, lab.LOOPBACK) as place:
        rows = harness.run_ranks(place, argv, 200, "bench.sites")
    assert {"fp32", "int4", "adaptive 2"} <= {row["subject"] for row in rows}
    assert all(row["seconds"] > 0 and row["sent_bytes"] > 0 for row in rows)
