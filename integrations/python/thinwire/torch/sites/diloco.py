"""DiLoCo and LocalSGD: members train locally, and exchange updates every so many steps."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import config
from thinwire.arguments import check_flag, check_kind, is_finite, plain, wrong
from thinwire.errors import InvalidArgumentError, warn
from thinwire.torch.exchange.rules import DEFAULT, Codec
from thinwire.torch.sites import secure as secure_sums
from thinwire.torch.sites.fragments import Fragment, check_apart, outers_of
from thinwire.torch.sites.pace import Pace, SyncEvery
from thinwire.torch.sites.round import MOST_WORK, Members, Report, Round, RoundLog
from thinwire.torch.sites.rounds import Rounds
from thinwire.torch.sites.site import ACT, BEGIN, NOTHING, Progress, Site, check_group
from thinwire.torch.sites.state import check_like, pack, raw_bytes, unpack
from thinwire.torch.sites.updates import Values, rule_of

_FORMAT = 1


class DiLoCo:
    """Local steps and outer updates (DiLoCo, arXiv 2311.08105), streamed by fragments (2501.18512),
    with compressed pseudo-gradients and error feedback.

    A context manager that hooks the inner optimizer's step(). The argument order is that of
    torchft's DiLoCo. All members pass the same values. Models need not be equal at the start:
    members take the weights of the first one. After a failure the round is undone and tried again
    among the remaining members, who keep their steps. Not thread-safe.

    Args:
        members: static(), or join().
        model_fragments: modules that have no parameter in common, such as [model], or its layers.
            Each has its round in turn. Parameters in none of them, and all buffers, stay local.
        inner_optimizer: makes the local steps. Its state stays local.
        outer_optimizer: any torch optimizer over all parameters; or a list with one for each
            fragment. Its gradient is the mean of anchor minus parameters.
        sync_every: the number of steps in which each fragment has one round, a timedelta, or
            Overhead.
        codec: a spec, or {pattern of parameter names: spec}. Default: int4, biases and norms exact.
            SparseLoCo's rule (2508.15706) is "topk:density=0.0156" with decay=0.95 and an outer
            SGD without momentum.
        fragment_sync_delay: local steps that continue while a round is in flight. Several fragments
            may have rounds in flight at once.
        fragment_update_alpha: the share of the local parameters in the mix with the new global ones
            (0 to 1), or "rebase": the new global ones plus the steps made since the round began.
        weight: this member's weight in the mean. None: its work in this round: the samples that
            saw() counted, else its steps.
        prox: adds prox * (parameters - anchor) to the gradients (FedProx, 1812.06127).
        aggregate: "mean", or a rule that tolerates poisoned updates and ignores weights:
            "centered_clip", "trimmed", "median".
        decay: a factor on the residual before it is added; 1 for plain error feedback.
        secure: members learn the sum of all updates, and no single update, if the 3 to 18 members
            keep to the protocol (SECURITY.md). Updates have one byte per parameter, under masks, in
            place of a codec. Reports have no norms and cosines. Requires thinwire[secure].
        site_group: the process group of a site of several ranks, such as
            torch.distributed.group.WORLD if each site has its own torchrun. They train together, by
            DistributedDataParallel over this group, and are one member; the group's first rank
            communicates with the other sites. All ranks make the same calls. Their parameters must
            be bit-identical when a round begins, and are afterwards. A lost rank is an error on the
            site's other ranks, and the other sites continue. None: each rank is its own member.
        round_log: a file to which a line of JSON is appended for each committed round: number,
            fragment, members, weights, norms, cosines and digest, which are equal on all members. A
            restart appends, too. A full disk is a warning.
        options: those of the connections, such as timeout_s and interface: thinwire.torch.Options.

    Raises:
        InvalidArgumentError: an argument is not valid.
        UnavailableError: secure=True without the package cryptography.
    """

    def __init__(
        self,
        members: Members,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer],
        sync_every: SyncEvery,
        *,
        codec: Codec | None = None,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float | str = 0.0,
        weight: float | None = None,
        prox: float = 0.0,
        aggregate: str = "mean",
        decay: float = 1.0,
        secure: bool = False,
        site_group: dist.ProcessGroup | None = None,
        round_log: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if not all(hasattr(members, name) for name in ("meet", "wants_change", "close")):
            raise wrong("members", members, "static() or join()")
        check_kind("inner_optimizer", inner_optimizer, Optimizer, "a torch.optim.Optimizer")
        fragments = _modules(model_fragments)
        outers = outers_of(outer_optimizer, len(fragments))
        rule = rule_of(aggregate)
        weight, prox, decay = plain(weight), plain(prox), plain(decay)
        fragment_update_alpha = plain(fragment_update_alpha)
        _check_share("decay", decay)
        if fragment_update_alpha != "rebase":
            _check_share("fragment_update_alpha", fragment_update_alpha)
        if weight is not None and not (is_finite(weight) and 0 < weight <= MOST_WORK):
            raise wrong("weight", weight, f"a number above 0, to {MOST_WORK:g}, or None")
        if not (is_finite(prox) and prox >= 0):
            raise wrong("prox", prox, "a number from 0 on")
        check_flag("secure", secure)
        if secure:
            secure_sums.check_arguments(members, codec, aggregate)
        elif codec is None:
            codec = DEFAULT
        self._fragments = [
            Fragment(number, module, codec, outer)
            for number, (module, outer) in enumerate(zip(fragments, outers, strict=True))
        ]
        check_apart(self._fragments)
        self._alike = {
            "model or model_fragments": [fragment.shapes() for fragment in self._fragments],
            "codec": [fragment.codec.specs for fragment in self._fragments],
            "aggregate": aggregate,
            "secure": secure,
            "outer_optimizer": [
                (type(outer).__qualname__, [len(each["params"]) for each in outer.param_groups])
                for outer in outers
            ],
        }
        self._pace = Pace(sync_every, len(fragments), fragment_sync_delay)
        if inner_optimizer in outers:
            raise InvalidArgumentError(
                "outer_optimizer is the inner_optimizer, whose steps would begin rounds within "
                "rounds; make one of its own, of the same parameters"
            )
        trained = {p for fragment in self._fragments for p in fragment.parameters.values()}
        if trained.isdisjoint(p for each in inner_optimizer.param_groups for p in each["params"]):
            raise InvalidArgumentError(
                "inner_optimizer has no parameter of the fragments, which would never change; make "
                "it of the model's parameters, as they are now"
            )
        self._inner, self._outers = inner_optimizer, list(dict.fromkeys(outers))
        self._delay, self._alpha = fragment_sync_delay, fragment_update_alpha
        self._weight, self._prox, self._decay = weight, prox, decay
        self._work, self._saw = 0.0, False  # work since the start; whether saw() has counted it
        self._left: deque[int] = deque()  # steps until each open round ends
        self._at_begin: dict[int, dict[str, torch.Tensor]] = {}  # for "rebase", by round
        self._kept: Round | None = None  # the round whose fragment's former state is kept
        self._ahead: Round | None = None  # a round that is applied before all votes have come
        self._restored: list[Mapping[str, Any]] = []
        self._restored_own = False  # True: from its own state dict, and not those of all members
        self._changed: set[int] = set()  # fragments that the site's other ranks do not have yet
        self._hooks: list[Any] = []
        self.reports: deque[Report] = deque(maxlen=1000)  # of the last rounds
        settings = config.resolve(codec="fp32", **options)
        key_file = getattr(members, "key_file", None)
        if key_file is not None:
            settings = dataclasses.replace(settings, key_file=key_file)
        self._rounds = Rounds(
            members, settings, None if secure else rule, self, fragment_sync_delay > 0,
            len(fragments),
        )  # fmt: skip
        self._site: Site | None = None
        members_of_site = check_group(site_group)
        if members_of_site is not None:
            pace = f"{sync_every} {fragment_sync_delay} {fragment_update_alpha} {prox}"
            alike = f"{pace} {self._alike['codec']}"
            self._site = Site(members_of_site, self._fragments, settings, alike, anchors=prox > 0)
        self._leads = self._site is None or self._site.leads
        self._round_log = None if round_log is None or not self._leads else RoundLog(round_log)
        self._idle = inner_optimizer.register_step_post_hook(_warner(type(self).__name__))

    # Called by the training loop.

    def __enter__(self) -> DiLoCo:
        """Block until the members have connected and have the same anchor. After an error this
        member has left the others."""
        if self._hooks:
            raise InvalidArgumentError("this DiLoCo is in a `with` already, and would count twice")
        try:
            self._do(ACT, self._meet)
        except BaseException:
            self.close()
            raise
        self._idle.remove()
        inner = self._inner
        self._hooks = [inner.register_step_post_hook(lambda *_: self._stepped())]
        if self._prox:
            self._hooks.append(inner.register_step_pre_hook(lambda *_: self._add_prox()))
        return self

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        """Finish the open rounds, unless an exception ends the block, and leave."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            if kind is None:
                self._do(ACT, self._end_all)
            elif self._site is not None:
                self._site.fail(error)
        finally:
            self.close()

    def saw(self, samples: float) -> None:
        """Count samples or tokens of the next steps for this member's weight in its round. Either
        all members and all ranks of a site call it, or none; otherwise the round raises
        MismatchError on all.

        Args:
            samples: a number from 0 to 1e18.

        Raises:
            InvalidArgumentError: `samples` is not such a number.
        """
        try:
            count = math.nan if isinstance(samples, str) else float(samples)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):  # a tensor of many elements
            count = math.nan
        if not 0 <= count <= MOST_WORK:
            raise wrong("samples", samples, f"a number from 0 to {MOST_WORK:g}")
        if not self._saw:
            self._work, self._saw = 0.0, True
            for fragment in self._fragments:
                fragment.mark = 0.0
        self._work += count

    def sync(self) -> None:
        """Begin the next round now, and finish all open ones. All members call it, inside the
        `with`."""
        if not self._hooks:
            raise InvalidArgumentError("sync() is called outside the `with`, where nobody has met")
        self._do(BEGIN, self._sync)

    def _sync(self) -> None:
        self._begin()
        self._end_all()

    @property
    def rounds(self) -> int:
        """The number of committed rounds."""
        return self._rounds.committed

    def _add_prox(self) -> None:
        with torch.no_grad():
            for fragment in self._fragments:
                for name, p in fragment.parameters.items():
                    if p.grad is not None and p.grad.is_sparse:
                        raise InvalidArgumentError(
                            f"prox={self._prox} with the sparse gradient of '{name}', which it "
                            "would make dense; use sparse=False, or no prox"
                        )
                    if p.grad is not None:
                        p.grad.add_(p - fragment.anchor[name].to(p.device), alpha=self._prox)

    def _stepped(self) -> None:
        if not self._saw:
            self._work += 1
        for index in range(len(self._left)):
            self._left[index] -= 1
        due = self._pace.stepped()
        if self._site is not None and not (due or self._site.open or self._pace.by_clock):
            return
        ends = self._rounds.has_failed() or any(left <= 0 for left in self._left)
        self._do(BEGIN if due else ACT if ends else NOTHING, lambda: self._advance(due))

    def _advance(self, due: bool) -> None:
        self._rounds.check()
        if due:
            self._begin()
        while self._left and self._left[0] <= 0:
            self._end()

    def _do(self, happens: int, action: Callable[[], None]) -> None:
        """Run `action`, which may make rounds, for all ranks of the site."""
        site, rounds = self._site, self._rounds
        if site is None:
            if happens != NOTHING:
                action()
            return
        told = self._work if self._saw else 0.0
        fragment = rounds.begun % len(self._fragments)
        happens, work = site.plan(happens, fragment, 0.0 if site.leads else told, self._counts())
        if site.leads:
            self._work += work
            if happens != NOTHING:
                site.lead(action, rounds.interrupt)
                progress = Progress(
                    rounds.committed, self._pace.since, self._pace.steps, len(rounds.open)
                )
                changed, self._changed = self._changed, set()
                site.finish(progress, changed)
            return
        self._work = 0.0
        if happens != NOTHING:
            progress = site.follow()
            rounds.resume(progress.rounds)
            self._pace.since, self._pace.steps = progress.since, progress.steps

    def _counts(self) -> str:
        """Return the kind of this member's weight, one of WEIGHTS."""
        return "weight=" if self._weight is not None else "saw()" if self._saw else "steps"

    def _meet(self) -> None:
        self._rounds.meet()
        if self._restored:
            self._restore(self._restored)
            self._restored = []
        self._changed.update(range(len(self._fragments)))

    def _begin(self) -> None:
        if len(self._rounds.open) == len(self._fragments):
            self._end()  # a fragment has one round at a time
        fragment = self._fragments[self._rounds.begun % len(self._fragments)]
        fragment.check()
        weight = self._work - fragment.mark if self._weight is None else self._weight
        fragment.mark = self._work
        residuals: Values = {}  # complete when Rounds has taken all pieces
        if weight > 0:
            pieces = fragment.codec.encode(
                fragment.update_in_parts(), fragment.residuals, self._decay, residuals
            )
        else:
            pieces = fragment.codec.nothing()
        if self._alpha == "rebase":
            self._at_begin[self._rounds.begun] = fragment.copy()
        self._pace.began()
        self._left.append(self._delay)
        self._rounds.begin(
            fragment.number, fragment.codec, pieces, residuals, weight, self._counts()
        )

    def _end(self) -> None:
        self._rounds.end(self._rounds.open[0])

    def _end_all(self) -> None:
        while self._rounds.open:
            self._end()

    # Called by Rounds: the state that is equal on all members.

    def keep(self, one: Round) -> None:
        self._kept = one if self._fragments[one.fragment].keep() else None

    def apply_ahead(self, one: Round, result: Values) -> None:
        if self._kept is one:
            self._ahead = one  # before the first change
            self._move(one, result)

    def take_back(self) -> None:
        one, self._ahead = self._ahead, None
        if one is not None:
            self._fragments[one.fragment].restore()

    def apply(self, one: Round) -> None:
        fragment = self._fragments[one.fragment]
        ahead, self._ahead, self._kept = self._ahead is one, None, None
        fragment.forget()
        self._left.popleft()
        fragment.residuals.update(one.residuals)
        for name, lost in one.owed.items():
            fragment.residuals[name] = fragment.residuals[name] + lost
        if one.result:
            self._changed.add(one.fragment)
            if not ahead:
                self._move(one, one.result)
        elif self._weight is None:
            fragment.mark -= one.weight  # it was not used; the next round delivers it
        self._at_begin.pop(one.number, None)
        self.reports.append(one.report)
        if self._round_log is not None:
            self._round_log.write(one.report)
        self._pace.ended(one.report.seconds)
        self._pace.settle(one.report.measured)

    def _move(self, one: Round, result: Values) -> None:
        """Make the outer step of these parameters, and mix the result with the local ones."""
        fragment = self._fragments[one.fragment]
        begun = self._at_begin.get(one.number)
        local: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name in result if self._alpha else ():
                p = fragment.parameters[name]
                local[name] = p.detach().clone()
                if self._alpha == "rebase":  # a newcomer began at the anchor
                    local[name] -= (begun or fragment.anchor)[name].to(p.device)
            fragment.step(result)
            for name, learned in local.items():
                if self._alpha == "rebase":
                    fragment.parameters[name].add_(learned)
                else:
                    fragment.parameters[name].lerp_(learned, self._alpha)

    def dump(self) -> bytes:
        """Return all state that a new member needs, as bytes that are equal on all members."""
        return pack(
            {
                "anchors": [fragment.anchor for fragment in self._fragments],
                "outer": [outer.state_dict() for outer in self._outers],
                "before": self._rounds.before,
                "steps": self._pace.steps,
            }
        )

    def load(self, state: bytes, keep_steps: bool) -> None:
        """Load another member's dump(), and continue from its anchor. keep_steps: add this member's
        local steps since its own anchor, which its next round delivers."""
        found = unpack(state)
        learned = [fragment.update() for fragment in self._fragments]
        self._load_shared(found)
        with torch.no_grad():
            for fragment, update in zip(self._fragments, learned, strict=True):
                for name, p in fragment.parameters.items():
                    p.copy_(fragment.anchor[name])
                    if keep_steps:
                        p.sub_(update[name].reshape(p.shape).to(p.device, p.dtype))
                if not keep_steps:
                    fragment.mark = self._work
        for one in self._rounds.open if keep_steps and self._weight is None else ():
            self._fragments[one.fragment].mark -= one.weight
        self._changed.update(range(len(self._fragments)))
        self._left.clear()
        self._at_begin.clear()

    def _load_shared(self, found: Mapping[str, Any]) -> None:
        for fragment, anchor in zip(self._fragments, found["anchors"], strict=True):
            fragment.anchor = {name: anchor[name].clone() for name in fragment.anchor}
        for number, (outer, kept) in enumerate(zip(self._outers, found["outer"], strict=True)):
            try:
                outer.load_state_dict(kept)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise InvalidArgumentError(
                    f"the state of outer optimizer {number} is not one of this "
                    f"{type(outer).__name__}: {error!r}; use the same outer_optimizer"
                ) from None
        self._rounds.before = {
            fragment: {name: values.clone() for name, values in result.items()}
            for fragment, result in found["before"].items()
        }
        self._pace.steps = found["steps"]

    def alike(self) -> dict[str, Any]:
        return self._alike

    def since(self) -> int:
        return self._pace.since

    def measured(self) -> tuple[float, float]:
        return self._pace.measured()

    def follow(self, begun: int, since: int) -> None:
        """Take part with no update in the rounds that the others have begun."""
        self._left.clear()
        self._pace.since = since
        for _ in range(self._rounds.begun, begun):
            fragment = self._fragments[self._rounds.begun % len(self._fragments)]
            self._left.append(0)
            self._rounds.begin(
                fragment.number, fragment.codec, fragment.codec.nothing(), {}, 0.0, "weight="
            )

    # Checkpoints and statistics.

    def state_dict(self) -> dict[str, Any]:
        """Return all state but the model's parameters and the inner optimizer's state, as tensors
        and plain values: anchors, residuals, the outer optimizers' state, and open rounds. Each
        member saves its own dict, after the same step. A resumed run is bit-identical to one that
        was never interrupted. In a site of several ranks the first rank's dict has all of this, and
        the others' dicts have their counters."""
        rounds = self._rounds
        if not self._leads:
            return {
                "format": _FORMAT,
                "site_rank": self._site.rank,
                "rounds": rounds.committed,
                "since": self._pace.since,
                "steps": self._pace.steps,
                "work": self._work,
            }
        return {
            "format": _FORMAT,
            "rounds": rounds.committed,
            "since": self._pace.since,
            "steps": self._pace.steps,
            "work": self._work,
            "marks": [fragment.mark for fragment in self._fragments],
            "anchors": [
                {n: t.clone() for n, t in fragment.anchor.items()} for fragment in self._fragments
            ],
            "residuals": [
                {n: t.clone() for n, t in fragment.residuals.items()}
                for fragment in self._fragments
            ],
            "outer": [outer.state_dict() for outer in self._outers],
            "before": {
                number: {n: t.clone() for n, t in result.items()}
                for number, result in rounds.before.items()
            },
            "open": [
                {
                    "bytes": torch.frombuffer(bytearray().join(one.pieces), dtype=torch.uint8),
                    "residuals": {n: t.clone() for n, t in one.residuals.items()},
                    "weight": one.weight,
                    "left": left,
                    "at_begin": self._at_begin.get(one.number),
                }
                for one, left in zip(rounds.open, self._left, strict=True)
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved state, before the `with`. The caller loads the model's parameters and the
        inner optimizer's state.

        Args:
            saved: this member's state_dict(); or, for another number of members, the list of those
                of all members by rank: member j of m gets the residuals of those whose number
                modulo m is j, so their sum is kept, and open rounds are dropped. All ranks of a
                site load: each its own dict, or the first rank's.

        Raises:
            InvalidArgumentError: it does not fit.
        """
        if self._rounds.epoch is not None:
            raise InvalidArgumentError("load_state_dict comes before the members meet")
        check_kind("saved", saved, (Mapping, Sequence), "what DiLoCo.state_dict() returned")
        dicts = [saved] if isinstance(saved, Mapping) else list(saved)
        for one in dicts:
            if not isinstance(one, Mapping) or one.get("format") != _FORMAT:
                raise wrong("saved", type(one).__name__, "what DiLoCo.state_dict() returned")
        if not dicts:
            raise wrong("saved", saved, "at least one state dict")
        first = dicts[0]
        if not self._leads:
            counts = {key: 0 for key in ("rounds", "since", "steps", "work")}
            check_like("saved", {key: first[key] for key in counts if key in first}, counts)
            self._rounds.resume(first["rounds"])
            self._pace.since, self._pace.steps = first["since"], first["steps"]
            self._work = first["work"] if "site_rank" in first else 0.0
            return
        for one in dicts:
            if "site_rank" in one:
                raise InvalidArgumentError(
                    f"saved is the state dict of rank {one['site_rank']} of a site, which only "
                    "counts; load that of the site's first rank"
                )
            self._check_saved(one)
            if one["rounds"] != first["rounds"]:
                raise InvalidArgumentError(
                    f"saved has state dicts after {first['rounds']} and {one['rounds']} rounds, "
                    "expected those of one moment; load what all members saved after the same step"
                )
        self._load_shared(first)
        self._rounds.resume(first["rounds"])
        self._pace.since, self._work = first["since"], first["work"]
        for fragment, mark in zip(self._fragments, first["marks"], strict=True):
            fragment.mark = mark
        self._restored, self._restored_own = dicts, isinstance(saved, Mapping)

    def _check_saved(self, one: Mapping[str, Any]) -> None:
        """InvalidArgumentError unless it is a state dict of the same fragments and options."""
        like = self.state_dict() | {"outer": [None] * len(self._outers)}
        check_like("saved", one, like | {"before": None, "open": None})
        check_kind("saved['before']", one["before"], Mapping, "a dict")
        check_kind("saved['open']", one["open"], list, "a list")
        results = {number: fragment.residuals for number, fragment in enumerate(self._fragments)}
        for number, result in one["before"].items():
            like = results.get(number, {}) if result else {}
            check_like(f"saved['before'][{number!r}]", result, like)
        for at, each in enumerate(one["open"]):
            path = f"saved['open'][{at}]"
            fragment = self._fragments[(one["rounds"] + at) % len(self._fragments)]
            update = torch.frombuffer(bytearray().join(fragment.codec.nothing()), dtype=torch.uint8)
            like = {"bytes": update, "residuals": None, "weight": 0, "left": 0, "at_begin": None}
            check_like(path, each, like)
            lost, begun = each["residuals"], each["at_begin"]
            check_like(f"{path}['residuals']", lost, fragment.residuals if lost else {})
            check_like(f"{path}['at_begin']", begun, None if begun is None else fragment.anchor)

    def _restore(self, dicts: list[Mapping[str, Any]]) -> None:
        """Load the residuals and open rounds of state dicts, when this member's rank is known."""
        epoch = self._rounds.epoch
        own = self._restored_own
        mine = dicts if own else dicts[epoch.rank :: epoch.size]
        for index, fragment in enumerate(self._fragments):
            for name, residual in fragment.residuals.items():
                residual.zero_()
                for one in mine:
                    residual.add_(one["residuals"][index][name])
        if self._rounds.begun > dicts[0]["rounds"] or not own:
            return
        for one in dicts[0]["open"]:
            fragment = self._fragments[self._rounds.begun % len(self._fragments)]
            if one["at_begin"] is not None:
                self._at_begin[self._rounds.begun] = dict(one["at_begin"])
            self._left.append(one["left"])
            self._rounds.begin(
                fragment.number, fragment.codec, [raw_bytes(one["bytes"])],
                {name: t.clone() for name, t in one["residuals"].items()}, one["weight"],
                "weight=",  # which may be combined with either of the others
            )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return counters since the start.

        Returns:
            A dict with rounds (committed), retried (undone after a failure and tried again), epochs
            (times that members met), members (their present names), sent_bytes, steps_between (at
            present), and report, the last committed round. In a site of several ranks the first
            rank has all of these, and the others rounds and steps_between.
        """
        rounds = self._rounds
        return {
            "rounds": rounds.committed,
            "retried": rounds.retried,
            "epochs": rounds.epochs,
            "members": () if rounds.epoch is None else rounds.epoch.names,
            "sent_bytes": rounds.sent_bytes(),
            "steps_between": self._pace.steps * len(self._fragments),
            "report": self.reports[-1] if self.reports else None,
        }

    def close(self) -> None:
        """Leave the other members. A second call does nothing."""
        self._idle.remove()
        self._rounds.close()
        if self._site is not None:
            self._site.close()
        if self._round_log is not None:
            self._round_log.close()


class LocalSGD(DiLoCo):
    """Periodic averaging: every `sync_every` steps all members take the mean of their parameters.
    With weights by samples it is FedAvg (arXiv 1602.05629), with prox= FedProx.

    It sends differences to the last mean, never parameters. The argument order is that of torchft's
    LocalSGD; the other arguments are those of DiLoCo.

    Args:
        model: all of its trained parameters take part.
        optimizer: makes the local steps.
    """

    def __init__(
        self,
        members: Members,
        model: torch.nn.Module,
        optimizer: Optimizer,
        sync_every: SyncEvery,
        **options: Any,
    ) -> None:
        check_kind("model", model, torch.nn.Module, "a torch.nn.Module")
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise wrong("model", model, "a module with parameters that are trained")
        outer = torch.optim.SGD(trained, lr=1.0)
        super().__init__(members, [model], optimizer, outer, sync_every, **options)


def _warner(name: str) -> Callable[..., None]:
    """Return a hook for an optimizer's steps that warns once. It holds no reference to an object
    that it would keep alive."""
    steps: list[None] = []

    def warn_of_idle_step(*_: Any) -> None:
        if not steps:
            steps.append(None)
            warn(
                f"{name}: inner_optimizer has made a step outside of the with, where nothing is "
                f"exchanged, so members train apart; write `with {name}(...) as ...:` around the "
                "training loop"
            )

    return warn_of_idle_step


def _modules(given: object) -> list[torch.nn.Module]:
    modules = list(given) if isinstance(given, Iterable) else []
    if not modules or not all(isinstance(each, torch.nn.Module) for each in modules):
        raise wrong("model_fragments", given, "a list of modules, such as [model]")
    return modules


def _check_share(name: str, value: object) -> None:
    if not (is_finite(value) and 0 <= value <= 1):
        raise wrong(name, value, "a number from 0 to 1")
