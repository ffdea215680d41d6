"""A round's result is applied while its bytes and votes travel, and undone bit for bit if a vote is
missing or differs. None of it is visible before the commit."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import data, loss_of, make_mlp
from ranks import outcomes_of, run
from thinwire import errors
from thinwire.codec import encoded_bytes
from thinwire.torch import sites
from thinwire.torch.sites import updates as wire
from thinwire.torch.sites.fragments import Fragment
from thinwire.torch.sites.meeting import Gather, Meeting
from thinwire.torch.sites.rounds import Rounds
from thinwire.torch.sites.state import pack
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

WIDTH = 64

OUTERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


class Homemade(torch.optim.SGD):
    """A user's own optimizer, which may keep its state anywhere."""


def bits_of(fragment: Fragment) -> bytes:
    parameters = {name: p.detach() for name, p in fragment.parameters.items()}
    return pack([parameters, fragment.anchor, fragment.outer.state_dict()])


def fragment_of(make_outer) -> Fragment:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 3))
    fragment = Fragment(0, model, "int4", make_outer(model.parameters()))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape))
    return fragment


def update_of(fragment: Fragment) -> dict[str, torch.Tensor]:
    return {name: torch.randn(p.numel()) for name, p in fragment.parameters.items()}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_is_taken_back_bit_for_bit(outer, steps_before):
    fragment, again = fragment_of(OUTERS[outer]), fragment_of(OUTERS[outer])
    for number in range(steps_before):
        for each in (fragment, again):
            torch.manual_seed(number)
            each.step(update_of(each))
    before = bits_of(fragment)
    assert fragment.keep()
    torch.manual_seed(7)
    fragment.step(update_of(fragment))
    assert bits_of(fragment) != before
    fragment.restore()
    assert bits_of(fragment) == before == bits_of(again)
    for each in (fragment, again):
        torch.manual_seed(8)
        each.step(update_of(each))
    assert bits_of(fragment) == bits_of(again)


@pytest.mark.parametrize("outer", OUTERS)
def test_steps_of_some_parameters_make_the_bits_of_one_step(outer):
    whole, parts = fragment_of(OUTERS[outer]), fragment_of(OUTERS[outer])
    for number in range(3):
        torch.manual_seed(number)
        update = update_of(whole)
        assert whole.keep()
        assert parts.keep()
        whole.step(update)
        names = list(update)
        for some in (names[2:3], names[:1], names[1:2] + names[3:]):
            parts.step({name: update[name] for name in some})
        assert bits_of(whole) == bits_of(parts)
    parts.restore()
    whole.restore()
    assert bits_of(whole) == bits_of(parts)


def test_steps_that_somebody_watches_wait_for_the_votes():
    assert fragment_of(OUTERS["sgd"]).keep()
    assert not fragment_of(lambda p: Homemade(p, lr=0.7)).keep()
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        fragment = fragment_of(OUTERS["sgd"])
        handle = getattr(fragment.outer, register)(lambda *_: None)
        assert not fragment.keep()
        handle.remove()
        assert fragment.keep()
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert not fragment.keep()
        handle.remove()
        assert fragment.keep()


def shown(diloco, model) -> bytes:
    """Return everything that a failed round must leave unchanged."""
    saved = diloco.state_dict()
    parts = [saved[key] for key in ("anchors", "residuals", "outer", "before", "rounds")]
    return pack([{n: p.detach() for n, p in model.named_parameters()}, *parts])


def disagrees(rank: int, outer: str, alpha, rounds_before: int, takes_back: bool):
    """Member 1 votes for another result. Return whether the result had been applied at the vote,
    whether anything of it is left afterwards, and the number of rounds."""
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    tell, apply_ahead, seen = Meeting.tell, sites.DiLoCo.apply_ahead, []
    diloco = sites.DiLoCo(
        sites.static(), [model], inner, OUTERS[outer](model.parameters()), 1 << 20,
        fragment_update_alpha=alpha,
    )  # fmt: skip
    with pytest.raises(errors.MismatchError, match="made another result"), diloco:
        for number in range(rounds_before + 1):
            inner.zero_grad()
            loss_of(model, data(number, rank, WIDTH)).backward()
            inner.step()
            if number < rounds_before:
                diloco.sync()

        def lies(meeting, name, mine, *rest):
            return tell(meeting, name, bytes([mine[0] ^ 1]) + mine[1:], *rest)

        def watched(self, one, result):
            apply_ahead(self, one, result)
            seen.append(shown(self, model))

        if rank == 1:
            Meeting.tell = lies
        if not takes_back:
            sites.DiLoCo.take_back = lambda _: None
        sites.DiLoCo.apply_ahead = watched
        before = shown(diloco, model)
        diloco.sync()
    return bool(seen) and seen[-1] != before, shown(diloco, model) != before, diloco.rounds


