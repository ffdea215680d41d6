"""The store's benchmark: the speed that the bytes allow, the orders of calls, a row's columns."""

import argparse

import pytest

from bench import store


@pytest.mark.parametrize(
    ("place", "expected"),
    [((2, 1, 1), 0.5), ((2, 2, 1), 1.0), ((4, 1, 1), 0.375), ((4, 2, 1), 0.75), ((4, 1, 5), 1.5)],
)
def test_the_bytes_allow_what_the_busiest_link_carries(place, expected):
    assert store.bytes_bound(*place) == pytest.approx(expected)


class Calls:
    """A store that records the calls made to it."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        def call(key=None, *_, **options):
            self.made.append((name, key, options.get("priority")))

        return call


@pytest.mark.parametrize("name", store.ORDERS)
def test_a_step_pushes_as_its_order_says(name, monkeypatch):
    monkeypatch.setattr(store.time, "sleep", lambda _: None)
    monkeypatch.setattr(store, "LAYERS", {"first": (8, 1.0), "last": (8, 3.0)})
    cut, whole = Calls(), Calls()
    with store.order(name, {False: cut, True: whole}) as turn:
        assert len(turn(1)) == 1
    used, other = (whole, cut) if name == "mxnet" else (cut, whole)
    exchanges = {
        "fifo": [("pushpull", "last", 0), ("pushpull", "first", 0)],
        "p3": [("pushpull", "last", -1), ("pushpull", "first", 0)],
        "mxnet": [
            *(("push", "last", None), ("pull", "last", None)),
            *(("push", "first", None), ("pull", "first", None)),
        ],
    }
    waits = [("wait", "first", None), ("wait", "last", None)]
    assert used.made == [*waits, *exchanges[name], ("wait", None, None)]
    assert not other.made


def test_orders_take_turns_in_one_run(monkeypatch):
    """Each order has a store of its codec. In MXNet's order the store's keys are not sliced."""
    used, measured = [], {}
    monkeypatch.setattr(store, "LAYERS", {"only": (8, 1.0)})
    monkeypatch.setattr(store, "order", lambda name, stores: used.append((name, stores)))

    def measure(subjects, **_):
        measured.update(subjects)
        ratios = zip(subjects, (1, 2, 4, 8, 1), strict=True)
        return [{"subject": name, "ratio": ratio} for name, ratio in ratios]

    monkeypatch.setattr(store.harness, "measure", measure)
    specs = store.PARTS["order"].specs

    class Store(Calls):
        num_workers = 2

        def __init__(self, spec):
            super().__init__()
            self.spec = spec

    rows = store.order_rows(argparse.Namespace(seconds=1), [Store(spec) for spec in specs])
    assert list(measured) == ["fifo int4", "mxnet int4", "p3 int4", "fifo fp32", "alone"]
    assert [row["of_p3"] for row in rows] == [4, 2, 1, 0.5, 4]
    assert used[-1] == ("alone", None)
    for (name, stores), subject in zip(used[:-1], list(measured)[:-1], strict=True):
        spec = stores[name == "mxnet"].spec
        assert subject == f"{name} {spec.codec}"
        assert (spec.slice_elements == store.WHOLE) == (name == "mxnet")


@pytest.mark.skipif(
    not (store.harness.ROOT / "build/bench/simulate").exists(), reason="simulate is not built"
)
def test_simulated_rows_keep_their_bounds_and_the_known_ratios():
    orders = {row["subject"]: row for row in store.simulated_orders()}
    for codec in store.CODECS:
        fifo, p3 = orders[f"fifo {codec}"], orders[f"p3 {codec}"]
        assert fifo["ratio"] == 1 and p3["ratio"] <= p3["bound"] == fifo["bound"]
        # A direction is idle while a whole key travels in the other direction.
        assert orders[f"mxnet {codec}"]["ratio"] < 0.7
    assert orders["p3 int4"]["ratio"] > 1.15
    rows = store.simulated_stragglers()
    over_sync = {(row["what"], row["subject"]): row["ratio"] for row in rows}
    assert over_sync[store.HALF, "ssp"] == pytest.approx(7 / 4, abs=0.01)
    spikes = 4 - 3 * 0.9**4  # mean of the slowest of four, one of which takes 1.3 on average
    assert over_sync[store.SPIKES, "async"] == pytest.approx(spikes / 1.3, abs=0.02)
    assert 1.45 < over_sync[store.SPIKES, "ssp"] < over_sync[store.SPIKES, "async"]
