"""State: the adapter between DDP's communication hook and a GradientExchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import check_kind, check_whole
from thinwire.torch import agree, private, tensors
from thinwire.torch.ddp.copied_state import CopiedState
from thinwire.torch.ddp.layout import Layout
from thinwire.torch.ddp.local_gradients import LocalGradients
from thinwire.torch.ddp.warm_up import WarmUp
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.exchange.state_file import PathLike
from thinwire.torch.exchange.stats import summary
from thinwire.torch.exchange.waiter import failed_future
from thinwire.torch.group import rank_or_0
from thinwire.warn import warn

if TYPE_CHECKING:
    from thinwire.torch.ddp.onebit_adam import OneBitAdam


class State:
    """Compresses the gradients of one DDP model.

    codec: "int4" (default), "int8", "onebit", "topk:density=0.01", "bf16", "fp32", with options
      ("int8:block=128,rounding=stochastic,down=int4"); or {pattern of parameter names: codec}, of
      which the first match wins ({"*.bias": "bf16", "embed.*": "int8", "*": "int4"}); or "auto":
      steps are measured with fp32 first, then the codec that is predicted to be the fastest is
      taken, unless it turns out slower (thinwire.torch.exchange.auto).
    process_group: torch's group of the model; None: the default group.
    momentum, nesterov: of SGD, owned by the state, which then compresses the momentum and hands it
      to the optimizer; onebit needs it, topk below 1 % as well. Call move_momentum(optimizer,
      state) before the first backward.
    clip_value: clips each rank's gradients to [-clip_value, clip_value] before they are exchanged
      and before they enter the momentum. clip_norm: likewise each parameter's gradient of each rank
      to a norm of clip_norm / sqrt(ranks) (DGC's local clipping, arXiv 1712.01887, section 3.2).
    policy: "wfbp" (default) or "fifo", the order of chunks. planned: whether a step's order is
      predicted from the step before; None (default): above a millisecond of latency.
    timeout_s: seconds; of connecting, and of one allreduce.
    lanes, chunk_bytes: chunks in flight, and bytes of fp32 in one.
    min_bytes: gradients of at most this many bytes times (ranks - 1) go uncompressed; 0: none.
    interface: network interface to listen on. trace: file for a Chrome trace. strict: ranks compare
      the shapes of parameters as well, and not only their element counts.
    names: parameters and their names for residuals and checkpoints; attach() gives the model's own.
    options: further settings of docs/settings.md.

    None means the THINWIRE_* variable, else the library's default. A state can be made before
    torch.distributed.init_process_group; wrong values are InvalidArgumentErrors here in any case.
    All ranks must use the same values. Ranks join the group and connect at the first backward; the
    states of a group are told apart by the order of that. A copied or unpickled state has no
    connections. After an error the state stays failed, and every later use raises the first reason,
    until recover()."""

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
        strict: bool | None = None,
        names: Mapping[torch.Tensor, str] | None = None,
        **options: Any,
    ) -> None:
        self._gradients = LocalGradients(clip_value, clip_norm)
        if names is not None:
            tensors.check_parameters(names, rank_or_0(process_group))
            names = {p: private.plain_name(name) for p, name in names.items()}
        self._process_group = process_group
        self._options = {
            "policy": policy, "planned": planned, "timeout_s": timeout_s, "lanes": lanes,
            "chunk_bytes": chunk_bytes, "min_bytes": min_bytes, "interface": interface,
            "trace": trace, "strict": strict, **options,
        }  # fmt: skip
        sizes = None if names is None else {name: p.numel() for p, name in names.items()}
        self._exchange = GradientExchange(
            codec, process_group, momentum=momentum, nesterov=nesterov, parameters=sizes,
            purpose="state", **self._options,
        )  # fmt: skip
        if names is None and self._exchange.rules.needs_names:
            raise errors.InvalidArgumentError(
                "codec goes by parameter names, which this state does not know; use "
                "attach(ddp, codec=...), or pass names={parameter: name}"
            )
        self._layout = Layout(names)
        self._bypassed: dict[str, int] = {}
        self._warm_up: WarmUp | None = None
        self._exchange_of_step = self._exchange  # the warm-up's while that lasts

    @property
    def exchange(self) -> GradientExchange:
        """Everything but DDP: codec, connections, momentum, residuals."""
        return self._exchange

    @property
    def codec(self) -> str | dict[str, str]:
        """As it was given, or as the environment or the default had it; with "auto" the codec in
        use, which changes at most twice."""
        return self._exchange.codec

    @property
    def rank(self) -> int:
        """Within the process group. InvalidArgumentError while there is none."""
        return self._exchange.rank

    @property
    def world_size(self) -> int:
        """Ranks of the process group. InvalidArgumentError while there is none."""
        return self._exchange.world_size

    def pair(self, optimizer: Optimizer) -> None:
        """The method behind move_momentum(optimizer, state)."""
        if self._exchange.config.momentum:
            self._check_unpaired()
        self._exchange.take_momentum(optimizer, self._layout.name_of)

    def pair_adam(self, optimizer: OneBitAdam, beta: float, steps: int) -> None:
        """OneBitAdam calls it: the state exchanges fp32 gradients for `steps`, then momentum."""
        check_kind("optimizer", optimizer, Optimizer, "a OneBitAdam")
        check_kind("beta", beta, (int, float), "betas[0] of the optimizer")
        check_whole("steps", steps, 1)
        self._check_unpaired()
        self._warm_up = WarmUp(
            self._exchange, self._process_group, self._options, optimizer, beta, steps
        )

    def _check_unpaired(self) -> None:
        if self._exchange.momentum.paired:
            raise errors.InvalidArgumentError("this state is paired with an optimizer already")

    @property
    def warmed_up(self) -> bool:
        """Whether the last backward pass gave momentum, and not OneBitAdam's fp32 gradients."""
        return self._warm_up is None or self._exchange.steps > self._warm_up.steps

    def _exchanges(self) -> list[GradientExchange]:
        return [self._exchange] + ([] if self._warm_up is None else [self._warm_up.exchange])

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks, in place. Failures come out of the future, and so
        out of backward(): an exception from here would leave DDP's reducer in mid-step."""
        try:
            check_kind("bucket", bucket, dist.GradBucket, "the bucket that DDP hands its hook")
            return self._start(bucket)
        except errors.Error as error:
            reasons = [exchange.fail(error) for exchange in self._exchanges()]
            return failed_future(next((r for r in reasons if r is not error), error))

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, step = bucket.buffer(), self._layout.step
        if step.begin(bucket):
            self._end_step()
        if step.number == 0 and self._exchange.steps:
            self._exchange.between_steps(buffer.device)
        tensors.check(buffer, self.rank, lambda: self._layout.describe(bucket))
        finish = self._gradients.prepare(bucket, self._exchange)
        exchange = self._exchange
        if self._warm_up is not None:
            exchange = self._warm_up.exchange_now(self._exchange, self._layout)
        self._exchange_of_step = exchange
        ours = self._layout.bucket(exchange, bucket)
        future = exchange.start(ours, buffer, finish)
        if step.ends(bucket):
            self._end_step()
        return future

    def _end_step(self) -> None:
        self._exchange_of_step.end_step(repeats=self._layout.end_step())
        if self._exchange_of_step is not self._exchange:
            self._exchange.steps += 1

    def stats(self) -> dict[str, Any]:
        """steps (backward passes), all_reduces, raw_bytes (a ring of fp32 would have sent them),
        wire_bytes (sent by this rank), ratio = raw / wire, planned_chunks (their order was
        predicted); transport (what the data runs on) and topology (the way that dense allreduces
        go); seconds per stage, summed over the lanes: queue, encode, exchange, reduce, gather,
        decode; and parameters, a list of {"name", "numel", "rule", "codec"}, where codec is "raw"
        in a bucket too small to be compressed, int4 where
        topk would cost more bytes, and "delayed by DDP" for delay_all_reduce_named_params, whose
        bytes are not counted. With static_graph=True and several dtypes the first step
        is counted when the second one begins, unless attach() made the state."""
        counts: Counter[str] = Counter()
        for exchange in self._exchanges():
            counts.update(exchange.counts())
        exchange = self._exchange
        totals = summary(counts, exchange.steps, exchange)
        return {**totals, "parameters": [*exchange.table(), *self._bypassed_rows()]}

    def note_bypassed(self, sizes: Mapping[str, int]) -> None:
        """attach() calls it: DDP reduces these parameters itself, so this state never sees them."""
        check_kind("sizes", sizes, Mapping, "elements by parameter name")
        for name, numel in sizes.items():
            check_kind("sizes", name, str, "names of parameters")
            check_whole(f"sizes[{name!r}]", numel, 0)
        self._bypassed = dict(sizes)
        warn(
            f"delay_all_reduce_named_params takes {len(sizes)} parameters past every hook, so DDP "
            f"sends them uncompressed: {', '.join(sorted(sizes))}; leave it out to compress them"
        )

    def _bypassed_rows(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "numel": numel, "rule": None, "codec": "delayed by DDP"}
            for name, numel in self._bypassed.items()
        ]

    def describe(self) -> str:
        """As GradientExchange.describe(), of every exchange of this state."""
        return "".join(exchange.describe() for exchange in self._exchanges())

    def state_dict(self) -> dict[str, Any]:
        """The residuals and momentum of this rank; every rank saves its own.

        {"format", "codec", "world", "rank", "steps", "sparse", "residuals": {parameter: {"first":
        t, "second": t, "momentum": t}}} with flat float32 tensors on the host: first in units of a
        gradient, second in units of the mean, momentum only if the state owns it."""
        return self._exchange.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes state_dict() of this rank, or gathered_state_dict(), or the list of all ranks'
        dicts, which may be of another world size: see merge_state_dicts. With the same buckets,
        training goes on as if it had never stopped, bit by bit. InvalidArgumentError if the dict
        does not fit, or while there is no process group."""
        self._exchange.load_state_dict(saved)

    def gathered_state_dict(self) -> dict[str, Any]:
        """As GradientExchange.gathered_state_dict(): all ranks' state dicts in one, on rank 0, for
        checkpoints that rank 0 alone writes. All ranks call it."""
        return self._exchange.gathered_state_dict()

    def save(self, path: PathLike) -> None:
        """As GradientExchange.save(): an atomic safetensors file of this rank's state_dict()."""
        self._exchange.save(path)

    def load(self, path: PathLike | Sequence[PathLike]) -> None:
        """As GradientExchange.load(): of this rank's file, or of the list of all ranks' files."""
        self._exchange.load(path)

    def recover(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> Recovery:
        """After an error: leaves the failed connections, and goes on in a new group of torch's, of
        any size, with the residuals and the momentum of this rank. Every rank of the new group
        calls it; a new rank, on a new state. Then wrap the model in a new DDP, and register the
        hook with this state again: docs/guides/recover.md has all of it.

        process_group: None for the default group. module, optimizer: where some ranks have made a
          step that others have not, they take parameters, buffers and the optimizer's state from
          one that has. Without them that is the caller's to do, if the result is not `equal`.
        Returns the step that the ranks have agreed on, and its source.

        No residual is lost, and none is sent twice: a step that failed on every rank is taken back.
        Those of a lost rank are gone. Raises InvalidArgumentError while torch has no process group,
        MismatchError if the ranks are not of one run."""
        check_kind("module", module, (torch.nn.Module, type(None)), "a torch.nn.Module, or None")
        check_kind("optimizer", optimizer, (Optimizer, type(None)), "one of torch.optim, or None")
        made = self._exchange.steps - self._exchange_of_step.lost_last_step
        results = [e.recover(process_group, made=made) for e in self._exchanges()]
        self._process_group = process_group
        self._layout.step.abandon()
        result = results[0]
        if not result.equal:
            agree.replica_from_rank(result.source, module, optimizer, process_group)
        return result

    def close(self) -> None:
        """Says goodbye to the peers. Done by itself when the state goes, and at exit."""
        for exchange in self._exchanges():
            exchange.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedState, (self.codec,)


def move_momentum(optimizer: Optimizer, state: State) -> None:
    """Moves momentum and weight decay out of an optimizer into State(..., momentum=...).

    optimizer: torch.optim.SGD, with momentum 0 or the state's; buffers that it has already move
    along. From then on parameters' .grad after backward() is the momentum (or the Nesterov step),
    and the optimizer applies it with its learning rate, so schedulers keep their meaning. Weight
    decay is added to the gradients before the exchange; it is group["thinwire_weight_decay"] then.
    Clip by State(clip_value=...); changing gradients between backward() and step() is an
    InvalidArgumentError out of step(), as is momentum or weight decay that comes back."""
    check_kind("state", state, State, "a State(..., momentum=0.9)")
    state.pair(optimizer)
