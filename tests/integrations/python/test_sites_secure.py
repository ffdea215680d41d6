"""Secure sums between sites: members get the plain sum, bit for bit; one member's bytes reveal
nothing; and no byte of a mask is used twice."""

from __future__ import annotations

import copy
import random
import struct
import sys

import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import run
from thinwire import errors
from thinwire.torch import sites
from thinwire.torch.sites import secure
from thinwire.torch.sites.meeting import Meeting

pytest.importorskip("cryptography")
WIDTH = 64


def masks_of(members: int) -> list[secure.Masks]:
    keys = [secure.new_key() for _ in range(members)]
    publics = [key.public_key().public_bytes_raw() for key in keys]
    return [secure.Masks(key, publics, rank) for rank, key in enumerate(keys)]


def updates_of(members: int, sizes: dict[str, int], seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(numel, generator=generator) * 10.0**-at for at, (name, numel) in
         enumerate(sizes.items())}
        for _ in range(members)
    ]  # fmt: skip


SIZES = {"bias": 10, "weight": 5000, "norm": 63, "head": 1025}


def exchanged(codec, weights, updates):
    """Run a round without a network. Return the masked rows, the plain rows, the sum, the scales,
    what each member lost, and the mean."""
    members, speakers = len(weights), sum(weight > 0 for weight in weights)
    masks = masks_of(members)
    values = [
        codec.values(
            codec.encode(
                lambda name, begin, end, u=u: u[name][begin:end],
                {n: torch.zeros_like(v) for n, v in u.items()}, 1.0, {},
            )
        )
        for u in updates
    ]  # fmt: skip
    places = [codec.places(v, w) for v, w in zip(values, weights, strict=True)]
    rows = [m.hide(p, len(p), 5, secure.SCALE) for m, p in zip(masks, places, strict=True)]
    scales = codec.scales(secure.sum_of([memoryview(bytearray(row)) for row in rows], len(rows[0])))
    plain, masked, lost = [], [], []
    for member, weight in enumerate(weights):
        codes, missing = codec.codes(values[member], weight, scales, speakers)
        plain.append(codes.clone())
        lost.append(missing)
        masked.append(masks[member].hide(codes, codec.wide_bytes, 5, secure.CODES))
    total = secure.sum_of([memoryview(bytearray(row)) for row in masked], codec.wide_bytes)
    return masked, plain, total, scales, lost, codec.mean(total, scales, speakers, sum(weights))


def decoded(codec, codes: torch.Tensor) -> torch.Tensor:
    """Return codes as int64, by the layout that the class describes."""
    wide = codes[: codec.wide_bytes].view(torch.int16).long()
    return torch.cat([wide, codes[codec.wide_bytes :].view(torch.int8).long()])


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 0.5, 7e6], [2, 0, 1, 4, 1], [1] * 18])
def test_the_sum_is_the_plain_integer_sum(weights):
    codec = secure.SumCodec(SIZES)
    updates = updates_of(len(weights), SIZES)
    for update, weight in zip(updates, weights, strict=True):
        if weight == 0:
            for values in update.values():
                values.zero_()
    _, plain, total, scales, lost, mean = exchanged(codec, weights, updates)
    # The sum is taken in 64 bits, so the modulus has not overflowed either.
    assert torch.equal(decoded(codec, total), sum(decoded(codec, codes) for codes in plain))
    for name in SIZES:
        expected = sum(
            weight * (update[name] - left[name]).double()
            for weight, update, left in zip(weights, updates, lost, strict=True)
        ) / sum(weights)
        assert torch.allclose(mean[name].double(), expected, rtol=1e-5, atol=1e-7)
        largest = max(
            weight * float(update[name].abs().max())
            for weight, update in zip(weights, updates, strict=True)
        )
        assert largest <= scales[name] <= 2 * largest