@pytest.mark.parametrize(
    ("outer", "alpha", "rounds_before"),
    [("sgd", 0.0, 0), ("sgd", 0.5, 2), ("adam", "rebase", 0), ("adam", 0.0, 1)],
)
def test_after_a_vote_that_fails_all_is_as_before(outer, alpha, rounds_before):
    for applied, left, rounds in run(disagrees, outer, alpha, rounds_before, True):
        assert applied
        assert not left
        assert rounds == rounds_before


def test_that_comparison_sees_what_is_not_taken_back():
    for applied, left, _ in run(disagrees, "sgd", 0.0, 1, False):
        assert applied
        assert left


def fails_in_the_last_chunk(_rank: int, fails: bool, takes_back: bool):
    """Return what was applied in each call, and whether anything of it is left afterwards."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = OUTERS["sgd"](model.parameters())
    mean_chunk, apply_ahead = wire.UpdateCodec.mean_chunk, sites.DiLoCo.apply_ahead
    seen, ending = [], pytest.raises(errors.Error, match="no more") if fails else nullcontext()
    diloco = sites.DiLoCo(sites.static(), [model], inner, outer, 1 << 20, weight=1.0)
    with ending, diloco:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape))

        def at_last(codec, rows, parts, *rest):
            if parts == codec.chunks[-1] and fails:
                raise errors.Error("no more")
            mean_chunk(codec, rows, parts, *rest)

        def watched(self, one, result):
            apply_ahead(self, one, result)
            seen.append(list(result))

        Gather.is_there = lambda _: False
        wire.UpdateCodec.mean_chunk = at_last
        sites.DiLoCo.apply_ahead = watched
        if not takes_back:
            sites.DiLoCo.take_back = lambda _: None
        before = shown(diloco, model)
        diloco.sync()
    return seen, shown(diloco, model) != before


@pytest.mark.parametrize("takes_back", [True, False])
def test_what_was_applied_before_the_last_chunk_is_taken_back(takes_back):
    for seen, left in run(fails_in_the_last_chunk, True, takes_back):
        assert 1 <= len(seen) <= 3
        assert left is not takes_back


def test_each_parameter_is_applied_once():
    for seen, left in run(fails_in_the_last_chunk, False, True):
        assert sorted(name for names in seen for name in names) == [
            f"{number}.weight" for number in range(4)
        ]
        assert len(seen) >= 2
        assert left


def dies_before_its_vote(rank: int, address: str, folder: str, alpha):
    """Member 1 of three dies after the others have applied the round and wait for its vote."""
    store = dist.TCPStore("127.0.0.1", int(address), is_master=False)
    model = make_mlp(seed=rank, width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = OUTERS["sgd"](model.parameters())
    members = sites.join(store, f"site {rank}", min_members=2, timeout_s=120, dead_s=8.0)
    apply_ahead, take_back = sites.DiLoCo.apply_ahead, sites.DiLoCo.take_back
    launch, before, taken_back, steps = Rounds._launch, [], [], 0

    def waits_and_dies(meeting, name, mine, *_):
        while not all(Path(folder, str(other)).exists() for other in (0, 2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def launched(self, one, *pieces):
        launch(self, one, *pieces)
        before.append(shown(diloco, model))

    def applied(self, one, result):
        apply_ahead(self, one, result)
        assert shown(self, model) != before[-1]
        Path(folder, str(rank)).touch()

    def took(self):
        take_back(self)
        taken_back.append(shown(self, model) == before[-1])

    with sites.DiLoCo(
        members, [model], inner, outer, 2, codec="int4", fragment_update_alpha=alpha
    ) as diloco:

        def step():
            inner.zero_grad()
            loss_of(model, data(steps, rank, WIDTH)).backward()
            inner.step()

        while not diloco.reports or len(diloco.reports[-1].members) != 3:
            step()
            steps += 1
        if rank == 1:
            Meeting.tell = waits_and_dies
        else:
            Rounds._launch, sites.DiLoCo.apply_ahead = launched, applied
            sites.DiLoCo.take_back = took
        while len(diloco.reports[-1].members) != 2:
            step()
            steps += 1
        for _ in range(4):
            step()
            steps += 1
        counted = sum(r.weights[r.members.index(f"site {rank}")] for r in diloco.reports)
        numbers = [r.number for r in diloco.reports]
        digests = {r.number: r.digest for r in diloco.reports}
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        return taken_back, counted, steps, diloco.dump(), digests


@pytest.mark.parametrize("alpha", [0.0, "rebase"])
def test_survivors_take_back_what_a_killed_member_did_not_vote_for(tmp_path, alpha):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = outcomes_of(dies_before_its_vote, str(server.port), str(tmp_path), alpha, world=3)
    assert outcomes[1].exit_code == -signal.SIGKILL
    kept = []
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].trace
        taken_back, counted, steps, *_ = outcomes[rank].value
        assert taken_back
        assert all(taken_back)
        assert counted == steps
        kept.append(outcomes[rank].value)
    assert kept[0][3] == kept[1][3]
    common = kept[0][4].keys() & kept[1][4].keys()
    assert len(common) > 2
    assert all(kept[0][4][number] == kept[1][4][number] for number in common)


def codec_of(sizes: dict[str, int]) -> wire.UpdateCodec:
    module = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(torch.zeros(s)) for n, s in sizes.items()}
    )
    fragment = Fragment(0, module, "int4", torch.optim.SGD(module.parameters(), lr=1.0))
    return fragment.codec


def test_chunks_end_with_small_ones():
    """Nothing travels while the last chunk is processed."""
    codec = codec_of({"a": 3_000_000, "b": 100, "c": 2_000_000})
    assert [at for chunk in codec.chunks for at in chunk] == list(range(len(codec.parts)))
    lengths = [
        sum(encoded_bytes(codec.parts[at].up, codec.parts[at].end - codec.parts[at].begin)
            for at in chunk)
        for chunk in codec.chunks
    ]  # fmt: skip
    assert codec.size - 4 < sum(lengths) <= codec.size
    part = encoded_bytes("int4", 32768)
    assert max(lengths) <= codec.size / 8 + part
    assert lengths[-1] <= max(lengths) / 8 + part


def test_the_first_chunk_is_encoded_before_the_rest_is_computed():
    codec = codec_of({"a": 3_000_000, "b": 2_000_000})
    asked = []

    def update(name, begin, end):
        asked.append(end - begin)
        return torch.ones(end - begin)

    zeros = {name: torch.zeros(size) for name, size in codec.sizes.items()}
    lost: dict[str, torch.Tensor] = {}
    chunks = codec.cut(codec.encode(update, zeros, 1.0, lost))
    next(chunks)
    assert sum(asked) <= 5_000_000 / 8 + 2 * 32768
    assert list(lost) == ["a"]
    for _ in chunks:
        pass
    assert sum(asked) == 5_000_000
    assert {name: values.numel() for name, values in lost.items()} == codec.sizes


def starts_of(rank: int) -> list[tuple[str, int]]:
    """Return the exchanges of a round's update in the order of their start, with their bytes."""
    start, started = Meeting.start, []

    def noted(self, name, mine):
        started.append((name, sum(map(len, mine))))
        return start(self, name, mine)

    model = torch.nn.Linear(512, 10240, bias=False)  # 2.6 MB in int4
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with sites.DiLoCo(sites.static(), [model], inner, outer, 1 << 20, codec="int4") as diloco:
        Meeting.start = noted
        diloco.sync()
        Meeting.start = start
    return [(name, size) for name, size in started if name.startswith("round")]


def test_a_message_is_announced_before_the_pieces_that_leave_at_once():
    """Otherwise its receiver's notice would wait behind the pieces, and the link would be idle
    until it arrived."""
    started = run(starts_of)[0]
    large = [at for at, (_, size) in enumerate(started) if size > 16 << 10]
    assert sum(size for _, size in started[: large[0]]) < 64 << 10
    pieces = started[large[0] + 1 : large[1]]
    assert sum(size for _, size in pieces) > 128 << 10
    assert started[large[0]][1] > sum(size for _, size in pieces)
