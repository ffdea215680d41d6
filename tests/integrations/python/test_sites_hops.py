"""Rounds of more than eight members take two hops: fewer bytes, the same bits on all members, and
nothing that compression loses is lost for good."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire.codec import codec_info, encoded_bytes
from thinwire.torch import sites, tensors
from thinwire.torch.sites import updates as wire
from thinwire.torch.sites.meeting import Meeting
from thinwire.torch.sites.updates import UpdateCodec, mean

MEMBERS = 9
ROWS, COLUMNS = 576, 512  # 9 parts of 32,768 elements


def codec_of(spec, sizes) -> UpdateCodec:
    module = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in sizes.items()}
    )
    return UpdateCodec(spec, sizes, tensors.structure_of(module))


def part_of(update):
    return lambda name, begin, end: update[name][begin:end]


def zeros_like(update):
    return {name: torch.zeros_like(values) for name, values in update.items()}


@pytest.mark.parametrize("spec", ["fp32", "int4", "int8:down=int4", "adaptive"])
@pytest.mark.parametrize("members", [2, 9, 13, 40])
def test_owners_make_the_result_of_all(spec, members):
    """Send slices to owners and their results to all members, without a network."""
    sizes = {"bias": 10, "weight": 300_000, "norm": 63, "head": 70_001}
    codec = codec_of({"*": spec}, sizes)
    parts = [at for owner in range(members) for at in codec.owned(owner, members)]
    assert parts == list(range(len(codec.parts)))
    generator = torch.Generator().manual_seed(3)
    updates = [
        {name: torch.randn(numel, generator=generator) for name, numel in sizes.items()}
        for _ in range(3)
    ]
    slices, decoded = [], []
    for update in updates:
        pieces = [*codec.encode(part_of(update), zeros_like(update), 1.0, {})]
        slices.append(codec.slices(pieces, members))
        decoded.append(codec.decode(memoryview(b"".join(pieces))))
    expected = mean(decoded, [1.0, 2.0, 3.0], {})
    rows, lost = [], {}
    for owner in range(members):
        own = codec.owned(owner, members)
        heard = [codec.decode_owned(memoryview(each[owner]), own) for each in slices]
        row, missing = codec.encode_result(mean(heard, [1.0, 2.0, 3.0], {}), members)
        rows.append(memoryview(row))
        lost.update(missing)
    assert len({len(row) for row in rows}) == 1
    result, owed = codec.decode_results(rows), codec.owed(lost, 1.0)
    for name, values in expected.items():
        assert torch.allclose(result[name] + owed[name], values, atol=1e-5)
    if spec == "fp32":
        assert all(torch.equal(result[name], values) for name, values in expected.items())


def rounds_of(rank: int, codec: str, count: int):
    """Return what rounds do with one made-up update per member, which is the same in each round."""
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    torch.manual_seed(5 + rank)
    change = torch.randn(ROWS, COLUMNS)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with sites.LocalSGD(sites.static(), model, inner, 1, codec=codec) as local:
        for _ in range(count):
            model.weight.grad = -change
            inner.step()
        report, sent = local.reports[-1], local.stats()["sent_bytes"]
        residual = local.state_dict()["residuals"][0]["weight"].view(ROWS, COLUMNS)
    # LocalSGD's outer gradients are anchor minus parameters; residuals have the same sign.
    missing = -residual / dist.get_world_size()
    dist.all_reduce(missing)
    dist.all_reduce(change)
    wanted = count * change / dist.get_world_size()
    off = (model.weight.detach() + missing - wanted).abs().max().item()
    rough = (model.weight.detach() / count - wanted / count).abs().max().item()
    return digest(model), off, rough, sent / count, report


@pytest.mark.parametrize("codec", ["int4", "int8:down=adaptive"])
def test_two_hops_send_what_the_formula_says_and_lose_nothing(codec):
    count = 6
    results = run(rounds_of, codec, count, world=MEMBERS)
    assert len({bits for bits, *_ in results}) == 1
    numel, info = ROWS * COLUMNS, codec_info(codec)
    hops = encoded_bytes(info.up, numel) + encoded_bytes(info.down, numel)
    expected = (MEMBERS - 1) / MEMBERS * hops
    for _, off, rough, sent, report in results:
        assert off < 1e-4  # with the residuals that are not sent yet, the sum is exact
        assert rough < 1.5
        assert abs(sent - expected) < 0.02 * expected + 4000  # headers and votes
        assert report.norms == report.cosines == ()
        assert report.weights == (1.0,) * MEMBERS


def entries(rank: int):
    """Train with topk, and with an aggregation that tolerates poisoners."""
    model = make_mlp(width=64)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for options in ({"codec": "topk:density=0.05"}, {"aggregate": "median"}):
        with sites.LocalSGD(sites.static(), model, inner, 1, **options) as local:
            inner.zero_grad()
            loss_of(model, data(0, rank, 64)).backward()
            inner.step()
            found.append(len(local.reports[-1].norms))
    return digest(model), found


def test_entries_and_rules_against_poisoners_stay_with_one_hop():
    results = run(entries, world=MEMBERS)
    assert len({bits for bits, _ in results}) == 1
    assert all(found == [MEMBERS, MEMBERS] for _, found in results)


_start = Meeting.start


def dies_with_results(meeting, name, mine):
    if name.startswith("results"):
        os.kill(os.getpid(), signal.SIGKILL)
    return _start(meeting, name, mine)


def killed_as_owner(rank: int, address: str):
    """Member 4 of nine dies before it sends its part of the result. The other eight
    complete the round in one hop, with the bytes that they have already encoded."""
    host, _, port = address.partition(":")
    members = sites.join(
        dist.TCPStore(host, int(port), is_master=False), f"site {rank}", min_members=MEMBERS,
        timeout_s=100, dead_s=8.0,
    )  # fmt: skip
    model = make_mlp(seed=rank, width=192)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with sites.LocalSGD(members, model, inner, 2, codec="int4") as local:
        members.min_members = 2
        while local.rounds < 8:
            if rank == 4 and local.rounds == 3:
                Meeting.start = dies_with_results
            inner.zero_grad()
            loss_of(model, data(steps, rank, 192)).backward()
            inner.step()
            steps += 1
        reports = [(r.number, r.members, r.digest) for r in local.reports]
        counted = sum(r.weights[r.members.index(f"site {rank}")] for r in local.reports)
    return digest(model), reports, counted == steps


def test_a_round_whose_owner_dies_is_made_by_the_others():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = outcomes_of(killed_as_owner, f"127.0.0.1:{server.port}", world=MEMBERS)
    assert outcomes[4].exit_code == -signal.SIGKILL
    kept = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 4]
    assert all(kept), [outcome.trace for outcome in outcomes]
    assert len({bits for bits, *_ in kept}) == 1
    assert all(reports == kept[0][1] for _, reports, _ in kept)
    assert [len(members) for _, members, _ in kept[0][1]] == [9] * 3 + [8] * 5
    assert all(counted for *_, counted in kept)


def ninth_comes(rank: int, address: str, folder: str):
    """Eight members stream two fragments. The ninth joins, and owns a part of rounds to which it
    contributes nothing."""
    host, _, port = address.partition(":")
    flag = Path(folder) / "now"
    members = sites.join(
        dist.TCPStore(host, int(port), is_master=False), f"site {rank}", min_members=8,
        timeout_s=100, dead_s=20.0,
    )  # fmt: skip
    model = make_mlp(seed=rank, width=192)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = sites.DiLoCo(
        members, [model[0], model[2:]], inner, outer, 4, codec="int4", fragment_sync_delay=3
    )
    while rank == 8 and not flag.exists():
        time.sleep(0.01)
    with diloco:
        steps = 0
        while not (
            diloco.reports
            and len(diloco.reports[-1].members) == 9
            and 0.0 not in diloco.reports[-1].weights
        ):
            if rank == 0 and diloco.rounds == 3:
                flag.touch()
            inner.zero_grad()
            loss_of(model, data(steps, rank, 192)).backward()
            inner.step()
            steps += 1
            time.sleep(0.01)
        diloco.sync()
        bits = diloco.dump()
        found = [(r.number, r.members, r.weights, r.digest) for r in diloco.reports]
    return bits, found


def test_a_ninth_member_owns_a_part_at_once(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run(ninth_comes, f"127.0.0.1:{server.port}", str(tmp_path), world=MEMBERS)
    assert len({bits for bits, _ in results}) == 1
    last = results[8][1]
    assert all(found[-len(last) :] == last for _, found in results)
    silent = [weights[names.index("site 8")] == 0 for _, names, weights, _ in last]
    assert silent[0] and not silent[-1]


def in_chunks(rank: int, aggregate: str):
    """Train rounds of a model that travels in several chunks, and in one chunk."""
    results = []
    for least in (1 << 12, 1 << 30):
        wire._CHUNK_BYTES = least
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 250))
        torch.manual_seed(5)
        for p in model.parameters():
            torch.nn.init.normal_(p)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with sites.DiLoCo(
            sites.static(), [model], inner, outer, 1 << 20, codec="int4", aggregate=aggregate
        ) as diloco:
            for number in range(3):
                torch.manual_seed(10 * number + rank)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn(p.shape), alpha=0.01)
                inner.step()
                diloco.sync()
            chunks = len(diloco._fragments[0].codec.chunks)
            reports = [(r.digest, r.norms, r.cosines) for r in diloco.reports]
        results.append((chunks, [p.detach().clone() for p in model.parameters()], reports))
    return results


@pytest.mark.parametrize("aggregate", ["mean", "centered_clip"])
def test_chunks_change_no_bit(aggregate):
    for (many, a, reports), (one, b, others) in run(in_chunks, aggregate, world=3):
        assert many > 4 > one == 1
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        # The padding between chunks differs, and so do the digests of the bytes.
        for mine, other in zip(reports, others, strict=True):
            assert mine[1] == pytest.approx(other[1], rel=1e-4)
            assert mine[2] == pytest.approx(other[2], abs=1.1e-3)
