"""GradientExchange: the compressed mean of gradients over all ranks, with its residuals and
momentum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import config, errors
from thinwire.arguments import as_int, check_call, check_flag, check_kind, plain, wrong
from thinwire.codec import codec_info
from thinwire.torch import agree, private, tensors
from thinwire.torch.exchange import checkpoint
from thinwire.torch.exchange.auto import AUTO, AutoCodec, Choice
from thinwire.torch.exchange.bucket import (
    Bucket,
    FlatBucket,
    InFlight,
    Parameters,
    Part,
    check_size,
    check_sizes,
    follow,
    lay_out,
    parts_of,
)
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.compression import COMPRESSED, Compression
from thinwire.torch.exchange.gathered import gather
from thinwire.torch.exchange.momentum import OwnedMomentum
from thinwire.torch.exchange.recovery import Agreement, Recovery, fit, progress_of
from thinwire.torch.exchange.rules import Codec, Rules, Structure
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.warm_up import plan
from thinwire.torch.group import Membership, rank_or_0, resolve, users_of

_INT32 = -(2**31), 2**31 - 1


class GradientExchange(Compression):
    """Averages gradients over the ranks of a process group.

    Adapters to frameworks are thin layers over it: thinwire.torch.State is one for DDP. Ranks
    connect at the first use; all must pass the same values. After an error of a peer or of the
    network the exchange stays failed, and every later use raises the first reason, until recover().
    Not thread-safe, except for close().

    Args:
        codec: a spec such as "int4" (default) or "topk:density=0.01"; or {pattern of parameter
            names: spec}, of which the first match wins; or "auto".
        process_group: torch's group; None: the default group, which may be initialized after this
            object is created.
        parameters: the number of elements of each parameter, by name. If given, a rule that matches
            none of them is an error, and loading checks the names. None: parameters become known
            with their buckets.
        structure: the parameter names that the words "1d" and "embedding" stand for in rules.
        purpose: a name for the kind of user. Ranks match exchanges with the same purpose by the
            order of their first uses.
        warm_up_steps: the number of first steps that use warm_up_codec; later steps use `codec`.
            The adapter must call between_steps().
        warm_up_codec: "fp32", "bf16" or "int8"; None: fp32.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default. With momentum the exchange returns momentum in place of gradients; see
            take_momentum().

    Raises:
        InvalidArgumentError: an option, codec, rule or policy is not valid.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        parameters: Mapping[str, int] | None = None,
        structure: Structure | None = None,
        purpose: str = "exchange",
        warm_up_steps: int | None = None,
        warm_up_codec: str | None = None,
        **options: Any,
    ) -> None:
        check_kind("purpose", purpose, str, "text")
        self.steps = 0  # steps made so far, including those of a loaded state dict
        by_name = isinstance(codec, Mapping)
        settings = config.resolve(
            codec=Rules(codec).joined if by_name else codec,
            momentum=momentum,
            nesterov=nesterov,
            **options,
        )
        self._auto: AutoCodec | None = None
        if settings.codec == AUTO:
            self._auto = AutoCodec(settings, process_group)
            settings = self._auto.config
        self._structure = structure
        self._rules = Rules(codec if by_name else settings.codec, structure)
        self._rules.check_specs()
        self._rules.check_momentum(settings.momentum)
        if parameters is not None:
            check_sizes(parameters)
            self._rules.check_names(parameters)
        self._process_group, self._purpose = process_group, purpose
        self._parameters = Parameters(parameters)
        warm_up = plan(
            warm_up_steps, warm_up_codec, self._rules, settings.momentum, automatic=self.automatic
        )
        self._plan = {"codec": AUTO if self.automatic else self._rules.joined}
        if warm_up is not None:
            self._plan["warm_up_steps"] = str(warm_up.steps)
            self._plan["warm_up_codec"] = warm_up.first.joined
        self._session = Session(Membership(process_group, purpose), settings, self._plan)
        self._session.close_with(self)
        self.momentum = OwnedMomentum(settings.momentum, settings.nesterov)
        self._step_tensors: list[Any] = []  # tensors of the last reduce() and their buckets
        self._step_buckets: list[FlatBucket] = []
        self._whole = True  # all parameters are of one step; False until a copy is complete
        self._warming_up = False  # whether warm_up_codec is in use
        self._warm_up = warm_up
        if self._warm_up is not None:
            self._take_phase(warming_up=True)

    # Settings.

    @property
    def codec(self) -> str | dict[str, str]:
        """The codec or rules in use. With "auto" or a warm-up they change."""
        rules = self._rules.by_pattern
        return rules if self._rules.needs_names else next(iter(rules.values()))

    @property
    def rules(self) -> Rules:
        """The rules in use; during a warm-up, those that follow it."""
        return self._rules if self._warm_up is None else self._warm_up.then

    @property
    def config(self) -> config.Config:
        """All settings, with environment and defaults resolved."""
        return self._session.config

    @property
    def automatic(self) -> bool:
        """True if the exchange chooses its codec itself (codec="auto")."""
        return self._auto is not None

    @property
    def rank(self) -> int:
        """This rank in the process group. InvalidArgumentError before that is initialized."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group. InvalidArgumentError before that is initialized."""
        return self._session.size

    # Buckets.

    def bucket(
        self,
        name: str | None,
        parts: Iterable[Part | tuple[str, int]],
        dtype: torch.dtype,
        *,
        priority: int = 0,
        shape: str | None = None,
        op: str = "mean",
        collective: str = "all_reduce",
    ) -> Bucket:
        """Describe a flat buffer that will be submitted in many steps. Call it once per buffer.

        Args:
            name: equal on all ranks, and of one bucket only. None: no residuals are kept, and the
                ranks' calls match by their order.
            parts: (parameter name, elements) of each parameter in the buffer, or a Part for a piece
                of a parameter, in the buffer's order and without gaps.
            dtype: float32, bfloat16 or float16.
            priority: under "p3" lower goes first, so it is the bucket's number in forward order.
            shape: the shapes of the parts as text, which strict=True compares between ranks.
            op: "mean" or "sum".
            collective: "all_reduce", or "reduce_scatter" with submit(..., result).

        Raises:
            InvalidArgumentError: no rule matches a parameter, or a loaded state dict has it with
                another size.
        """
        if not isinstance(dtype, torch.dtype) or dtype not in tensors.DTYPES:
            raise errors.InvalidArgumentError(
                f"bucket '{name}': got dtype {dtype!r}, expected float32, bfloat16 or float16"
            )
        listed = parts_of(parts)
        priority = as_int("priority", priority, *_INT32)
        check_kind("shape", shape, (str, type(None)), "text, or None")
        for text in (name, *(part.name for part in listed)):
            tensors.check_name(text)
        for part in listed:
            check_size(part.name, part.total or part.numel, self._session.restored)
        bucket = Bucket(
            name, sum(part.numel for part in listed), tensors.DTYPES[dtype], parts=listed,
            codecs=[0] * len(listed), priority=priority,
            shape=shape if self.config.strict else None, op=op, collective=collective,
        )  # fmt: skip
        follow(bucket, self._rules)
        self._parameters.add(bucket)
        return bucket

    def submit(
        self, bucket: Bucket, buffer: torch.Tensor, result: torch.Tensor | None = None
    ) -> InFlight:
        """Start replacing the buffer by its mean over all ranks. Call wait() once afterwards.

        Args:
            bucket: the description of the buffer.
            buffer: contiguous, with the bucket's dtype and number of elements, on the CPU or a GPU;
                always the same device. It must not be used until wait() has returned.
            result: where the mean goes, which a reduce-scatter requires; then the buffer is left
                unchanged. None: into the buffer.
        """
        self._check(bucket, buffer)
        if self._auto and self._auto.observer:
            self._auto.observer.submitting(bucket, buffer)
        return self._session.submit(bucket, buffer, result)

    def wait(self, submission: InFlight) -> None:
        """Return when the buffer holds the mean (on a GPU: for later work of the current stream).
        Submissions may be waited for in any order. Raises the typed error of a failure."""
        check_kind("submission", submission, InFlight, "what submit() returned")
        if not (self._auto and self._auto.observer):
            self._session.complete(submission)
            return
        with self._auto.observer.waiting(submission.bucket, submission.tensor.device):
            self._session.complete(submission)

    def start(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Like submit(), but return a future of the buffer. It completes after those of earlier
        submissions, and after `finish` has run on another thread. With codec="auto", start buckets
        in backward order, each with its number in that order as its priority."""
        check_call("finish", finish)
        self._check(bucket, buffer)
        if self._auto and self._auto.observer:
            finish = self._auto.observer.starting(bucket, buffer, finish)
        return self._session.start(bucket, buffer, finish).future

    def _check(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        check_kind("bucket", bucket, Bucket, "what GradientExchange.bucket() returned")
        dtype = tensors.check(buffer, self.rank, lambda: str(bucket.name))
        if (dtype, buffer.numel()) != (bucket.dtype, bucket.numel) or not buffer.is_contiguous():
            raise errors.InvalidArgumentError(
                f"rank {self.rank}, bucket '{bucket.name}': got {buffer.numel()} elements of "
                f"{dtype} with strides {buffer.stride()}, expected {bucket.numel} contiguous "
                f"elements of {bucket.dtype}"
            )
        follow(bucket, self._rules)

    def end_step(self, *, repeats: bool | None = True) -> None:
        """Call once per step, after all of its buckets were submitted.

        Args:
            repeats: True: the next step will submit the same buckets, so its order can be
                predicted. False: it will not. None: unknown; its order is predicted if this step
                had the same buckets as the step before.
        """
        if repeats is not None:
            check_flag("repeats", repeats)
        self.steps += 1
        comparing = self._auto is not None and self._auto.comparing
        self._session.end_step(repeats=False if comparing else repeats)

    def between_steps(self, device: torch.device, finish: Callable[[], None] | None = None) -> None:
        """Change the codec if codec="auto" or the end of a warm-up requires it. Call it once per
        step on all ranks. `finish` waits until the adapter has nothing in flight; None: start() was
        used. Buckets stay valid. PeerLostError if a rank was lost."""
        check_kind("device", device, torch.device, "a torch.device")
        check_call("finish", finish)
        finish = finish or self._session.wait_idle
        if self._warming_up and self._warm_up is not None and self.steps >= self._warm_up.steps:
            finish()
            self._end_warm_up()
        if self._auto is None:
            return
        choice = self._auto.after_step(device, finish)
        if choice is not None:
            self._take(choice)

    def try_codecs(self, codecs: Sequence[str]) -> None:
        """For codec="auto" if steps cannot be predicted: time steps with each of these codecs in
        turns. Call it before the first step. No-op for any other codec.

        Args:
            codecs: from the most accurate to the least.

        Raises:
            InvalidArgumentError: a codec is unknown.
        """
        if isinstance(codecs, str) or not isinstance(codecs, Sequence):
            raise wrong("codecs", codecs, "several codecs, such as ('fp32', 'int8')")
        for codec in codecs:
            codec_info(codec)
        if self._auto is not None:
            self._auto.try_each(codecs)

    def _take(self, choice: Choice) -> None:
        """Switch to the codec that codec="auto" has chosen; this reconnects only if the session
        lacks the codec. All ranks call it, with nothing in flight."""
        self._rules = Rules(choice.codec, self._structure, choice.among)
        if self._rules.joined != self.config.codec:
            self._go_on(self._rules.joined, self.config.momentum, self._session.memory())

    def _warms_up(self, steps: int) -> bool:
        """Return whether the exchange uses warm_up_codec after so many steps."""
        return self._warm_up is not None and steps < self._warm_up.steps

    def _take_phase(self, *, warming_up: bool) -> None:
        """Switch to the codec of the warm-up, or to the one after it; residuals and counts are
        kept. All ranks call it, with nothing in flight."""
        assert self._warm_up is not None
        _, first, then, momentum = self._warm_up
        self._warming_up, self._rules = warming_up, first if warming_up else then
        momentum = self._momentum_of_warm_up() if warming_up else momentum
        self._go_on(self._rules.joined, momentum, self._session.memory())

    def _momentum_of_warm_up(self) -> float:
        return 0.0 if self._warm_up is None else self._warm_up.momentum

    def _end_warm_up(self) -> None:
        self._take_phase(warming_up=False)

    def _go_on(self, codec: str, momentum: float, kept: Residuals) -> None:
        """Close the session and open one that starts from the residuals `kept` at the next step;
        allowed after a failure."""
        membership = Membership(self._process_group, self._purpose)
        self._session = self._session.successor(
            membership, codec, momentum, self._plan, kept, self.steps
        )
        self._session.close_with(self)

    # Whole steps, for loops that have all gradients at once.

    def reduce(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks, as one step. Returns when all are done.

        Args:
            named: tensors by the name that rules and residuals use; any shape, float32, bfloat16 or
                float16. All ranks pass the same names and shapes, in the same order.
        """
        tensors.check_named(named, self.rank)
        for name, tensor in named.items():
            tensors.check(tensor, self.rank, lambda name=name: name)
            tensors.check_writable(tensor, self.rank, name)
        means = self._means_of(named, list(named.values()))
        with torch.no_grad():
            for tensor, mean in zip(named.values(), means, strict=True):
                tensor.copy_(mean)

    def reduce_gradients(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace the .grad of parameters by the mean over all ranks (or by the momentum, if the
        exchange owns it), as one step. Call it between backward() and step().

        Args:
            named: parameters by name, as dict(model.named_parameters()), the same on all ranks in
                the same order. A missing .grad counts as zeros and is set to the mean.
        """
        tensors.check_named(named, self.rank)
        self.momentum.check()
        trained = {private.plain_name(name): p for name, p in named.items() if p.requires_grad}
        means = self._means_of(trained, [p.grad for p in trained.values()])
        with torch.no_grad():
            for parameter, mean in zip(trained.values(), means, strict=True):
                if parameter.grad is None:
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)
                self.momentum.mark(parameter, parameter.grad)

    def _means_of(
        self, named: Mapping[str, torch.Tensor], values: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Exchange one value for each tensor as a step, and return the means in their order."""
        if not named:
            return []
        layout = [(name, id(t), t.shape, t.dtype, t.device) for name, t in named.items()]
        if layout != self._step_tensors:
            self._step_buckets = lay_out(FlatBucket, self.bucket, named.items())
            self._step_tensors = layout
        left = iter(values)
        try:
            in_flight = [
                self.submit(flat.bucket, flat.fill(mine, self.rank, self.momentum.weight_decay_of))
                for flat in self._step_buckets
                for mine in [list(itertools.islice(left, len(flat.names)))]
            ]
            self.end_step()
            for submission in in_flight:
                self.wait(submission)
        except errors.Error as error:  # the peers must not wait for buckets that will not come
            raise errors.again(self.fail(error)) from None
        self.between_steps(self._step_buckets[0].tensors[0].device)
        return [mean for bucket in self._step_buckets for _, mean in bucket.means()]

    # Momentum.

    def take_momentum(
        self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str | None]
    ) -> None:
        """Move momentum and weight decay into the exchange from those param groups of the optimizer
        that still have them. From then on the results of the exchange are momentum.

        Args:
            optimizer: torch.optim.SGD.
            name_of: returns a parameter's name; None: drop its momentum buffer.

        Raises:
            InvalidArgumentError: the exchange owns no momentum, or the optimizer is not SGD.
        """
        if found := self.momentum.take(optimizer, name_of):
            self.load_momentum(found)

    def load_momentum(self, momentum: Mapping[str, torch.Tensor]) -> None:
        """Replace the momentum of these parameters; any shape and dtype. Nothing may be in
        flight."""
        tensors.check_named(momentum, rank_or_0(self._process_group))
        momentum = {private.plain_name(name): buffer for name, buffer in momentum.items()}
        for name, buffer in momentum.items():
            self._parameters.add_size(name, buffer.numel())
        memory = checkpoint.with_momentum(self._session.memory(), self._laid_out(momentum))
        self._session.load(memory, self.steps)

    def _laid_out(self, momentum: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the momentum with its elements in the order that they have in buckets."""
        return momentum

    def _owns_momentum(self) -> bool:
        """Return whether the exchange owns the momentum, now or after a warm-up."""
        later = 0.0 if self._warm_up is None else self._warm_up.momentum
        return max(self.config.momentum, later) != 0

    # Statistics and checkpoints.

    def _table(self) -> list[dict[str, Any]]:
        """stats()["parameters"]."""
        return self._parameters.table(self._session.communicator, self._rules)

    def stats(self) -> dict[str, Any]:
        """Return counters since the start. Waits for pending work.

        Returns:
            A dict with steps; all_reduces; raw_bytes, which a ring allreduce of fp32 would have
            sent; wire_bytes, which this rank has sent; ratio = raw_bytes / wire_bytes;
            planned_chunks, the number of chunks whose order was predicted; transport of the data;
            topology of dense allreduces; seconds by stage, summed over the lanes: queue, encode,
            exchange, reduce, gather, decode; and parameters, a list of {"name", "numel", "rule",
            "codec"}, where codec is "raw" in a bucket too small to be compressed, and int4 where
            topk would send more bytes.
        """
        return {**self._session.summary(self.steps), "parameters": self._table()}

    def describe(self) -> str:
        """Return, as text, what this rank waits for, and the engine's last events. May be called at
        any time from any thread, also while a step hangs."""
        return self._session.describe()

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and momentum of this rank. Each rank saves its own dict.

        Returns:
            {"format", "codec", "world", "rank", "steps", "sparse", "residuals": {parameter:
            {"first": t, "second": t, "momentum": t}}} with flat float32 tensors on the host: first
            in units of a gradient, second in units of the mean, momentum only if the exchange owns
            it.
        """
        memory, sparse = self._session.memory(), self._sparse()
        return checkpoint.pack(memory, self.codec, self.world_size, self.rank, self.steps, sparse)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved residuals and momentum, in any world size. With the same buckets the results
        are bit-identical to those of a run that was never interrupted.

        Args:
            saved: this rank's state_dict(), or a gathered_state_dict(), or the list of all ranks'
                dicts. The last two may be of another world size (merge_state_dicts).

        Raises:
            InvalidArgumentError: the dict does not fit; nothing was changed.
        """
        residuals, steps = self.check_state_dict(saved)
        if self._warms_up(steps) != self._warming_up:
            self._take_phase(warming_up=not self._warming_up)
        self._session.load(residuals, steps)
        self.steps = steps

    def check_state_dict(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[checkpoint.Residuals, int]:
        """Return the residuals and steps that load_state_dict() would load. Raises its errors."""
        residuals, steps = checkpoint.unpack(saved, self.world_size, self.rank)
        self._parameters.check(residuals)
        checkpoint.check_momentum(residuals, self._owns_momentum())
        return residuals, steps

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all ranks in one dict, on rank 0, which can save them all.

        All ranks call it; the other ranks get a dict without content. load_state_dict() takes it on
        every rank, in any world size. Rank 0 needs memory for all ranks' residuals: 8 bytes per
        parameter and rank, 12 with momentum.
        """
        return gather(self.state_dict(), self._process_group)

    # Recovery and the end.

    def fail(self, error: errors.Error) -> errors.Error:
        """Fail the exchange on every rank with this error as the reason, unless it has failed
        before. Returns the first reason."""
        check_kind("error", error, errors.Error, "a thinwire.Error")
        return self._session.abort(error)

    def recover(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        made: Mapping[str, int] | int | None = None,
    ) -> Recovery:
        """After an error: drop the failed connections, and continue in a new torch group of any
        size with this rank's residuals. All ranks of the new group call it; a new rank calls it on
        a new exchange. The ranks agree on a step, and connect at the next use.

        Args:
            process_group: the new group; None: the default group.
            made: the number of steps whose means the optimizer has applied: an int for all
                parameters, or a dict of the parameters that differ from the default. None, the
                default: a step counts as made when all of its means came back.

        Returns:
            The agreement. If it is not `equal`, the caller copies parameters, buffers and the
            optimizer's state from rank `source`. No residual is lost or sent twice: residuals are
            those after the agreed step, and a failed step is undone. Those of a lost rank are gone.

        Raises:
            InvalidArgumentError: torch has no process group.
            MismatchError: the ranks are not of one run.
            PeerLostError: a rank of the new group was lost during the call. Call it again, in
                another group.
            DataLossError: the only rank with consistent parameters was lost while it sent them.
        """
        made = plain(made)
        check_kind("made", made, (int, Mapping, type(None)), "steps, steps by parameter, or None")
        members = resolve(process_group, "recover")
        now, before = self._session.dissolve()
        # "auto" has one codec for all parameters, and others on trial.
        codec = self.config.codec if self._auto is None else self._rules.by_pattern["*"]
        mine = progress_of(
            self._session.ledger, codec, self.config.momentum, self.steps, made, users_of(members),
            self._whole,
        )  # fmt: skip
        with agree.agreeing("a step to go on from", members):
            agreement = Agreement(mine, members)
            kept = agreement.choose(now, before, self._session.ledger.touched())
            kept = agreement.share_momentum(kept, self._sparse())
        if kept:
            kept = fit(kept, self.world_size, dist.get_world_size(members))
        self._process_group, self.steps = process_group, agreement.result.step
        if self._auto is not None:
            self._auto.settle(process_group, agreement.goal.codec)
            self._rules = Rules(agreement.goal.codec)
        self._plan.pop("codec", None)  # a new rank may have passed another one, and has the goal's
        self._go_on(agreement.goal.codec, agreement.goal.momentum, kept)
        if self._warm_up is not None:  # some ranks may have passed its end, and others not
            self._take_phase(warming_up=self._warms_up(self.steps))
        return agreement.result

    def _take_replica(
        self, result: Recovery, module: torch.nn.Module | None, optimizer: Optimizer | None
    ) -> None:
        """Copy the replica of the source, unless all are equal. Until the copy is complete, this
        rank cannot be the source of a later recovery."""
        if result.equal:
            return
        members = resolve(self._process_group, "recover")
        self._whole = dist.get_rank(members) == result.source
        with agree.agreeing("the same replica", members):
            agree.replica_from_rank(result.source, module, optimizer, members)
        self._whole = True

    @property
    def lost_last_step(self) -> bool:
        """True if all of the last step was submitted, and some of its means did not come back."""
        return self._session.ledger.lost

    def _sparse(self) -> list[str]:
        """The parameters that are sent as entries; their momentum differs between ranks."""
        return [
            row["name"]
            for row in self._parameters.table(self._session.communicator, self._rules)
            if row["codec"] != "raw" and codec_info(row["codec"]).entries
        ]

    def close(self) -> None:
        """Close the connections. This also happens when the object is collected, and at exit."""
        COMPRESSED.pop(self, None)
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        raise errors.InvalidArgumentError(
            f"{type(self).__name__} holds connections and can't be pickled; save its "
            "state_dict() instead"
        )
