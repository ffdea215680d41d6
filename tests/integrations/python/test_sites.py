"""Rounds between sites: local steps, compressed updates and outer steps equal those of the papers
and of torch if nothing is lost, and all members always have the same bits."""

from __future__ import annotations

import datetime
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire.errors import MismatchError
from thinwire.torch import sites
from thinwire.torch.sites import updates
from thinwire.torch.sites.updates import rule_of
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager as TorchAverager,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64  # enough elements that layers are not sent in fp32 anyway


def step(model, optimizer, number: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, data(number, rank, WIDTH)).backward()
    optimizer.step()


def one_step_rounds(rank: int):
    """Train in rounds of one step with outer SGD(1), and with DDP for comparison."""
    ours, plain = make_mlp(width=WIDTH), make_mlp(width=WIDTH)
    ddp = DistributedDataParallel(plain)
    inner = torch.optim.SGD(ours.parameters(), lr=0.05)
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.05)
    outer = torch.optim.SGD(ours.parameters(), lr=1.0)
    with sites.DiLoCo(sites.static(), [ours], inner, outer, 1, codec="fp32"):
        for number in range(20):
            step(ours, inner, number, rank)
            step(ddp, theirs, number, rank)
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs), digest(ours)


@pytest.mark.parametrize("world", [2, 3])
def test_rounds_of_one_step_are_ddp(world):
    results = run(one_step_rounds, world=world)
    assert max(worst for worst, _ in results) < 1e-6
    assert len({bits for _, bits in results}) == 1


def reference(
    model: torch.nn.Sequential, fragments, sync_every: int, delay: int, alpha: float, steps: int
) -> None:
    """Train by Streaming DiLoCo as in arXiv 2501.18512 (algorithm 2) and torchft's fragments: every
    sync_every / fragments steps one fragment ends its round, whose update was taken `delay` steps
    before. Each member runs this, over torch's allreduce."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outers = [
        torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments
    ]
    anchors = [[p.detach().clone() for p in f.parameters()] for f in fragments]
    apart, updates, turn = sync_every // len(fragments), [], 0
    for number in range(steps):
        step(model, inner, number, rank)
        if number % apart == apart - delay - 1:
            parameters = list(fragments[turn].parameters())
            pairs = zip(anchors[turn], parameters, strict=True)
            updates = [anchor - p.detach() for anchor, p in pairs]
            for update in updates:
                dist.all_reduce(update)
        if number % apart == apart - 1:
            parameters = list(fragments[turn].parameters())
            local = [p.detach().clone() for p in parameters]
            with torch.no_grad():
                for p, anchor, update in zip(parameters, anchors[turn], updates, strict=True):
                    p.copy_(anchor)
                    p.grad = update / world
                outers[turn].step()
                anchors[turn] = [p.detach().clone() for p in parameters]
                for p, mine in zip(parameters, local, strict=True):
                    p.lerp_(mine, alpha)
            turn = (turn + 1) % len(fragments)


def streamed(rank: int, fragments: int, delay: int, alpha: float):
    ours, plain = make_mlp(width=WIDTH), make_mlp(width=WIDTH)

    def parts(model):
        return [model] if fragments == 1 else [model[0], model[2:]]

    reference(plain, parts(plain), 8, delay, alpha, 32)
    inner = torch.optim.AdamW(ours.parameters(), lr=0.01)
    outers = [
        torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in parts(ours)
    ]
    with sites.DiLoCo(
        sites.static(), parts(ours), inner, outers, 8, codec="fp32",
        fragment_sync_delay=delay, fragment_update_alpha=alpha,
    ) as diloco:  # fmt: skip
        for number in range(32):
            step(ours, inner, number, rank)
        rounds = diloco.rounds
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs), rounds


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"),
    [(1, 0, 0.0), (1, 3, 0.0), (1, 3, 0.5), (2, 0, 0.5), (2, 2, 0.0), (2, 3, 0.25)],
)
def test_streaming_is_the_papers(fragments, delay, alpha):
    for worst, rounds in run(streamed, fragments, delay, alpha):
        assert worst < 1e-6
        assert rounds == 4 * fragments


def one_outer_for_all(rank: int):
    """One outer optimizer for all fragments sees only the current fragment's gradients."""
    ours, split = make_mlp(width=WIDTH), make_mlp(width=WIDTH)
    for model, shared in ((ours, True), (split, False)):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (model[0], model[2:])]
        outer = torch.optim.SGD(model.parameters(), lr=0.5) if shared else outers
        with sites.DiLoCo(sites.static(), [model[0], model[2:]], inner, outer, 4, codec="fp32"):
            for number in range(16):
                step(model, inner, number, rank)
    return digest(ours) == digest(split)


