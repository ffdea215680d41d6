"""GradientExchange: the compressed mean of gradients over all ranks, and all that it keeps between
steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import config, errors
from thinwire.arguments import check_call, check_flag, check_kind, check_whole, wrong
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

    Adapters to frameworks are thin layers over it: thinwire.torch.State is one for DDP. Ranks meet
    at the first use; all must use the same values. After an error of a peer or of the network the
    exchange stays failed, and every later use raises the first reason, until recover(). Not
    thread-safe, but for close().

    Args:
        codec: a spec such as "int4" (default) or "topk:density=0.01"; or {pattern of parameter
            names: spec}, of which the first match wins; or "auto".
        process_group: torch's group; None: the default group, which may come later than this
            object.
        parameters: elements of each parameter, by name. If it is given, a rule that matches none of
            them is an error, and loading checks the names. None: they become known with their
            buckets.
        structure: names of parameters by the words "1d" and "embedding", for rules by
            structure.
        purpose: names the kind of user. Ranks match exchanges of one purpose by their order.
        warm_up_steps: so many steps go by warm_up_codec, and the rest by `codec`. An adapter calls
            between_steps().
        warm_up_codec: "fp32", "bf16" or "int8"; None: fp32.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default. With momentum the exchange returns momentum in place of gradients; see
            take_momentum().

    Raises:
        InvalidArgumentError: an option, codec, rule or policy cannot be.
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
        self.steps = 0  # the number that were made, with those of a state dict that was loaded
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
        self._session = Session(Membership(process_group, purpose), settings)
        self._session.close_with(self)
        self.momentum = OwnedMomentum(settings.momentum, settings.nesterov)
        self._step_tensors: list[Any] = []  # those of the last whole step, and their buckets
        self._step_buckets: list[FlatBucket] = []
        self._whole = True  # parameters are of one step: no recovery was cut that replaces them
        self._warming_up = False  # whether the exchange is that of the warm-up
        self._warm_up = plan(
            warm_up_steps, warm_up_codec, self._rules, settings.momentum, automatic=self.automatic
        )
        if self._warm_up is not None:
            self._take_phase(warming_up=True)

    # Settings.

    @property
    def codec(self) -> str | dict[str, str]:
        """The codec or the rules in use; with "auto" or a warm-up it changes."""
        rules = self._rules.by_pattern
        return rules if self._rules.needs_names else next(iter(rules.values()))

    @property
    def rules(self) -> Rules:
        """Those in use; of a warm-up those after it."""
        return self._rules if self._warm_up is None else self._warm_up.then

    @property
    def config(self) -> config.Config:
        """All settings, as they were resolved."""
        return self._session.config

    @property
    def automatic(self) -> bool:
        """True if the exchange chooses its codec itself (codec="auto")."""
        return self._auto is not None

    @property
    def rank(self) -> int:
        """Within the process group. InvalidArgumentError while there is none."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Ranks of the process group. InvalidArgumentError while there is none."""
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
        """Describes a flat buffer that will be submitted in many steps. Make it once.

        name: equal on all ranks, and of one bucket only; None: no residuals are kept, and the
          ranks' calls match by their order. parts: (parameter name, elements), or Part
          for a piece of a parameter, in the buffer's order and without gaps. dtype: float32,
          bfloat16 or float16. priority: under "p3" lower goes first, so it is the number in forward
          order. shape: of the parts, in words that strict=True compares between ranks. op: "mean"
          or "sum". collective: "all_reduce", or "reduce_scatter" with submit(..., result).
          InvalidArgumentError if no rule matches a parameter, or if a state dict was loaded
          that has it with another size."""
        if not isinstance(dtype, torch.dtype) or dtype not in tensors.DTYPES:
            raise errors.InvalidArgumentError(
                f"bucket '{name}': got dtype {dtype!r}, expected float32, bfloat16 or float16"
            )
        listed = parts_of(parts)
        check_whole("priority", priority, *_INT32)
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
        """Starts to replace the buffer by its mean over all ranks; wait() must follow, once. With
        `result`, which a reduce-scatter needs, it goes there, and the buffer stays.

        buffer: contiguous, with the bucket's dtype and number of elements, on the CPU or a GPU, the
          same device always. Nothing may touch it until wait() has returned."""
        self._check(bucket, buffer)
        if self._auto and self._auto.observer:
            self._auto.observer.submitting(bucket, buffer)
        return self._session.submit(bucket, buffer, result)

    def wait(self, submission: InFlight) -> None:
        """Returns when the buffer holds the mean; on a GPU, for later work of the current stream.
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
        """As submit(), for frameworks that want a future: it completes with the buffer after
        `finish` has run on another thread, and after those of earlier submissions. For codec="auto"
        these buckets come in backward order, and their priorities are their numbers in it."""
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
        """Says once a step that all of its buckets have been submitted. repeats: the next step will
        submit the same buckets, which lets their order be predicted; None: it may submit others,
        and its order is predicted where this step had the buckets of the one before."""
        if repeats is not None:
            check_flag("repeats", repeats)
        self.steps += 1
        comparing = self._auto is not None and self._auto.comparing
        self._session.end_step(repeats=False if comparing else repeats)

    def between_steps(self, device: torch.device, finish: Callable[[], None] | None = None) -> None:
        """Once a step on all ranks, when codec="auto" or a warm-up's end may change the codec.
        `finish` waits until the adapter has nothing in flight; None: start() was used. Buckets stay
        valid. PeerLostError if a rank was lost."""
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
        """Before the first step, where codec="auto" can't predict one: time steps with each of
        these codecs in turns, from the most accurate to the least, in place of a prediction. Does
        nothing for another codec. InvalidArgumentError for a codec that the library does not
        know."""
        if isinstance(codecs, str) or not isinstance(codecs, Sequence):
            raise wrong("codecs", codecs, "several codecs, such as ('fp32', 'int8')")
        for codec in codecs:
            codec_info(codec)
        if self._auto is not None:
            self._auto.try_each(codecs)

    def _take(self, choice: Choice) -> None:
        """Goes on with what codec="auto" has chosen. A codec that the session has costs no new
        connection. All ranks call it, with nothing in flight."""
        self._rules = Rules(choice.codec, self._structure, choice.among)
        if self._rules.joined != self.config.codec:
            self._go_on(self._rules.joined, self.config.momentum, self._session.memory())

    def _warms_up(self, steps: int) -> bool:
        """True if after so many steps the exchange is that of a warm-up."""
        return self._warm_up is not None and steps < self._warm_up.steps

    def _take_phase(self, *, warming_up: bool) -> None:
        """Goes on as in the warm-up, or as after it; residuals and counts are kept. All ranks call
        it, with nothing in flight."""
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
        """Closes the session, and opens one that starts from `kept` at the next step; allowed after
        a failure."""
        membership = Membership(self._process_group, self._purpose)
        self._session = self._session.successor(membership, codec, momentum, kept, self.steps)
        self._session.close_with(self)

    # Whole steps, for loops that have all gradients at once.

    def reduce(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, as one step; returns when all is done.

        named: tensors by the name that rules and residuals go by; any shape, float32, bfloat16 or
        float16. All ranks pass the same names and shapes, in the same order."""
        tensors.check_named(named, self.rank)
        for name, tensor in named.items():
            tensors.check(tensor, self.rank, lambda name=name: name)
            tensors.check_writable(tensor, self.rank, name)
        means = self._means_of(named, list(named.values()))
        with torch.no_grad():
            for tensor, mean in zip(named.values(), means, strict=True):
                tensor.copy_(mean)

    def reduce_gradients(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces the .grad of parameters by the mean over all ranks (or by the momentum, if the
        exchange owns it), as one step; call it between backward() and step().

        named: parameters by name, as dict(model.named_parameters()), the same on all ranks in the
        same order. A missing .grad counts as zeros, and becomes the mean."""
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
        """Exchanges one value for each tensor as a step, and returns the means in their order."""
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
        except errors.Error as error:  # the peers must not wait for what will not come
            raise errors.again(self.fail(error)) from None
        self.between_steps(self._step_buckets[0].tensors[0].device)
        return [mean for bucket in self._step_buckets for _, mean in bucket.means()]

    # Momentum.

    def take_momentum(
        self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str | None]
    ) -> None:
        """Moves momentum and weight decay out of an optimizer's param groups that still have them,
        into the exchange. From then on the results of the exchange are momentum.

        optimizer: torch.optim.SGD. name_of: a parameter's name; None: its buffer is dropped.
        InvalidArgumentError if the exchange owns no momentum, or for another optimizer."""
        if found := self.momentum.take(optimizer, name_of):
            self.load_momentum(found)

    def load_momentum(self, momentum: Mapping[str, torch.Tensor]) -> None:
        """Replaces the momentum of parameters, in any shape and dtype. Nothing may be in flight."""
        tensors.check_named(momentum, rank_or_0(self._process_group))
        momentum = {private.plain_name(name): buffer for name, buffer in momentum.items()}
        for name, buffer in momentum.items():
            self._parameters.add_size(name, buffer.numel())
        memory = checkpoint.with_momentum(self._session.memory(), self._laid_out(momentum))
        self._session.load(memory, self.steps)

    def _laid_out(self, momentum: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same, with elements in the order that they have in buckets."""
        return momentum

    def _owns_momentum(self) -> bool:
        """Now, or after a warm-up."""
        later = 0.0 if self._warm_up is None else self._warm_up.momentum
        return max(self.config.momentum, later) != 0

    # Statistics and checkpoints.

    def _table(self) -> list[dict[str, Any]]:
        """stats()["parameters"]."""
        return self._parameters.table(self._session.communicator, self._rules)

    def stats(self) -> dict[str, Any]:
        """steps, all_reduces, raw_bytes (a ring of fp32 would have sent them), wire_bytes (sent by
        this rank), ratio = raw / wire, planned_chunks (their order was predicted); transport (what
        the data runs on) and topology (the way that dense allreduces go); seconds per stage, summed
        over the lanes: queue, encode, exchange, reduce, gather, decode; parameters: a
        list of {"name", "numel", "rule", "codec"}, where codec is "raw" in a bucket too small to be
        compressed, and int4 where topk would cost more bytes."""
        return {**self._session.summary(self.steps), "parameters": self._table()}

    def describe(self) -> str:
        """Return, as text, who waits for whom on this rank, and the engine's last events. At any
        time, from any thread; also while a step hangs."""
        return self._session.describe()

    def state_dict(self) -> dict[str, Any]:
        """The residuals and momentum of this rank; every rank saves its own.

        {"format", "codec", "world", "rank", "steps", "sparse", "residuals": {parameter: {"first":
        t, "second": t, "momentum": t}}} with flat float32 tensors on the host: first in units of a
        gradient, second in units of the mean, momentum only if the exchange owns it."""
        memory, sparse = self._session.memory(), self._sparse()
        return checkpoint.pack(memory, self.codec, self.world_size, self.rank, self.steps, sparse)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes this rank's state_dict(), or gathered_state_dict(), or the list of all ranks'
        dicts, which may be of another world size (merge_state_dicts). With the same buckets,
        training goes on bit by bit as if it had never stopped. InvalidArgumentError if the dict
        does not fit, which changes nothing."""
        residuals, steps = self.check_state_dict(saved)
        if self._warms_up(steps) != self._warming_up:
            self._take_phase(warming_up=not self._warming_up)
        self._session.load(residuals, steps)
        self.steps = steps

    def check_state_dict(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[checkpoint.Residuals, int]:
        """Return the residuals and steps that load_state_dict() would take. Raises as that does."""
        residuals, steps = checkpoint.unpack(saved, self.world_size, self.rank)
        self._parameters.check(residuals)
        checkpoint.check_momentum(residuals, self._owns_momentum())
        return residuals, steps

    def gathered_state_dict(self) -> dict[str, Any]:
        """The state dicts of all ranks in one, on rank 0; all ranks call it, and the others get one
        without content. For checkpoints that rank 0 alone writes; load_state_dict() takes it on
        every rank, in any world size. Rank 0 needs memory for all ranks' residuals: 8 bytes a
        parameter and rank, 12 with momentum."""
        return gather(self.state_dict(), self._process_group)

    # Recovery and the end.

    def fail(self, error: errors.Error) -> errors.Error:
        """Fails the exchange on every rank, each of which is told this reason. The first reason
        stays, and is returned."""
        check_kind("error", error, errors.Error, "a thinwire.Error")
        return self._session.abort(error)

    def recover(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        made: Mapping[str, int] | int | None = None,
    ) -> Recovery:
        """After an error: leaves the failed connections, and goes on in a new group of torch's, of
        any size, with what this rank has kept. Every rank of the new group calls it; a new rank, on
        a new exchange. The ranks agree on a step, and connect at the next use.

        Args:
            process_group: the new group; None: the default group.
            made: the steps whose means the optimizer has, of all parameters, or of those for which
                it is not the default. A step counts as made when all of it came back.

        Returns:
            The agreement. Where it is not `equal`, the caller takes parameters, buffers and the
            optimizer's state from its `source`. No residual is lost, and none is sent twice:
            residuals are those after the agreed step, with a failed one taken back. Those of a lost
            rank are gone.

        Raises:
            InvalidArgumentError: torch has no process group.
            MismatchError: the ranks are not of one run.
            PeerLostError: a rank of the new group was lost meanwhile. Call it again, in another.
            DataLossError: so was the only rank with whole parameters, while it handed these over.
        """
        check_kind("made", made, (int, Mapping, type(None)), "steps, steps by parameter, or None")
        members = resolve(process_group, "recover")
        now, before = self._session.dissolve()
        codec = self.config.codec if self._auto is None else self.codec  # not those that took turns
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
        self._go_on(agreement.goal.codec, agreement.goal.momentum, kept)
        if self._warm_up is not None:  # the ranks may have stopped on both sides of its end
            self._take_phase(warming_up=self._warms_up(self.steps))
        return agreement.result

    def _take_replica(
        self, result: Recovery, module: torch.nn.Module | None, optimizer: Optimizer | None
    ) -> None:
        """Makes the replica that of the source, unless all are equal. Until all of it is here, this
        rank is no source of a later recovery."""
        if result.equal:
            return
        members = resolve(self._process_group, "recover")
        self._whole = dist.get_rank(members) == result.source
        with agree.agreeing("the same replica", members):
            agree.replica_from_rank(result.source, module, optimizer, members)
        self._whole = True

    @property
    def lost_last_step(self) -> bool:
        """True if the last step was submitted as a whole, and a part of it did not come back."""
        return self._session.ledger.lost

    def _sparse(self) -> list[str]:
        """The parameters that are sent as entries, whose momentum is this rank's own."""
        return [
            row["name"]
            for row in self._parameters.table(self._session.communicator, self._rules)
            if row["codec"] != "raw" and codec_info(row["codec"]).entries
        ]

    def close(self) -> None:
        """Closes the connections. Happens by itself when the exchange goes, and at exit."""
        COMPRESSED.pop(self, None)
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        raise errors.InvalidArgumentError(
            f"{type(self).__name__} holds connections and can't be pickled; save its "
            "state_dict() instead"
        )
