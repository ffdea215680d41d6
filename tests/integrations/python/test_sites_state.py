"""Rounds between sites keep checkpoints, for the same or another number of members, and a log."""

from __future__ import annotations

import copy
import json
import resource

import pytest
import torch
from models import data, digest, loss_of, make_mlp
from ranks import run
from thinwire.errors import InvalidArgumentError
from thinwire.torch import sites
from thinwire.torch.sites.round import Report, RoundLog
from thinwire.torch.sites.state import pack, unpack

WIDTH = 64  # enough elements that layers are not sent in fp32 anyway


def step(model, optimizer, number: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, data(number, rank, WIDTH)).backward()
    optimizer.step()


def resumed(rank: int, delay: int, alpha):
    """Train 20 steps; and 8 steps, a checkpoint, and the other 12 in another object."""

    def make():
        model = make_mlp(width=WIDTH)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = sites.DiLoCo(
            sites.static(), [model[0], model[2:]], inner, outer, 6, codec="int4",
            fragment_sync_delay=delay, fragment_update_alpha=alpha,
        )  # fmt: skip
        return model, inner, diloco

    model, inner, diloco = make()
    with diloco:
        for number in range(20):
            step(model, inner, number, rank)
    whole = digest(model)
    model, inner, diloco = make()
    with diloco:
        for number in range(8):
            step(model, inner, number, rank)
        saved = copy.deepcopy((model.state_dict(), inner.state_dict(), diloco.state_dict()))
    model, inner, diloco = make()
    model.load_state_dict(saved[0])
    inner.load_state_dict(saved[1])
    diloco.load_state_dict(saved[2])
    with diloco:
        for number in range(8, 20):
            step(model, inner, number, rank)
    return whole == digest(model), len(saved[2]["open"])


@pytest.mark.parametrize(
    ("delay", "alpha", "open_rounds"), [(0, 0.0, 0), (2, 0.5, 1), (4, "rebase", 2)]
)
def test_resuming_is_as_never_having_stopped(delay, alpha, open_rounds):
    for same, number in run(resumed, delay, alpha):
        assert same
        assert number == open_rounds


def saved_states(rank: int):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with sites.LocalSGD(sites.static(), model, inner, 2, codec="int4") as local:
        for number in range(6):
            step(model, inner, number, rank)
        return local.state_dict()


def resumed_elsewhere(rank: int, states: list):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    local = sites.LocalSGD(sites.static(), model, inner, 2, codec="int4")
    local.load_state_dict(states)
    with local:
        return local.state_dict()["residuals"][0]


@pytest.mark.parametrize(("saved", "world"), [(3, 2), (3, 5), (1, 2)])
def test_the_sum_of_residuals_is_kept_in_another_world(saved, world):
    states = run(saved_states, world=saved)
    found = run(resumed_elsewhere, states, world=world)
    for name in states[0]["residuals"][0]:
        before = sum(state["residuals"][0][name].double() for state in states)
        after = sum(kept[name].double() for kept in found)
        assert (before - after).abs().max() < 1e-6
    assert any(kept["0.weight"].abs().max() > 0 for kept in found)