def test_numbers_that_cancel_do_not_hide_the_scale(monkeypatch):
    """The members' random numbers for the highest place add up to 0 modulo 2^16. A run and its
    repetition differed there, once in 65,536 sums."""
    drawn = iter([])
    monkeypatch.setattr(
        secure.secrets, "token_bytes", lambda n: struct.pack("<HH", *next(drawn)) * (n // 4)
    )
    codec = secure.SumCodec({"w": 4096})
    updates = [{"w": torch.full((4096,), each)} for each in (1.5, 1.5, 0.01)]
    for exponent in (0, 1):  # an even and an odd place
        drawn = iter([(1, 1), (0xFFFF, 1), (0, 1)])
        scaled = [{"w": update["w"] * 2.0**exponent} for update in updates]
        *_, scales, _, _ = exchanged(codec, [1.0] * 3, scaled)
        assert scales["w"] == 2.0 ** (exponent + 1)


@pytest.mark.parametrize("members", [3, 4, 8, 18])
def test_codes_that_are_all_the_largest_stay_within_the_modulus(members):
    codec = secure.SumCodec({"w": 4096, "b": 8})
    updates = [
        {"w": torch.full((4096,), -0.9999), "b": torch.full((8,), 0.9999)} for _ in range(members)
    ]
    _, plain, total, *_, mean = exchanged(codec, [1.0] * members, updates)
    assert plain[0][codec.wide_bytes :].view(torch.int8).min() == -(127 // members)
    assert torch.equal(decoded(codec, total), sum(decoded(codec, codes) for codes in plain))
    assert torch.allclose(mean["w"], -torch.ones(4096))
    assert torch.allclose(mean["b"], torch.ones(8), atol=2e-4)


def test_what_is_not_finite_reaches_everybody_and_leaves_no_trace():
    codec = secure.SumCodec(SIZES)
    updates = updates_of(3, SIZES)
    updates[1]["weight"][7] = torch.nan
    updates[2]["bias"][1] = torch.inf
    *_, lost, mean = exchanged(codec, [1.0] * 3, updates)
    assert mean["weight"].isnan().all() and mean["bias"].isnan().all()
    assert mean["norm"].isfinite().all() and mean["head"].isfinite().all()
    assert all(values.isfinite().all() for each in lost for values in each.values())


# 255 degrees of freedom: one in 10^10 samples of noise exceeds it. Without a mask the value is
# millions.
NOISE = 430


def chi_square(data: bytes) -> float:
    counts = torch.bincount(torch.frombuffer(bytearray(data), dtype=torch.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())


def captured(rank: int):
    """Return all bytes that a member sends with a constant update, except the headers."""
    model = torch.nn.Linear(512, 256)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    sent, codes = [], []
    start, quantise = Meeting.start, secure.SumCodec.codes

    def keep(meeting, name, mine):
        if name.startswith(("round", "codes")):
            sent.append(b"".join(mine))
        return start(meeting, name, mine)

    def keep_codes(codec, *arguments):
        found, lost = quantise(codec, *arguments)
        codes.append(found.clone())
        return found, lost

    Meeting.start, secure.SumCodec.codes = keep, keep_codes
    totals = []
    mean = secure.SumCodec.mean

    def keep_total(codec, total, *arguments):
        totals.append(total.clone())
        return mean(codec, total, *arguments)

    secure.SumCodec.mean = keep_total
    with sites.LocalSGD(sites.static(), model, inner, 1, secure=True) as local:
        for _ in range(4):
            model.weight.grad, model.bias.grad = torch.ones(256, 512), torch.ones(256)
            inner.step()
        stats = local.stats()
    return sent, codes, totals, digest(model), stats["sent_bytes"], stats["report"]


def test_one_members_bytes_are_noise_and_the_sum_of_all_is_plain():
    results = run(captured, world=3)
    parameters = 512 * 256 + 256
    for sent, codes, _, _, total_bytes, _ in results:
        for row in sent[1::2]:  # codes
            assert chi_square(row) < NOISE
            assert len(row) <= 1.02 * parameters
        assert chi_square(b"".join(sent[0::2])) < NOISE  # places of scales
        assert len({bytes(row) for row in sent}) == len(sent)  # rows differ from round to round
        # If a mask were used twice, the difference of two rows would show it, since these codes
        # repeat.
        first, second = (torch.frombuffer(bytearray(r), dtype=torch.uint8) for r in sent[1:4:2])
        assert chi_square(bytes((first - second).tolist())) < NOISE
        assert torch.equal(codes[0], codes[1])
        # Each of the two others gets a row. The other messages are small.
        assert total_bytes / 4 / 2 <= 1.02 * parameters + 2000
    for number in range(4):
        plain = torch.zeros_like(results[0][1][0])
        for _, codes, *_ in results:
            secure.add(plain, codes[number], 2 * 256)
        for _, _, totals, *_ in results:
            assert torch.equal(totals[number], plain)
    assert len({bits for *_, bits, _, _ in results}) == 1
    report = results[0][-1]
    assert report.weights == (1.0, 1.0, 1.0)
    assert report.norms == report.cosines == ()


def trained(rank: int, options: dict):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    fragments = [model[0], model[2:]]
    before = loss_of(model, data(10_000, 0, WIDTH)).item()
    with sites.DiLoCo(sites.static(), fragments, inner, outer, 4, **options) as diloco:
        for number in range(96):
            inner.zero_grad()
            loss_of(model, data(number, rank, WIDTH)).backward()
            inner.step()
        diloco.sync()
        return diloco.dump(), before, loss_of(model, data(10_000, 0, WIDTH)).item()


@pytest.mark.parametrize(
    "streaming",
    [{}, {"fragment_sync_delay": 3, "fragment_update_alpha": "rebase"}],
    ids=["blocking", "streaming"],
)
def test_training_is_as_good_as_with_int8(streaming):
    plain = run(trained, {"codec": "int8", **streaming}, world=3)
    hidden = run(trained, {"secure": True, **streaming}, world=3)
    assert len({bits for bits, *_ in hidden}) == 1
    for (_, before, reached), (_, _, found) in zip(plain, hidden, strict=True):
        assert abs(found - reached) < 0.02 * (before - reached)


def weighted(rank: int):
    """Only three members contribute to the first round, and two to the second."""
    model = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = []
    with sites.LocalSGD(sites.static(), model, inner, 100, secure=True) as local:
        for speakers in (3, 2, 4):
            if rank < speakers:
                local.saw(rank + 1)
                model.weight.grad = torch.full((64, 64), -float(rank + 1))
                inner.step()
            else:
                local.saw(0)
            local.sync()
            kept.append((local.reports[-1].weights, local._fragments[0].anchor["weight"].mean()))
    return kept, digest(model)


def test_weights_count_and_too_few_speakers_wait_for_the_next_round():
    results = run(weighted, world=4)
    assert len({bits for _, bits in results}) == 1
    for (first, one), (second, two), (third, three) in (kept for kept, _ in results):
        assert first == (1.0, 2.0, 3.0, 0.0)
        assert abs(one - (1 + 4 + 9) / 6) < 0.1
        assert second == (0.0, 0.0, 0.0, 0.0)
        assert one == two
        # Members 0 and 1 deliver two steps each.
        assert third == (2.0, 4.0, 3.0, 4.0)
        assert abs(three - two - (2 * 2 + 4 * 4 + 3 * 3 + 4 * 4) / 13) < 0.3


def test_no_mask_is_used_twice_over_many_attempts(monkeypatch):
    """100,000 attempts at rounds among three members; drop-outs end meetings at any moment."""
    used, pairs = set(), 0

    def count(key, nonce, length):
        nonlocal pairs
        pairs += 1
        used.add(hash((key, nonce)))
        return bytes(length)

    monkeypatch.setattr(secure, "keystream", count)
    monkeypatch.setattr(secure, "add", lambda *_: None)  # skip it: it takes most of the time
    seed = 7
    chance = random.Random(seed)
    numbers = torch.zeros(4, dtype=torch.uint8)
    attempts = number = 0
    while attempts < 100_000:
        key, *others = (secure.new_key() for _ in range(3))
        publics = [each.public_key().public_bytes_raw() for each in (key, *others)]
        masks = secure.Masks(key, publics, 0)
        while attempts < 100_000:
            attempts += 1
            masks.hide(numbers, 0, number, secure.SCALE)
            if chance.random() < 0.02:
                break  # a member has dropped out; retry the round in a new meeting
            masks.hide(numbers, 0, number, secure.CODES)
            if chance.random() < 0.02:
                break
            number += 1
    assert pairs > 3 * 100_000
    assert len(used) == pairs, f"seed {seed}"


def test_masks_refuse_a_second_use():
    mine, _, _ = masks_of(3)
    numbers = torch.zeros(64, dtype=torch.uint8)
    mine.hide(numbers, 0, 4, secure.CODES)
    for number in (4, 3):
        with pytest.raises(errors.Error, match="used before"):
            mine.hide(numbers, 0, number, secure.CODES)


def test_a_public_key_that_fixes_the_secret_is_refused():
    key = secure.new_key()
    publics = [key.public_key().public_bytes_raw(), bytes(32), bytes(32)]
    with pytest.raises(errors.MismatchError, match="member 1 sent 0000"):
        secure.Masks(key, publics, 0)


def resumed(rank: int):
    """Train 16 steps; and 7 steps, a checkpoint with an open round, and the rest in another
    object."""

    def make():
        model = make_mlp(width=WIDTH)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = sites.DiLoCo(
            sites.static(), [model[0], model[2:]], inner, outer, 6, secure=True,
            fragment_sync_delay=2, fragment_update_alpha=0.5,
        )  # fmt: skip
        return model, inner, diloco

    def train(model, inner, numbers):
        for number in numbers:
            inner.zero_grad()
            loss_of(model, data(number, rank, WIDTH)).backward()
            inner.step()

    model, inner, diloco = make()
    with diloco:
        train(model, inner, range(16))
    whole = digest(model)
    model, inner, diloco = make()
    with diloco:
        train(model, inner, range(8))
        weights, saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
    model, inner, diloco = make()
    model.load_state_dict(weights)
    diloco.load_state_dict(saved)
    with diloco:
        train(model, inner, range(8, 16))
    return whole == digest(model), len(saved["open"])


def test_resuming_is_as_never_having_stopped():
    assert run(resumed, world=3) == [(True, 1)] * 3


def refused(rank: int, secure_here: bool, error: type, message: str):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(error, match=message):
        sites.LocalSGD(sites.static(), model, inner, 2, secure=secure_here).__enter__()


def mixed(rank: int):
    refused(rank, rank == 1, errors.MismatchError, "has another .*secure.* than member 0")


def test_two_members_hide_nothing_and_are_refused():
    run(refused, True, errors.InvalidArgumentError, "expected 3 to 18.*min_members=3", world=2)


def test_a_member_without_secure_is_a_typed_error_on_all():
    run(mixed, world=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "median"}, "no single update that a rule could compare; leave aggregate="),
        ({"codec": "topk:density=0.01"}, "cannot be added; leave codec= out"),
        ({"codec": {"*": "adaptive"}}, "cannot be added; leave codec= out"),
        ({"secure": 2}, "True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        sites.LocalSGD(sites.static(), model, inner, 2, **{"secure": True, **options})


def test_joining_with_fewer_than_three_is_refused():
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = sites.join(server, "a", min_members=2)
    with pytest.raises(errors.InvalidArgumentError, match=r"pass min_members=3 to join\(\)"):
        sites.LocalSGD(members, model, inner, 2, secure=True)


def test_an_averager_is_not_secure():
    with pytest.raises(errors.InvalidArgumentError, match="use LocalSGD"):
        sites.PeriodicModelAverager(2, secure=True)


def test_without_cryptography_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(errors.UnavailableError, match=r"pip install thinwire\[secure\]"):
        sites.LocalSGD(sites.static(), model, inner, 2, secure=True)