def test_one_outer_optimizer_serves_all_fragments():
    assert run(one_outer_for_all) == [True, True]


def layer_by_layer(rank: int):
    """One of the fragments has no parameters, like an activation among a model's layers."""
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with sites.DiLoCo(sites.static(), list(model), inner, outer, len(model)) as diloco:
        for number in range(2 * len(model)):
            step(model, inner, number, rank)
        return [any(True for _ in layer.parameters()) for layer in model], diloco.rounds


def test_a_fragment_may_be_without_parameters():
    for with_parameters, rounds in run(layer_by_layer):
        assert not all(with_parameters)
        assert rounds == 2 * len(with_parameters)


def compressed(rank: int, options: dict, sync_every):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    momentum = 0.0 if "decay" in options else 0.9
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=momentum, nesterov=momentum > 0)
    before = loss_of(model, data(10_000, 0, WIDTH)).item()
    with sites.DiLoCo(sites.static(), [model], inner, outer, sync_every, **options) as diloco:
        for number in range(128):
            step(model, inner, number, rank)
        diloco.sync()
        stats = diloco.stats()
    after = loss_of(model, data(10_000, 0, WIDTH)).item()
    return digest(model), before, after, stats["sent_bytes"] / stats["rounds"], stats["report"]


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"codec": "fp32"}, 32),
        ({"codec": {"1d": "fp32", "*": "int4"}}, 4.0625),
        ({"codec": "adaptive:bits=2"}, 2.0625),
        ({"codec": "adaptive:bits=0.5"}, 0.5625),
        ({"codec": "topk:density=0.05", "decay": 0.95}, 1.6),
    ],
    ids=lambda value: str(value.get("codec")) if isinstance(value, dict) else "",
)
def test_all_codecs_train_with_the_same_bits_everywhere(options, bits):
    first, second = run(compressed, options, 8)
    assert first[0] == second[0]
    assert first[2] < 0.95 * first[1]
    large, exact = 2 * WIDTH * WIDTH, 2 * WIDTH + 10 * WIDTH + 10  # below 1,024: fp32
    expected = large * bits / 8 + 4 * exact
    assert abs(first[3] - expected) < 0.02 * expected + 1000  # headers and votes


def residual_is_fed_back(rank: int):
    """The mean over rounds of one constant update approaches that update."""
    model = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    torch.manual_seed(5 + rank)
    change = torch.randn(64, 64)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with sites.LocalSGD(sites.static(), model, inner, 1, codec="int4"):
        for _ in range(40):
            model.weight.grad = -change
            inner.step()
    expected = change.clone()
    dist.all_reduce(expected)
    return (model.weight.detach() / 40 - expected / 2).abs().max().item()


def test_what_compression_lost_comes_later():
    assert max(run(residual_is_fed_back)) < 0.02  # one round alone is off by up to 0.25


def weighted(rank: int):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with sites.LocalSGD(sites.static(), model, inner, 1, codec="fp32") as local:
        local.saw(30 if rank == 0 else 10)
        model.weight.grad = torch.full((1, 2), -1.0 if rank == 0 else -5.0)
        inner.step()
        report = local.reports[-1]
    return model.weight.tolist(), report.weights


def test_members_count_by_what_they_saw():
    for weights, shares in run(weighted):
        assert weights == [[2.0, 2.0]]
        assert shares == (30.0, 10.0)


def weighted_by_some(rank: int, weight: float | None):
    model = torch.nn.Linear(2, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"codec": "fp32", "weight": None if rank == 0 else weight}
    with sites.LocalSGD(sites.static(), model, inner, 1, **options) as local:
        for _ in range(2):
            if rank == 0:
                local.saw(30)
            model.weight.grad = torch.ones(1, 2)
            inner.step()
    return local.reports[-1].weights