def state_of(local: sites.LocalSGD) -> dict:
    """Return a state dict that has a round in progress and its result."""
    state = local.state_dict()
    numel = {name: values.numel() for name, values in state["residuals"][0].items()}
    state["before"] = {0: {name: torch.zeros(n) for name, n in numel.items()}}
    update = len(b"".join(local._fragments[0].codec.nothing()))
    state["open"] = [
        {"bytes": torch.zeros(update, dtype=torch.uint8), "residuals": {}, "weight": 0.0, "left": 1,
         "at_begin": None}
    ]  # fmt: skip
    return state


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("marks"), r"saved lacks the keys \['marks'\], and has the keys \[\]"),
        (lambda s: s.update(more=1), r"lacks the keys \[\], and has the keys \['more'\]"),
        (lambda s: s.update(rounds="3"), r"saved\['rounds'\] is '3', expected a number"),
        (lambda s: s.update(marks=[]), r"saved\['marks'\] has 0 entries, expected 1"),
        (
            lambda s: s["anchors"][0].pop("0.weight"),
            r"\['anchors'\]\[0\] lacks the keys \['0.weight'",
        ),
        (
            lambda s: s["residuals"][0].update({"0.bias": torch.zeros(3)}),
            r"\['0.bias'\] has shape \[3\] and torch.float32, expected \[64\]",
        ),
        (
            lambda s: s["anchors"][0].update({"0.bias": torch.zeros(64).bfloat16()}),
            r"\['0.bias'\] has shape \[64\] and torch.bfloat16, expected \[64\] and torch.float32",
        ),
        (lambda s: s["outer"][0].pop("state"), r"outer optimizer 0 is not one of this SGD"),
        (lambda s: s.update(outer=[]), r"saved\['outer'\] has 0 entries"),
        (lambda s: s.update(before=[]), r"saved\['before'\] is \[\], expected a dict"),
        (lambda s: s["before"][0].pop("0.bias"), r"\['before'\]\[0\] lacks the keys \['0.bias'\]"),
        (
            lambda s: s["before"].update({5: s["before"][0]}),
            r"\['before'\]\[5\] lacks the keys \[\]",
        ),
        (lambda s: s["open"][0].pop("left"), r"\['open'\]\[0\] lacks the keys \['left'\]"),
        (
            lambda s: s["open"][0].update(bytes=torch.zeros(1, dtype=torch.uint8)),
            r"\['open'\]\[0\]\['bytes'\] has shape \[1\]",
        ),
        (
            lambda s: s["open"][0].update(residuals={"0.bias": torch.zeros(64)}),
            r"\['open'\]\[0\]\['residuals'\] lacks the keys",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_named(spoil, message):
    model = make_mlp(width=WIDTH)
    local = sites.LocalSGD(sites.static(), model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    local.load_state_dict(state_of(local))
    state = state_of(local)
    spoil(state)
    with pytest.raises(InvalidArgumentError, match=message):
        local.load_state_dict(state)


def test_state_dicts_of_one_moment_are_loaded_together():
    model = make_mlp(width=WIDTH)
    local = sites.LocalSGD(sites.static(), model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    later = local.state_dict() | {"rounds": 4}
    with pytest.raises(InvalidArgumentError, match="after 0 and 4 rounds"):
        local.load_state_dict([local.state_dict(), later])
    averager = sites.PeriodicModelAverager(2)
    with pytest.raises(InvalidArgumentError, match=r"saved lacks the keys \['step', 'kept'\]"):
        averager.load_state_dict({})


def logged(rank: int, folder: str):
    """Two runs write one log, and the last round has a poisoned update."""
    reports = []
    for number in range(2):
        model = make_mlp(width=WIDTH)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        log = f"{folder}/{rank}.jsonl"
        with sites.LocalSGD(sites.static(), model, inner, 2, weight=1.0, round_log=log) as local:
            for at in range(4):
                step(model, inner, at, rank)
                reports += [local.reports[-1]] if at % 2 else []
            if number:
                with torch.no_grad():
                    model[0].weight[0, rank] = 3e38  # only fp32 can represent it
                local.sync()
                reports.append(local.reports[-1])
    return reports


def test_the_log_of_rounds_has_a_line_for_each_and_is_the_same_on_all(tmp_path):
    reports = run(logged, str(tmp_path))[0]
    text = (tmp_path / "0.jsonl").read_text()
    assert text == (tmp_path / "1.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 0, 1, 2]
    assert lines[-1]["norms"] == [None, None]
    for line, report in zip(lines[:-1], reports[:-1], strict=True):
        for key, value in line.items():
            found = getattr(report, key)
            assert value == (list(found) if isinstance(found, tuple) else found)
    assert set(lines[0]) == {
        "number", "fragment", "members", "weights", "norms", "cosines", "digest"
    }  # fmt: skip


def test_a_log_on_a_full_disk_is_one_warning_and_goes_on_when_there_is_space(tmp_path):
    """Files are limited to 64 bytes at first, and to more later."""
    path = tmp_path / "rounds.jsonl"
    log = RoundLog(path)
    reports = [Report(n, 0, ("a",), (1.0,), (1.0,), (1.0,), "00", 0.0, 0, ()) for n in range(4)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.warns(UserWarning, match="training goes on; make space") as warned:
            log.write(reports[0])
            log.write(reports[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warned) == 1
    log.write(reports[2])
    log.close()
    assert path.read_text() == "".join(report.as_line() for report in reports[:3])


def logged_on_a_full_disk(rank: int):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with (
        pytest.warns(UserWarning, match="round_log '/dev/full' cannot be written"),
        sites.LocalSGD(sites.static(), model, inner, 2, round_log="/dev/full") as local,
    ):
        for number in range(4):
            step(model, inner, number, rank)
    return local.rounds


def test_a_full_disk_ends_no_training():
    assert run(logged_on_a_full_disk) == [2, 2]


def test_a_state_comes_back_and_equal_states_have_equal_bytes():
    state = {"a": [1, 2.5, None, True], 3: {"t": torch.arange(6).view(2, 3)}, "s": (0.9, 0.999)}
    again = unpack(pack(state))
    assert again["a"] == state["a"] and torch.equal(again[3]["t"], state[3]["t"])
    assert again["s"] == [0.9, 0.999]
    assert pack(again) == pack(dict(reversed(state.items())))
    with pytest.raises(InvalidArgumentError, match="no packed state"):
        unpack(b"\x05\0\0\0\0\0\0\0{bad}")
