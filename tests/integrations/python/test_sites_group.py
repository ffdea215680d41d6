"""Sites of several ranks: each is one member, equals a single-rank site with the same batch, has
the same bits on all ranks after each round, and raises typed errors if it loses a rank."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import data, digest, loss_of, make_mlp
from ranks import outcomes_of, run
from test_sites_members import join
from thinwire import errors
from thinwire.torch import sites
from thinwire.torch.sites.meeting import Meeting
from thinwire.torch.sites.site import Site
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64
SITE = 2  # ranks per site


class Groups:
    """Splits the world's ranks into sites of SITE neighbours."""

    def __init__(self, rank: int, **options) -> None:
        world = dist.get_world_size()
        firsts = range(0, world, SITE)
        groups = [dist.new_group(list(range(at, at + SITE)), **options) for at in firsts]
        self.site = groups[rank // SITE]
        self.firsts = dist.new_group(list(firsts))
        self.number, self.leads = rank // SITE, rank % SITE == 0


def seen(model: torch.nn.Module, group) -> bool:
    """Return whether all ranks of the group have the same bits of the model."""
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, digest(model), group=group)
    return len(set(told)) == 1


def make(members, options: dict, seed: int = 7):
    model = make_mlp(seed=seed, width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    parts = [model[0], model[2:]] if options.pop("parts", 1) == 2 else [model]
    every = options.pop("sync_every", 4)
    return model, inner, sites.DiLoCo(members, parts, inner, outer, every, **options)


def step(model, inner, number: int, ranks) -> None:
    """model: a DDP model, or one that sees the batches of several ranks."""
    inner.zero_grad()
    loss_of(model, torch.cat([data(number, rank, WIDTH) for rank in ranks])).backward()
    inner.step()


def beside_single_ranks(rank: int, options: dict):
    groups = Groups(rank)
    model, inner, diloco = make(
        sites.static(groups.firsts), {**options, "site_group": groups.site}, seed=7 + rank
    )  # all begin with rank 0's model
    alike = []
    with diloco:
        ddp = DistributedDataParallel(model, process_group=groups.site)
        for number in range(20):
            step(ddp, inner, number, [rank])
            alike.append(seen(model, groups.site))
        counted = diloco.rounds, diloco.stats()["steps_between"]
    alike.append(seen(model, groups.site))
    worst = 0.0
    if groups.leads:
        single, inner, diloco = make(sites.static(groups.firsts), dict(options))
        with diloco:
            for number in range(20):
                step(single, inner, number, [rank, rank + 1])
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        worst = max((a - b).abs().max().item() for a, b in pairs)
    return all(alike), worst, counted, digest(model)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "fp32"},
        {"codec": "fp32", "prox": 0.1},
        {"codec": "fp32", "parts": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
        {"codec": "fp32", "fragment_sync_delay": 3, "fragment_update_alpha": "rebase",
         "prox": 0.1},
    ],
    ids=["plain", "prox", "streamed", "rebase"],
)  # fmt: skip
def test_two_sites_of_two_ranks_are_two_members_with_larger_batches(options):
    results = run(beside_single_ranks, options, world=4)
    for alike, worst, counted, _ in results:
        assert alike
        assert worst < 1e-6
        assert counted == results[0][2]
    assert counted[0] == 5 * options.get("parts", 1)
    if "fragment_sync_delay" not in options:  # with a delay, sites make extra steps of their own
        assert len({bits for *_, bits in results}) == 1


def by_the_clock(rank: int):
    groups = Groups(rank)
    every = datetime.timedelta(milliseconds=20)
    model, inner, diloco = make(
        sites.static(groups.firsts), {"site_group": groups.site, "sync_every": every}
    )
    with diloco:
        ddp = DistributedDataParallel(model, process_group=groups.site)
        number = 0
        # A site's ranks make the same number of steps, and each site makes as many as it can.
        while diloco.rounds < 4:
            diloco.saw(rank + 1)
            step(ddp, inner, number, [rank])
            number += 1
        weights = [report.weights for report in diloco.reports]
    return number, weights, digest(model)