def test_members_weigh_by_samples_on_all_or_on_none():
    for outcome in outcomes_of(weighted_by_some, None):
        assert outcome.error == "MismatchError", outcome.trace
        assert re.search(r"member 0 .* by what it saw\(\) and member 1 .* by", outcome.message)
    assert run(weighted_by_some, 5.0) == [(30.0, 5.0)] * 2


def proximal(rank: int):
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    values = []
    with sites.LocalSGD(sites.static(), model, inner, 100, codec="fp32", prox=0.25):
        for _ in range(2):
            model.weight.grad = torch.ones(1, 1)
            inner.step()
            values.append(model.weight.item())
    return values


def test_fedprox_pulls_to_the_anchor():
    # 1 - 0.5; then the gradient is 1 + 0.25 * (0.5 - 1).
    assert run(proximal) == [[0.5, 0.5 - 0.5 * 0.875]] * 2


def averaged(rank: int, codec: str):
    ours, theirs = make_mlp(seed=rank, width=WIDTH), make_mlp(seed=rank, width=WIDTH)
    pairs = [
        (ours, sites.PeriodicModelAverager(3, 4, codec=codec)),
        (theirs, TorchAverager(3, 4)),
    ]
    for model, averager in pairs:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(14):
            step(model, optimizer, number, rank)
            averager.average_parameters(model.parameters())
    pairs[0][1].close()
    together = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in together), digest(ours)


@pytest.mark.parametrize(("codec", "error"), [("fp32", 1e-6), ("int8", 2e-3)])
def test_the_averager_is_torchs(codec, error):
    results = run(averaged, codec)
    assert max(worst for worst, _ in results) < error
    assert len({bits for _, bits in results}) == 1


def different_weights(rank: int):
    model = make_mlp(seed=rank, width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with sites.LocalSGD(sites.static(), model, inner, 2):
        return digest(model)


def test_members_begin_with_the_weights_of_the_first():
    assert len(set(run(different_weights, world=3))) == 1


def mismatched(rank: int):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    codec = {"0.weight": "int4", "*": "fp32"} if rank else {"2.weight": "int4", "*": "fp32"}
    message = r"member 1 \('rank 1'\) has another codec than member 0"
    with (
        pytest.raises(MismatchError, match=message),
        sites.LocalSGD(sites.static(), model, inner, 1, codec=codec),
    ):
        step(model, inner, 0, rank)


def test_another_codec_is_a_typed_error_on_all():
    run(mismatched)


def by_the_clock(rank: int):
    """The rounds are timed, so ranks may make different numbers of steps in each."""
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    every = datetime.timedelta(milliseconds=60)
    shares = []
    with sites.LocalSGD(sites.static(), model, inner, every, codec="fp32") as local:
        number = 0
        while local.rounds < 4:
            number += 1
            step(model, inner, number, rank)
        shares = [report.weights for report in local.reports]
    return digest(model), shares, number


def test_rounds_by_the_clock_count_the_steps_made():
    first, second = run(by_the_clock)
    assert first[0] == second[0]
    assert first[1] == second[1]
    for rank, (_, shares, number) in enumerate((first, second)):
        assert sum(each[rank] for each in shares) == number


def measured_pace(rank: int):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    every = sites.Overhead(0.3, first=2, most=64)
    with sites.LocalSGD(sites.static(), model, inner, every) as local:
        steps = []
        for number in range(100):
            step(model, inner, number, rank)
            steps.append(local.stats()["steps_between"])
    return steps, digest(model)


def test_the_pace_that_an_overhead_asks_for_is_one_of_all():
    first, second = run(measured_pace)
    assert first[0] == second[0]
    assert first[0][0] == 2 and max(first[0]) > 2


def updates_of(members: int, numel: int = 1000):
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(numel, generator=generator) * 0.1 + 1} for _ in range(members)]


@pytest.mark.parametrize("aggregate", ["centered_clip", "trimmed", "median"])
def test_one_poisoner_of_five_changes_little(aggregate):
    honest = updates_of(4)
    clean = rule_of("mean")(honest, [1.0] * 4, {})["w"]
    before = {"w": torch.ones(1000)}
    for poison in (-10 * honest[0]["w"], torch.full((1000,), 1e6)):
        poisoned = [*honest, {"w": poison}]
        result = rule_of(aggregate)(poisoned, [1.0] * 5, before)["w"]
        assert (result - clean).norm() < 0.15 * clean.norm()
        plain = rule_of("mean")(poisoned, [1.0] * 5, before)["w"]
        assert (plain - clean).norm() > clean.norm()


