"""bench.sites_peers: rules for updates beside numpy, with the cases that Flower has there."""

import pytest

from bench import sites_peers

numpy = pytest.importorskip("numpy")


def rows_of(results):
    return [numpy.stack(layer) for layer in zip(*(arrays for arrays, _ in results), strict=True)]


def median(results, _cut):
    return [numpy.median(rows, axis=0) for rows in rows_of(results)]


def trimmed(results, cut):
    """scipy.stats.trim_mean's formula, in float64."""
    kept = [numpy.sort(rows, axis=0)[cut : len(rows) - cut] for rows in rows_of(results)]
    return [rows.astype(numpy.float64).mean(axis=0) for rows in kept]


def test_median_and_trimmed_mean_are_numpys():
    rows = sites_peers.rule_rows(median, trimmed)
    assert {row["members"] % 2 for row in rows} == {0, 1}
    assert {row["cut"] for row in rows if row["subject"] == "trimmed"} == {0, 1, 2, 3}
    assert [row for row in rows if not row["most"] <= 1] == []


def test_another_rule_is_seen():
    def mean(results, _cut):
        return trimmed(results, 0)

    rows = sites_peers.rule_rows(mean, mean)
    assert all((row["most"] > 1) == (row["cut"] > 0) for row in rows if row["subject"] == "trimmed")
    assert all(row["most"] > 1 for row in rows if row["members"] > 2 and row["subject"] == "median")
