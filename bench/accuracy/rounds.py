"""Training between sites in one process: members with separate models and optimizers make local
steps in turn, and rounds of thinwire.torch.sites over loopback."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from thinwire.torch import sites
from thinwire.torch.group import Group, count_user
from thinwire.torch.sites.meeting import Epoch

from bench.accuracy.tasks import Task, evaluate, loss_of
from bench.accuracy.training import make_optimizers, row_of

Outer = tuple[float, float]  # rate and Nesterov momentum of the outer SGD
AVERAGE: tuple[Outer, ...] = ((1.0, 0.0),)
DILOCO: tuple[Outer, ...] = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.9))

_LEAST_ROWS = 64  # rows of a member, at least, in a split by labels
_NEVER = 1 << 30  # steps between rounds, so that rounds happen only on request
_STRENGTH = 10.0  # of attacks, in norms of an honest update
_LITTLE = 1.5  # standard deviations of the attack `little`
_serial = itertools.count()


@dataclass(frozen=True)
class RoundMethod:
    """A way of training between sites. outers: the first one is tried at all rates, and the others
    at its best rate. against: the method whose paired runs it is compared with. attack: what the
    last member sends in place of its update; `absent`: the member and its rows are missing."""

    name: str
    codec: str
    against: str
    outers: tuple[Outer, ...] = AVERAGE
    local_steps: int = 32
    decay: float = 1.0
    aggregate: str = "mean"
    attack: str | None = None

    def recipe(self) -> dict[str, Any]:
        return {
            "codec": self.codec, "local_steps": self.local_steps, "decay": self.decay,
            "aggregate": self.aggregate, "attack": self.attack,
        }  # fmt: skip


_CODECS = {"fp32": "fp32", "int4": "int4", "adaptive 2": "adaptive",
           "adaptive 0.5": "adaptive:bits=0.5"}  # fmt: skip

METHODS = {
    method.name: method
    for method in (
        *(
            RoundMethod(f"DiLoCo {name}", codec, "fp32" if codec == "fp32" else "DiLoCo fp32",
                        DILOCO)
            for name, codec in _CODECS.items()
        ),
        # arXiv 2508.15706: feedback with decay in place of an outer momentum.
        RoundMethod("SparseLoCo", "topk:density=0.0156", "DiLoCo fp32",
                    ((1.0, 0.0), (0.7, 0.0)), decay=0.95),
        # Four times as many rounds, for codecs that send little in each.
        RoundMethod("DiLoCo fp32 H 8", "fp32", "DiLoCo fp32", DILOCO, local_steps=8),
        RoundMethod("DiLoCo adaptive 0.5 H 8", "adaptive:bits=0.5", "DiLoCo fp32 H 8", DILOCO,
                    local_steps=8),
        RoundMethod("SparseLoCo H 8", "topk:density=0.0156", "DiLoCo fp32 H 8",
                    ((1.0, 0.0), (0.7, 0.0)), local_steps=8, decay=0.95),
        *(RoundMethod(f"FedAvg {name}", codec, "FedAvg fp32") for name, codec in _CODECS.items()),
        *(
            RoundMethod(f"{rule} {attack or 'clean'}", "int4", "mean clean", aggregate=rule,
                        attack=attack)
            for rule in ("mean", "centered_clip", "trimmed", "median")
            for attack in (None, "sign", "noise", "little")
        ),
        # The best that a rule can reach without the poisoner's rows.
        RoundMethod("mean absent", "int4", "mean clean", attack="absent"),
    )
}  # fmt: skip


class _Members:
    """Fixed members in one process, as DiLoCo takes them as `members`."""

    key_file = None

    def __init__(self, rank: int, size: int, key: str, store: dist.Store) -> None:
        group = Group(rank, size, key, count_user(), store, timeout_s=120)
        self._epoch = Epoch(0, group, tuple(f"member {r}" for r in range(size)))

    def meet(self, why: Exception | None) -> Epoch:
        if why is not None:
            raise why
        return self._epoch

    def wants_change(self) -> bool:
        return False

    def guard(self, *_: object) -> None: ...

    def close(self) -> None: ...


def split_of(task: Task, members: int, seed: int) -> list[torch.Tensor]:
    """Return the rows of each member. With task.dirichlet each label's rows are divided among
    members by shares drawn from a Dirichlet distribution (Hsu et al., arXiv 1909.06335), repeatedly
    until every member has enough rows."""
    generator = torch.Generator().manual_seed(7000 + seed)
    order = torch.randperm(task.data.train_size, generator=generator)
    if task.dirichlet is None:
        return list(order.chunk(members))
    labels = task.data.batch(order)[1]
    with torch.random.fork_rng():
        torch.manual_seed(7000 + seed)  # torch's Dirichlet takes no generator
        shares_of = torch.distributions.Dirichlet(torch.full((members,), task.dirichlet))
        while True:
            parts: list[list[torch.Tensor]] = [[] for _ in range(members)]
            for label in labels.unique():
                rows = order[labels == label]
                ends = (shares_of.sample().cumsum(0)[:-1] * len(rows)).long()
                for part, mine in zip(parts, rows.tensor_split(ends), strict=True):
                    part.append(mine)
            found = [torch.cat(part) for part in parts]
            if min(map(len, found)) >= _LEAST_ROWS:
                return found


def _batches(rows: torch.Tensor, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches without end, epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        mine = rows[torch.randperm(len(rows), generator=generator)]
        yield from mine.split(batch)[: max(1, len(rows) // batch)]


class _Member:
    def __init__(self, task: Task, method: RoundMethod, outer: Outer, rows: torch.Tensor, seed: int,
                 rank: int, members: _Members) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.task, self.model = task, task.make_model()
        self.parameters = list(self.model.parameters())
        (self.inner,) = make_optimizers(task, dict(self.model.named_parameters()), task.momentum)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, task.rate_factor)
        rate, momentum = outer
        self.diloco = sites.DiLoCo(
            members, [self.model], self.inner,
            torch.optim.SGD(self.parameters, lr=rate, momentum=momentum, nesterov=momentum > 0),
            _NEVER, codec=method.codec, decay=method.decay, aggregate=method.aggregate,
            weight=float(len(rows)),
        )  # fmt: skip
        self.batches = _batches(rows, task.batch, 1000 * seed + rank)

    def step(self) -> float:
        self.inner.zero_grad()
        loss = loss_of(self.model, self.task.data.batch(next(self.batches)))
        loss.backward()
        self.inner.step()
        self.schedule.step()
        return loss.item()

    def values(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.parameters).detach().clone()


def _poison(attack: str, members: list[_Member], anchor: torch.Tensor, seed: int) -> None:
    """Give the last member parameters that make its update the attack's. `sign`: its own update
    times -10; `noise`: random, of the same length; `little`: the honest members' mean minus 1.5 of
    their standard deviations in each element ("A Little Is Enough", arXiv 1902.06156)."""
    bad = members[-1]
    learned = bad.values() - anchor
    if attack == "sign":
        learned *= -_STRENGTH
    elif attack == "noise":
        noise = torch.randn(learned.shape, generator=torch.Generator().manual_seed(seed))
        learned = noise * (_STRENGTH * learned.norm() / noise.norm())
    else:
        honest = torch.stack([one.values() - anchor for one in members[:-1]])
        learned = honest.mean(0) - _LITTLE * honest.std(0)
    torch.nn.utils.vector_to_parameters(anchor + learned, bad.parameters)


def train(task: Task, method: RoundMethod, outer: Outer, seed: int, workers: int,
          split: str) -> dict[str, Any]:  # fmt: skip
    """Train from the seed. Return the run's row, as training.train() does."""
    start, store, key = time.monotonic(), dist.HashStore(), f"sites{next(_serial)}"
    parts = split_of(task, workers, seed)
    if method.attack == "absent":
        parts, workers = parts[:-1], workers - 1
    members = [
        _Member(task, method, outer, part, seed, rank, _Members(rank, workers, key, store))
        for rank, part in enumerate(parts)
    ]
    losses = []
    with ThreadPoolExecutor(workers) as pool, contextlib.ExitStack() as stack:
        list(pool.map(lambda one: one.diloco.__enter__(), members))
        stack.callback(lambda: list(pool.map(lambda one: one.diloco.close(), members)))
        anchor = members[0].values()
        for step in range(1, task.steps + 1):
            losses.append(statistics.mean(one.step() for one in members))
            if step % method.local_steps == 0 or step == task.steps:
                if method.attack not in (None, "absent"):
                    _poison(method.attack, members, anchor, 100_000 * seed + step)
                if not all(one.values().isfinite().all() for one in members):
                    break  # diverged; members would leave with an error
                list(pool.map(lambda one: one.diloco.sync(), members))
                anchor = members[0].values()
        else:
            digests = {one.diloco.reports[-1].digest for one in members}
            bits = [one.values().view(torch.int32) for one in members]  # as NaN != NaN
            if len(digests) > 1 or not all(torch.equal(bits[0], other) for other in bits):
                raise RuntimeError("members differ after the last round")
        sent = members[0].diloco.stats()["sent_bytes"]
    plain = task.steps * 2 * (workers - 1) / workers * 4 * anchor.numel()
    return row_of(
        task, method, seed=seed, split=split, workers=workers, ratio=plain / sent,
        judged=evaluate(members[0].model, getattr(task.data, split)()), losses=losses,
        seconds=time.monotonic() - start, against=method.against, outer=outer,
    )  # fmt: skip