def test_rounds_by_the_clock_count_what_all_ranks_of_a_site_saw():
    results = run(by_the_clock, world=4)
    assert len({bits for *_, bits in results}) == 1
    for rank, (number, weights, _) in enumerate(results):
        assert number == results[rank - rank % SITE][0]
        if rank % SITE == 0:
            counted = sum(each[rank // SITE] for each in weights)
            assert counted == number * (rank + 1 + rank + 2)


def resumed(rank: int, delay: int, alpha, first_only: bool):
    """Train 20 steps; and 8 steps, a checkpoint, and the other 12 in another object."""
    groups = Groups(rank)

    def fresh():
        options = {
            "site_group": groups.site, "fragment_sync_delay": delay, "parts": 2,
            "fragment_update_alpha": alpha, "sync_every": 6,
        }  # fmt: skip
        return make(sites.static(groups.firsts), options)

    def train(model, inner, first, last):
        ddp = DistributedDataParallel(model, process_group=groups.site)
        for number in range(first, last):
            step(ddp, inner, number, [rank])

    model, inner, diloco = fresh()
    with diloco:
        train(model, inner, 0, 20)
    whole = digest(model)
    model, inner, diloco = fresh()
    with diloco:
        train(model, inner, 0, 8)
        saved = copy.deepcopy((model.state_dict(), inner.state_dict(), diloco.state_dict()))
    if first_only:
        told = [None] * SITE
        dist.all_gather_object(told, saved, group=groups.site)
        saved = told[0]
    model, inner, diloco = fresh()
    model.load_state_dict(saved[0])
    inner.load_state_dict(saved[1])
    diloco.load_state_dict(saved[2])
    with diloco:
        train(model, inner, 8, 20)
    return whole == digest(model)


@pytest.mark.parametrize(
    ("delay", "alpha", "first_only"), [(0, 0.0, True), (2, 0.5, False), (4, "rebase", True)]
)
def test_a_site_that_resumes_is_as_never_having_stopped(delay, alpha, first_only):
    assert run(resumed, delay, alpha, first_only, world=4) == [True] * 4


def counts_on_some(rank: int, who: tuple[int, ...], weight: float | None):
    """A site of three ranks and a site of one rank, in which only the ranks `who` call saw()."""
    site, alone = dist.new_group([0, 1, 2]), dist.new_group([3])
    firsts = dist.new_group([0, 3])
    options = {"site_group": site if rank < 3 else alone, "sync_every": 2, "weight": weight}
    model, inner, diloco = make(sites.static(firsts), {**options, "timeout_s": 100})
    with diloco:
        for number in range(2):
            if rank in who:
                diloco.saw(8)
            step(model, inner, number, [0])  # equal batches, so equal weights within a site
    return diloco.rounds


@pytest.mark.parametrize(
    ("who", "saw", "other"), [((0, 2, 3), 0, 1), ((2, 3), 2, 0)], ids=["first", "follower"]
)
def test_ranks_of_a_site_of_which_some_call_saw_are_told(who, saw, other):
    outcomes = outcomes_of(counts_on_some, who, None, world=4)
    words = (
        f"rank {saw} of the site weighs by what it saw() and rank {other} of the site by its steps"
    )
    for outcome in outcomes[:3]:
        assert outcome.error == "MismatchError", outcome.trace
        assert words in outcome.message
    assert outcomes[3].error in {"MismatchError", "PeerLostError"}, outcomes[3].trace


def test_ranks_of_a_site_with_a_constant_weight_may_call_saw():
    assert run(counts_on_some, (0, 2), 1.0, world=4) == [1, 1, 1, 1]


def joined(rank: int, groups: Groups, address: str, **options):
    least = options.pop("min_members", 2)
    members = join(address, f"site {groups.number}", min_members=least, timeout_s=60)
    return make(
        members, {"site_group": groups.site, "timeout_s": 60, "sync_every": 2, **options}, seed=rank
    )


@pytest.fixture
def store():
    """The address of a store where members meet."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses_a_rank(rank: int, address: str, who: int, when: str):
    """Rank `who` of the last of three sites of two ranks dies in the fourth round."""
    groups = Groups(rank)
    model, inner, diloco = joined(rank, groups, address, min_members=3)
    with diloco:
        diloco._rounds._members.min_members = 2  # from here on
        number = 0
        while diloco.rounds < 16:
            if groups.number == 2 and diloco.rounds == 3:
                dies_at(when) if rank % SITE == who else None
            inner.zero_grad()
            loss = loss_of(model, data(number, groups.number, WIDTH))  # equal batches within a site
            loss.backward()
            inner.step()
            number += 1
        reports = [(r.number, r.members, r.digest) for r in diloco.reports]
    return digest(model), reports


def dies_at(when: str) -> None:
    if when == "between rounds":
        die()
    tell, share = Meeting.tell, Site._share
    if when == "in a round":
        Meeting.tell = lambda self, name, *rest: die() if name == "progress" else tell(
            self, name, *rest
        )  # fmt: skip
    if when == "in the broadcast":
        Site._share = lambda self, changed: (time.sleep(0.2), die(), share(self, changed))


@pytest.mark.parametrize("who", [0, 1], ids=["first", "follower"])
@pytest.mark.parametrize("when", ["between rounds", "in a round", "in the broadcast"])
def test_a_lost_rank_takes_its_site_out_and_the_others_go_on(store, who, when):
    outcomes = outcomes_of(loses_a_rank, store, who, when, world=6)
    assert outcomes[4 + who].exit_code == -signal.SIGKILL
    assert outcomes[5 - who].error in {"PeerLostError", "TimeoutError"}, outcomes[5 - who].trace
    kept = [outcomes[rank].value for rank in range(4)]
    assert all(kept), [outcome.trace for outcome in outcomes[:4]]
    assert len({bits for bits, _ in kept}) == 1
    assert kept[0][1] == kept[2][1]
    assert sorted(kept[0][1][-1][1]) == ["site 0", "site 1"]


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def waits_in_a_round(rank: int, address: str, folder: str):
    """Site 1 waits in a round for site 0 when its rank 3 dies. Site 0 leaves once rank 2 has
    learned of that."""
    groups = Groups(rank)
    model, inner, diloco = joined(rank, groups, address, timeout_s=60)
    heard, took = Path(folder) / "heard", 0.0
    try:
        with diloco:
            if groups.number == 0:
                wait_for(heard)
                return took
            if rank == 3:
                tell = Meeting.tell
                Meeting.tell = lambda self, name, *rest: (
                    (time.sleep(1), die()) if name == "progress" else tell(self, name, *rest)
                )
            begun = time.monotonic()
            for number in range(2):
                inner.zero_grad()
                loss_of(model, data(number, 0, WIDTH)).backward()
                inner.step()
    except errors.PeerLostError:
        took = time.monotonic() - begun
    finally:
        if rank == 2:
            heard.touch()
    return took


def test_a_site_that_waits_for_others_hears_at_once_of_a_lost_rank(store, tmp_path):
    outcomes = outcomes_of(waits_in_a_round, store, str(tmp_path), world=4)
    assert outcomes[3].exit_code == -signal.SIGKILL
    assert not outcomes[2].error, outcomes[2].trace
    assert 1 <= outcomes[2].value < 60  # earlier than the round's deadline


def waits_to_meet(rank: int, address: str):
    """The only site waits for a second one when its rank 1 dies."""
    groups = Groups(rank)
    _, _, diloco = joined(rank, groups, address)
    if rank == 1:
        tell = Meeting.tell
        Meeting.tell = lambda self, name, *rest: (
            (time.sleep(1), die()) if name == "progress" else tell(self, name, *rest)
        )
    begun = time.monotonic()
    with pytest.raises(errors.PeerLostError):
        diloco.__enter__()
    return time.monotonic() - begun


def test_a_site_that_waits_for_a_meeting_hears_at_once_of_a_lost_rank(store):
    outcomes = outcomes_of(waits_to_meet, store, world=2)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert not outcomes[0].error, outcomes[0].trace
    assert outcomes[0].value < 60  # earlier than the deadline of a member that waits for others


def joins_later(rank: int, address: str, folder: str):
    groups = Groups(rank)
    model, inner, diloco = joined(rank, groups, address, codec="int4")
    flag = Path(folder) / "now"
    if groups.number == 2:
        wait_for(flag)
    with diloco:
        begins = seen(model, groups.site)
        for number in range(10_000):
            inner.zero_grad()
            loss_of(model, data(number, groups.number, WIDTH)).backward()
            inner.step()
            if rank == 0 and diloco.rounds == 6:
                flag.touch()
            last = diloco.reports[-1] if diloco.reports else None
            done = last is not None and len(last.members) == 3 and last.weights.count(0.0) == 0
            told = torch.tensor(float(done))
            dist.broadcast(told, rank - rank % SITE, group=groups.site)
            if told:
                break
            time.sleep(0.01)
    return begins, digest(model), diloco.rounds


def test_a_whole_site_joins_later(address, tmp_path):
    results = run(joins_later, address, str(tmp_path), world=6)
    assert all(begins for begins, *_ in results)
    assert len({bits for _, bits, _ in results}) == 1
    assert results[4][2] == results[5][2] > 6


def differs(rank: int, what: str):
    groups = Groups(rank)
    options = {"site_group": groups.site, "timeout_s": 5, "sync_every": 2}
    if what == "arguments" and rank == 1:
        options["sync_every"] = 3
    model, inner, diloco = make(sites.static(groups.firsts), options)
    expected = "other parameters than its rank 0" if what == "parameters" else "other fragments"
    with pytest.raises(errors.Error, match=expected if groups.number == 0 else None), diloco:
        for number in range(4):
            # Without DDP: each rank has its own batches in the first site.
            inner.zero_grad()
            loss_of(model, data(number, rank * (rank < 2), WIDTH)).backward()
            inner.step()
    return True


@pytest.mark.parametrize("what", ["parameters", "arguments"])
def test_ranks_of_a_site_that_are_not_alike_are_a_typed_error(what):
    assert all(run(differs, what, world=4))


def raises_inside(rank: int):
    groups = Groups(rank)
    model, inner, diloco = make(
        sites.static(groups.firsts), {"site_group": groups.site, "timeout_s": 10}
    )
    with pytest.raises(ValueError if rank == 3 else errors.Error) as raised, diloco:
        for number in range(20):
            if rank == 3 and number == 6:
                raise ValueError("a broken batch")
            inner.zero_grad()
            loss_of(model, data(number, groups.number, WIDTH)).backward()
            inner.step()
    return str(raised.value)


def test_the_others_are_told_why_a_rank_ends():
    results = run(raises_inside, world=4)
    assert "rank 1 of the site ended on ValueError: a broken batch" in results[2]


def one_name(rank: int, address: str):
    host, _, port = address.partition(":")
    members = sites.join(dist.TCPStore(host, int(port), is_master=False), "basel", timeout_s=100)
    _, _, diloco = make(members, {})
    with pytest.raises(errors.InvalidArgumentError, match="site_group=torch"):
        diloco.__enter__()
    diloco.close()


def test_ranks_of_one_name_are_asked_whether_they_are_a_site(store):
    run(one_name, store)


def stands_still(rank: int, address: str, folder: str):
    """Rank 3 is stopped in a round in which its site waits. Rank 2 wakes it after its own error,
    and then site 0 leaves."""
    groups = Groups(rank)
    model, inner, diloco = joined(rank, groups, address, timeout_s=8)
    pid_file, over = Path(folder) / "pid", Path(folder) / "over"
    begun = 0.0
    try:
        with diloco:
            if groups.number == 0:
                wait_for(over)
                return 0.0
            if rank == 3:
                tell = Meeting.tell

                def stops(meeting, name, *rest):
                    if name == "progress":
                        Meeting.tell = tell
                        Path(folder, "part").write_text(str(os.getpid()))
                        os.rename(Path(folder, "part"), pid_file)
                        os.kill(os.getpid(), signal.SIGSTOP)
                    return tell(meeting, name, *rest)

                Meeting.tell = stops
            begun = time.monotonic()
            for number in range(2):
                inner.zero_grad()
                loss_of(model, data(number, 0, WIDTH)).backward()
                inner.step()
    except errors.Error:
        took = time.monotonic() - begun
        if rank == 2:
            os.kill(int(pid_file.read_text()), signal.SIGCONT)
        return took
    finally:
        if rank == 2:
            over.touch()
    return 0.0


def test_a_site_whose_rank_stands_still_ends_at_the_deadline(store, tmp_path):
    results = run(stands_still, store, str(tmp_path), world=4)
    assert results[2] > 7  # the deadline is 8 s, and site 0 leaves only after the error
    assert results[3] > 0


def secure(rank: int):
    groups = Groups(rank)
    model, inner, diloco = make(
        sites.static(groups.firsts), {"site_group": groups.site, "secure": True}, seed=rank
    )
    with diloco:
        ddp = DistributedDataParallel(model, process_group=groups.site)
        for number in range(8):
            step(ddp, inner, number, [rank])
    return digest(model)


def test_sites_of_several_ranks_take_secure_sums():
    pytest.importorskip("cryptography")
    assert len(set(run(secure, world=6))) == 1


def channels_last(rank: int):
    groups = Groups(rank)
    torch.manual_seed(rank)
    model = torch.nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with sites.LocalSGD(
        sites.static(groups.firsts), model, inner, 1, prox=0.1, site_group=groups.site
    ):
        for number in range(2):
            torch.manual_seed(number)
            inner.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            inner.step()
    return digest(model)


def test_parameters_in_channels_last_are_handed_over():
    assert len(set(run(channels_last, world=4))) == 1