def unlike_updates(members, numel=3000):
    """Return flat updates of members that learned different things, and the result before."""
    draw = np.random.default_rng(members)
    common = draw.normal(size=numel)
    rows = [(common + 2 * draw.normal(size=numel)).astype(np.float32) for _ in range(members)]
    return rows, (0.8 * common).astype(np.float32)


def in_two(row):
    """Return a flat update split into two parameters."""
    flat = torch.as_tensor(np.asarray(row, np.float32))
    return {"a": flat[:1000].clone(), "b": flat[1000:].clone()}


def clipped(rows, before, weights=None):
    """Return centered_clip() of flat updates."""
    each, weights = list(map(in_two, rows)), weights or [1.0] * len(rows)
    return torch.cat(list(rule_of("centered_clip")(each, weights, in_two(before)).values()))


def plainly_clipped(rows, before):
    """Return NNM's algorithm 1 and centered clipping's algorithm 2, computed in float64."""
    rows = np.asarray(rows, np.float64)
    kept = max(1, len(rows) - -(-len(rows) // 5))
    nearest = np.linalg.norm(rows[:, None] - rows[None], axis=2).argsort(1)[:, :kept]
    mixed, centre = rows[nearest].mean(1), np.float64(before)
    for _ in range(3):
        away = mixed - centre
        norms = np.linalg.norm(away, axis=1)
        radius = np.sort(norms)[(len(norms) - 1) // 2]
        centre = centre + (away * np.minimum(1, radius / np.maximum(norms, 1e-30))[:, None]).mean(0)
    return centre


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 6, 8])
def test_centered_clipping_is_the_papers(members):
    rows, before = unlike_updates(members)
    rows[-1] = -3 * rows[-1]
    expected = plainly_clipped(rows, before)
    found = clipped(rows, before).double().numpy()
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("members", [3, 4, 5])
def test_among_unlike_updates_a_poisoner_reaches_little(members):
    """The change is less than half of what it would be if one of the honest members stayed away."""
    rows, before = unlike_updates(members)
    honest, others = (torch.tensor(np.mean(rows[first:-1], 0)) for first in (0, 1))
    rows[-1] = -10 * rows[-1]
    assert (clipped(rows, before) - honest).norm() < 0.5 * (others - honest).norm()


def test_a_poisoners_weight_and_numbers_that_are_not_finite_change_nothing():
    rows, before = unlike_updates(5)
    honest = clipped(rows[:-1], before)
    assert torch.equal(clipped(rows, before, [1.0] * 4 + [1e12]), clipped(rows, before))
    for number in (float("nan"), float("inf")):
        rows[-1][7] = number
        assert torch.equal(clipped(rows, before), honest)


def test_sums_in_another_order_change_no_norm(monkeypatch):
    """Another CPU may sum in another order. Centered clipping has the same bits nevertheless."""
    rows, before = unlike_updates(5, numel=100_000)
    (one, other, *_), found = map(in_two, rows), []
    for at_once in (65536, 4099, 1001):
        monkeypatch.setattr(updates, "_CACHED", at_once)
        lengths = (updates.norm(one), updates.norm(other), updates.distance(one, other))
        found.append((lengths, clipped(rows, before)))
    for lengths, result in found[1:]:
        assert lengths == found[0][0]
        assert torch.equal(result, found[0][1])


def predicted(rank: int, delay: int):
    """Train with rounds in predicted order, as over a slow link, and with announced rounds."""
    results = []
    for planned in (True, False):
        model = make_mlp(seed=rank, width=WIDTH)  # the first meeting sends a state
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with sites.DiLoCo(
            sites.static(), [model[0], model[2:]], inner, outer, 4, codec="int4",
            fragment_sync_delay=delay, planned=planned,
        ) as diloco:  # fmt: skip
            for number in range(24):
                step(model, inner, number, rank)
            diloco.sync()  # this turn is not complete
            counted = diloco._rounds._meeting._session.summary()["planned_chunks"]
        results.append((counted, [p.detach().clone() for p in model.parameters()]))
    return results


@pytest.mark.parametrize("delay", [0, 3])
def test_the_order_of_rounds_is_predicted_on_far_links(delay):
    for (planned, a), (announced, b) in run(predicted, delay, world=3):
        assert planned > 10
        assert announced == 0
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
