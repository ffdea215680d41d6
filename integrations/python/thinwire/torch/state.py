"""State: what a DDP communication hook remembers from step to step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.torch import checkpoint, tensors
from thinwire.torch import momentum as momentum_
from thinwire.torch.auto import AutoCodec
from thinwire.torch.buckets import Buckets
from thinwire.torch.group import join
from thinwire.torch.policy import Codec, Policy
from thinwire.torch.session import Session
from thinwire.torch.settled import settle
from thinwire.torch.stats import summary
from thinwire.torch.waiter import failed_future
from thinwire.torch.watched import WatchedBuckets

if TYPE_CHECKING:
    from thinwire.torch.onebit_adam import OneBitAdam


class State:
    """Compresses the gradients of one DDP model.

    codec: "int4" (default), "int8", "onebit", "topk:density=0.01", "bf16", "fp32", with options
      ("int8:block=128,rounding=stochastic,down=int4"); or {pattern of parameter names: codec}, of
      which the first match wins ({"*.bias": "bf16", "embed.*": "int8", "*": "int4"}); or "auto":
      steps are measured with fp32 first, then the codec that is predicted to be the fastest is
      taken, unless it turns out slower (thinwire.torch.auto).
    process_group: torch's group of the model; None: the default group.
    momentum, nesterov: of SGD, owned by the state, which then compresses the momentum and hands it
      to the optimizer; onebit needs it, topk below 1 % as well. Call move_momentum(optimizer,
      state) before the first backward.
    clip_value: clips each rank's gradients to [-clip_value, clip_value] before they are exchanged
      and before they enter the momentum. clip_norm: likewise each parameter's gradient of each rank
      to a norm of clip_norm / sqrt(ranks) (DGC's local clipping, arXiv 1712.01887, section 3.2).
    policy: "wfbp" (default) or "fifo", the order of chunks. planned: whether a step's order is
      foretold from the step before; None (default): above a millisecond of latency.
    timeout_s: seconds; of connecting, and of one allreduce.
    lanes, chunk_bytes: chunks in flight, and bytes of fp32 in one.
    min_bytes: gradients of at most this many bytes times (ranks - 1) go uncompressed; 0: none.
    interface: network interface to listen on. trace: file for a Chrome trace.
    names: parameters and their names for residuals and checkpoints; attach() gives the model's own.

    None means the THINWIRE_* variable, else the library's default. All ranks must use the same
    values, and create their states in the same order. Connecting happens at the first backward.
    After an error the state stays failed: every later use raises the first reason."""

    def __init__(
        self,
        codec: Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        policy: str | None = None,
        planned: bool | None = None,
        timeout_s: float | None = None,
        lanes: int | None = None,
        chunk_bytes: int | None = None,
        min_bytes: int | None = None,
        interface: str | None = None,
        trace: str | None = None,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        settled = settle(
            codec, process_group, WatchedBuckets, policy=policy, planned=planned,
            timeout_s=timeout_s, lanes=lanes, chunk_bytes=chunk_bytes, min_bytes=min_bytes,
            interface=interface, trace=trace, momentum=momentum, nesterov=nesterov,
        )  # fmt: skip
        for key, limit in {"clip_value": clip_value, "clip_norm": clip_norm}.items():
            if limit is not None and not limit > 0:
                raise errors.InvalidArgumentError(f"{key} is {limit!r}, expected a number above 0")
        self._auto, self._codecs = settled.auto, settled.codecs
        if names is not None:
            self._codecs.check_names(names.values())
        elif self._codecs.needs_names:
            raise errors.InvalidArgumentError(
                "codec goes by parameter names, which this state does not know; use "
                "attach(ddp, codec=...), or pass names={parameter: name}"
            )
        self._process_group = process_group
        self._session = settled.open_session(join(process_group, "state"), self)
        self._buckets = Buckets(names, self._codecs)
        self._clip_value, self._clip_norm = clip_value, clip_norm
        self._pairing: momentum_.Pairing | None = None
        self._adam: OneBitAdam | None = None
        self._warmup: Session | None = None
        self._warmup_steps = 0
        self._steps = 0

    @property
    def codec(self) -> str | dict[str, str]:
        """As it was given, or as the environment or the default had it; with "auto" what it is now,
        which changes once or twice."""
        rules = self._codecs.rules
        return rules if self._codecs.needs_names else next(iter(rules.values()))

    @property
    def rank(self) -> int:
        """Within the process group."""
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.size

    def pair(self, optimizer: Optimizer) -> None:
        """What move_momentum does."""
        settings = self._session.config
        if not settings.momentum:
            raise errors.InvalidArgumentError(
                "this state owns no momentum; make it with State(..., momentum=0.9)"
            )
        if self._pairing is not None:
            raise errors.InvalidArgumentError("this state is paired with an optimizer already")
        self._pairing, buffers = momentum_.take_over(
            optimizer, settings.momentum, settings.nesterov
        )
        if buffers:
            self._take_momentum(buffers)

    def pair_adam(self, optimizer: OneBitAdam, beta: float, warmup_steps: int) -> None:
        """What OneBitAdam does: exchanges fp32 gradients for `warmup_steps`, then momentum."""
        settings = self._session.config
        if settings.momentum != beta:
            raise errors.InvalidArgumentError(
                f"the state's momentum is {settings.momentum}, expected betas[0] = {beta}; make "
                f"it with State(..., momentum={beta})"
            )
        if self._pairing is not None:
            raise errors.InvalidArgumentError("this state is paired with an optimizer already")
        if self._auto is not None:
            raise errors.InvalidArgumentError(
                "OneBitAdam got a state with codec='auto', expected a codec that is chosen; take "
                "State(codec='onebit', ...)"
            )
        plain = ";".join("fp32" for _ in settings.codec.split(";"))  # the same numbers are taken
        plain_settings = dataclasses.replace(settings, codec=plain, momentum=0.0, nesterov=False)
        self._warmup = Session(join(self._process_group, "warmup"), plain_settings)
        self._warmup.close_with(self)
        self._warmup_steps, self._adam = warmup_steps, optimizer
        self._pairing = momentum_.Pairing(optimizer, beta, ())

    def _take_momentum(self, buffers: Mapping[torch.Tensor, torch.Tensor]) -> None:
        named = {self._buckets.name_of(p): buffer for p, buffer in buffers.items()}
        self._session.load(checkpoint.with_momentum(self._session.memory(), named), self._steps)

    @property
    def warmed_up(self) -> bool:
        """Whether the last backward pass gave momentum, and not OneBitAdam's fp32 gradients."""
        return self._steps > self._warmup_steps

    def _sessions(self) -> list[Session]:
        return [self._session] if self._warmup is None else [self._session, self._warmup]

    def _session_now(self, bucket: dist.GradBucket) -> Session:
        """Of the warm-up while it lasts; afterwards the momentum that it made goes on."""
        if self._warmup is None:
            return self._session
        if self._steps < self._warmup_steps:
            return self._warmup
        if self._steps == self._warmup_steps and bucket.index() == 0:
            found = {p: self._adam.momentum_of(p) for p in self._buckets.parameters()}
            self._take_momentum({p: m for p, m in found.items() if m is not None})
        return self._session

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks, in place. Failures come out of the future, and so
        out of backward(): an exception from here would leave DDP's reducer in mid-step."""
        try:
            return self._start(bucket)
        except errors.Error as error:
            for session in self._sessions():
                if session.error is None:
                    session.fail(error)
                    session.abort()
            return failed_future(error)

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._auto is not None and bucket.index() == 0 and self._steps:
            self._choose_codec(self._auto, bucket.buffer().device)
        buffer, name = bucket.buffer(), f"bucket{bucket.index()}"
        dtype = tensors.check(buffer, self.rank, lambda: self._buckets.describe(name, bucket))
        layout = self._buckets.layout(bucket, self._session.restored)
        finish = self._prepare(bucket)
        session = self._session_now(bucket)
        future = session.start(
            buffer, dtype, "mean", name, layout, priority=bucket.index(), finish=finish
        )
        if bucket.is_last():
            self._steps += 1
            if self._buckets.end_step():
                session.end_step()
        return future

    def _choose_codec(self, auto: AutoCodec, device: torch.device) -> None:
        """Between two backward passes, when everything of the first is there."""
        codec = auto.after_step(device, self._session.wait_idle)
        if codec is None:
            return
        group = join(self._process_group, "state")
        self._session = self._session.successor(group, codec, self._steps)
        self._session.close_with(self)
        self._codecs = Policy(codec)
        self._buckets.take(self._codecs)

    def _prepare(self, bucket: dist.GradBucket):
        """Does to the gradients what the optimizer would have done before its momentum; returns
        what is to be done with the result, if anything."""
        if self._clip_value is not None:
            bucket.buffer().clamp_(-self._clip_value, self._clip_value)
        if self._clip_norm is not None:
            limit = self._clip_norm / math.sqrt(self.world_size)
            for gradient in bucket.gradients():
                norm = gradient.norm()
                gradient.mul_(torch.where(norm > limit, limit / norm, 1.0))
        if not self._session.config.momentum:
            return None
        if self._pairing is None:
            raise errors.InvalidArgumentError(
                f"State(momentum={self._session.config.momentum}) is not paired with an optimizer; "
                "call thinwire.torch.move_momentum(optimizer, state) before the first backward"
            )
        pairing = self._pairing
        parts = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        pairing.check()
        with torch.no_grad():
            for parameter, gradient in parts:
                decay = pairing.weight_decay_of(parameter)
                if decay:
                    gradient.add_(parameter.detach().view_as(gradient), alpha=decay)

        def finish() -> None:
            for parameter, gradient in parts:
                pairing.mark(parameter, gradient)

        return finish

    def stats(self) -> dict[str, Any]:
        """steps (backward passes), all_reduces, raw_bytes (what a ring of fp32 would have sent),
        wire_bytes (sent by this rank), ratio = raw / wire, planned_chunks (whose order was
        foretold), seconds per stage, summed over the lanes: queue, encode, exchange, reduce,
        gather, decode; and parameters, what went where: a list of {"name", "numel", "rule",
        "codec"}, where codec is "raw" in a bucket too small to be compressed, and another than the
        rule's where topk costs more bytes than int4."""
        counts: Counter[str] = Counter()
        for session in self._sessions():
            counts.update(session.stats())
        return {**summary(counts, self._steps), "parameters": self._table()}

    def _table(self) -> list[dict[str, Any]]:
        communicator = self._session.communicator
        if communicator is None:
            return []
        rows = []
        for name, (numel, dtype, bucket) in sorted(self._buckets.places().items()):
            raw = communicator.goes_raw(bucket, dtype)
            codec = "raw" if raw else communicator.codec(self._codecs.index_of(name))
            rule = self._codecs.rule_of(name)
            rows.append({"name": name, "numel": numel, "rule": rule, "codec": codec})
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: {"format", "codec", "world", "rank", "steps", "sparse",
        "residuals": {parameter: {"first": t, "second": t, "momentum": t}}}, flat float32 tensors of
        the parameter's size; first in units of a gradient, second in units of the mean, momentum
        only if the state owns it. Every rank saves its own."""
        table = self._table()
        sparse = [row["name"] for row in table if row["codec"].startswith("topk")]
        return checkpoint.pack(
            self._session.memory(), self.codec, self.world_size, self.rank, self._steps, sparse
        )

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes what state_dict() gave on this rank, or the list of all ranks' dicts, which may be
        of another world size: see merge_state_dicts. With the same buckets, training goes on as if
        it had never stopped, bit by bit. InvalidArgumentError if the dict does not fit."""
        residuals, steps = checkpoint.unpack(saved, self.world_size, self.rank)
        self._buckets.check(residuals)
        self._session.load(residuals, steps)
        self._steps = steps

    def close(self) -> None:
        """Says goodbye to the peers. Done by itself when the state goes, and at exit."""
        for session in self._sessions():
            session.close()

    def __getstate__(self) -> dict[str, Any]:
        raise errors.InvalidArgumentError(
            "a State holds connections and can't be pickled; save state.state_dict() instead"
        )


def move_momentum(optimizer: Optimizer, state: State) -> None:
    """Moves momentum and weight decay out of an optimizer into State(..., momentum=...).

    optimizer: torch.optim.SGD, with momentum 0 or the state's; buffers that it has already move
    along. From then on parameters' .grad after backward() is the momentum (or the Nesterov step),
    and the optimizer applies it with its learning rate, so schedulers keep their meaning. Weight
    decay is added to the gradients before the exchange; it is group["thinwire_weight_decay"] then.
    Clip by State(clip_value=...); changing gradients between backward() and step() is an
    InvalidArgumentError out of step(), as is momentum or weight decay that comes back."""
    state.pair(optimizer)
