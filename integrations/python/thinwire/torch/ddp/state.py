"""State: the GradientExchange behind DDP's communication hook."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import check_kind, is_number, plain, wrong
from thinwire.codec import codec_info
from thinwire.errors import warn
from thinwire.torch import private, tensors
from thinwire.torch.ddp.adam import OneBitAdam, is_adam
from thinwire.torch.ddp.layout import Layout, in_bucket, in_shape
from thinwire.torch.exchange.checkpoint import Memory, Residuals, with_momentum
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec, Structure
from thinwire.torch.exchange.waiter import failed_future
from thinwire.torch.exchange.warm_up import EXACT
from thinwire.torch.group import rank_or_0, resolve
from thinwire.torch.optimizer import checks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from thinwire.options import Settings

_LOOK_STEPS = 16  # between two looks for parameters that were added or replaced


class State(GradientExchange):
    """Compresses the gradients of one DDP model: the state of torch's communication hook.

    compress(ddp, ...) creates one and registers the hook. With
    ddp.register_comm_hook(State(codec="int4"), hook) residuals are named "p0", "p1", ..., unless
    `names` is given; rules by name require `names`.

    A state can be created before torch.distributed.init_process_group. All ranks pass the same
    values. Ranks connect at the first backward pass; several states of a group are matched by the
    order of their first backward passes. A copied or unpickled state has no connections. After an
    error the state stays failed, and every later use raises the first reason, until recover().

    Args:
        codec: as compress() takes it.
        process_group: torch's group of the model; None: the default group.
        names: parameters and their names, for rules, residuals and checkpoints.
        structure: the parameter names that the words "1d" and "embedding" stand for in rules.
        clip_value: clips each rank's gradients to [-clip_value, clip_value] before the exchange.
        clip_norm: scales each parameter's gradient on each rank to a norm of at most
            clip_norm / sqrt(ranks) (DGC's local clipping, arXiv 1712.01887, section 3.2).
        warm_up_steps: the number of first steps that use warm_up_codec in place of `codec`.
        warm_up_codec: None means fp32.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default. With momentum=... call take_momentum(optimizer) before the first backward
            pass.

    Raises:
        InvalidArgumentError: a codec, rule or value is not valid.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        names: Mapping[torch.Tensor, str] | None = None,
        structure: Structure | None = None,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        warm_up_steps: int | None = None,
        warm_up_codec: str | None = None,
        **options: Unpack[Settings],
    ) -> None:
        self._adam: OneBitAdam | None = None
        self._clip_value = _limit("clip_value", clip_value)
        self._clip_norm = _limit("clip_norm", clip_norm)
        if names is not None:
            tensors.check_parameters(names, rank_or_0(process_group))
            names = {p: private.plain_name(name) for p, name in names.items()}
        sizes = None if names is None else {name: p.numel() for p, name in names.items()}
        settings: Any = options  # resolve() checks the names; None means the default
        super().__init__(
            codec,
            process_group,
            parameters=sizes,
            structure=structure,
            purpose="state",
            warm_up_steps=warm_up_steps,
            warm_up_codec=warm_up_codec,
            **settings,
        )
        if names is None and self.rules.needs_names:
            raise errors.InvalidArgumentError(
                "codec goes by parameter names, which this state does not know; use "
                "compress(ddp, codec=...), or pass names={parameter: name}"
            )
        self._layout = Layout(names)
        self._bypassed: dict[str, int] = {}
        self._ddp: Callable[[], Any] = lambda: None  # the model, for join()
        self._module: Callable[[], torch.nn.Module | None] = lambda: None
        self._reduced: set[torch.Tensor] = set()  # parameters, including those that DDP ignores
        self._frozen: list[torch.Tensor] = []
        self._has_forward, self._factor = False, 1.0
        self._group: dist.ProcessGroup | None = None  # of the model, from its first bucket on

    # The warm-up.

    @property
    def warmed_up(self) -> bool:
        """True if the last backward pass used `codec`, and not warm_up_codec."""
        return not self._warms_up(self.steps)

    def _warms_up(self, steps: int) -> bool:
        """Return whether the exchange uses warm_up_codec after so many steps. The change comes when
        the next step begins: 1-bit Adam needs the momentum after the warm-up's last step."""
        return self._warm_up is not None and steps <= self._warm_up.steps

    def _momentum_of_warm_up(self) -> float:
        """Return 0 with 1-bit Adam, which keeps its momentum itself during the warm-up."""
        return super()._momentum_of_warm_up() if self._adam is None else 0.0

    def _end_warm_up(self) -> None:
        super()._end_warm_up()
        if self._adam is not None:
            found = {p: self._adam.momentum_of(p) for p in self._layout.parameters()}
            named = {
                self._layout.name_of(p): in_bucket(p, m) for p, m in found.items() if m is not None
            }
            self._session.load(with_momentum(self._session.memory(), named), self.steps)

    # Momentum.

    def take_momentum(
        self,
        optimizer: Optimizer,
        name_of: Callable[[torch.Tensor], str | None] | None = None,
    ) -> None:
        """Move momentum and weight decay out of the optimizer into this state.

        From then on parameters' .grad after backward() is the momentum (or the Nesterov step), and
        the optimizer applies it with its learning rate, so schedulers work as before. Weight decay
        is added to the gradients before the exchange; it is in group["thinwire_weight_decay"].
        step() raises InvalidArgumentError if gradients were changed after backward(), or if
        momentum or weight decay was set again; clip with State(clip_value=...).

        Args:
            optimizer: torch.optim.SGD whose momentum is 0 or the state's; existing momentum buffers
                move into the state. Or torch.optim.Adam or AdamW with betas[0] equal to the state's
                momentum: 1-bit Adam (arXiv 2102.02888), which requires warm_up_steps; the variance
                is frozen after them. In the paper the warm-up takes 15 to 20 % of a run.
            name_of: returns a parameter's name; None: the name that this state uses.
        """
        check_kind("optimizer", optimizer, Optimizer, "one of torch.optim")
        if self.momentum.paired:
            raise errors.InvalidArgumentError("this state is paired with an optimizer already")
        if is_adam(optimizer) and self.config.momentum:
            warm_up = self._warm_up
            if warm_up is not None and warm_up.first.joined != EXACT:
                raise errors.InvalidArgumentError(
                    f"warm_up_codec={warm_up.first.joined!r} with 1-bit Adam, expected {EXACT!r}, "
                    "since its variance is taken from the warm-up; leave warm_up_codec out"
                )
            self._take_adam(OneBitAdam(optimizer, None if warm_up is None else warm_up.steps))
        else:
            super().take_momentum(optimizer, name_of or self._layout.name_of)

    def _laid_out(self, momentum: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        by_name = {self._layout.name_of(p): p for p in self._layout.parameters()}
        laid_out = dict(momentum)
        for name, buffer in momentum.items():
            parameter = by_name.get(name)
            if parameter is not None and parameter.shape == buffer.shape:
                laid_out[name] = in_bucket(parameter, buffer)
        return laid_out

    def _take_adam(self, adam: OneBitAdam) -> None:
        if self.config.momentum != adam.beta:
            raise errors.InvalidArgumentError(
                f"the state's momentum is {self.config.momentum}, expected betas[0] = {adam.beta}; "
                f"make it with momentum={adam.beta}, or leave that out of compress()"
            )
        self.momentum.pair(adam.optimizer)
        self._adam = adam
        adam.install(lambda: self.warmed_up)
        self._take_phase(warming_up=self._warms_up(self.steps))  # its momentum is Adam's now

    # Buckets of DDP.

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce the bucket to its mean over all ranks, in place. A failure is raised by the future
        and so by backward(); an exception from here would leave DDP's reducer in mid-step.
        InvalidArgumentError, at once, for anything else than a bucket: DDP's reducer in Python
        calls hooks with a gradient, and ignores the future."""
        check_kind(
            "bucket", bucket, dist.GradBucket,
            "the GradBucket that DDP hands its hook, unless torch._dynamo.config.optimize_ddp is "
            "'python_reducer'",
        )  # fmt: skip
        try:
            return self._reduce(bucket)
        except errors.Error as error:
            return failed_future(self.fail(error))

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._group is None:
            self._group = resolve(self._process_group, "state")
        buffer, step = bucket.buffer(), self._layout.step
        if step.begin(bucket):
            self._end_ddp_step()
        if step.number == 0 and self.steps:
            self.between_steps(buffer.device)
        tensors.check(buffer, self.rank, lambda: self._layout.describe(bucket))
        if step.number == 0:
            self._check_reduced()
            self._factor = self._join_factor(buffer.device)
        finish = self._prepare(bucket)
        made = self._layout.bucket(self, bucket)
        self._lay_out_loaded()
        future = self.start(made, buffer, finish)
        if step.ends(bucket):
            self._end_ddp_step()
        return future

    def _end_ddp_step(self) -> None:
        self.end_step(repeats=self._layout.end_step())

    def _prepare(self, bucket: dist.GradBucket) -> Callable[[], None] | None:
        """Clip this rank's gradients in place and, if the exchange owns the momentum, add weight
        decay, as the optimizer would. Return a function to call when the bucket holds the result,
        or None."""
        if self._clip_value is not None:
            bucket.buffer().clamp_(-self._clip_value, self._clip_value)
        if self._clip_norm is not None:
            limit = self._clip_norm / math.sqrt(self.world_size)
            for gradient in bucket.gradients():
                norm = gradient.norm()
                gradient.mul_(torch.where(norm > limit, limit / norm, 1.0))
        momentum, factor, buffer = self.momentum, self._factor, bucket.buffer()
        momentum.check()
        if not momentum.paired:
            return None if factor == 1 else lambda: _scale(buffer, factor)
        parts = [
            (parameter, in_shape(parameter, gradient))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        with torch.no_grad():
            for parameter, gradient in parts:
                if decay := momentum.weight_decay_of(parameter):
                    gradient.add_(parameter.detach(), alpha=decay)

        def finish() -> None:
            if factor != 1:
                _scale(buffer, factor)
            for parameter, gradient in parts:
                momentum.mark(parameter, gradient)

        return finish

    def _join_factor(self, device: torch.device) -> float:
        """Return the factor from the mean over all ranks to the mean over those that have not
        joined; once per step."""
        ddp = self._ddp()
        active, self._has_forward = self._has_forward, False
        if ddp is None or not private.divides_by_those_left(ddp):
            return 1.0
        count = torch.tensor(float(active), device=device)
        dist.all_reduce(count, group=self._process_group)
        return self.world_size / max(1.0, count.item())

    def watch(self, module: torch.nn.Module, ignored: Collection[str]) -> None:
        """From now on, backward() raises InvalidArgumentError for a parameter of the module that is
        added or unfrozen later, because DDP would not reduce it. ignored: names of the parameters
        that DDP leaves out."""
        named = dict(module.named_parameters())
        self._module = weakref.ref(module)
        self._reduced = {p for name, p in named.items() if p.requires_grad or name in ignored}
        self._frozen = [p for p in named.values() if not p.requires_grad]

    def _check_reduced(self) -> None:
        module = self._module()
        if module is None:
            return
        thawed = any(p.requires_grad for p in self._frozen)
        if thawed or self.steps % _LOOK_STEPS == 0:  # naming all parameters is slow
            checks.check_reduced(
                module,
                self._reduced,
                "wrap the module in a new DistributedDataParallel, and compress that",
            )

    def note_bypassed(self, sizes: Mapping[str, int]) -> None:
        """Note the parameters (elements by name) that DDP reduces itself, without this state."""
        self._bypassed = dict(sizes)
        warn(
            f"delay_all_reduce_named_params takes {len(sizes)} parameters past every hook, so DDP "
            f"sends them uncompressed: {', '.join(sorted(sizes))}; leave it out to compress them"
        )

    def _table(self) -> list[dict[str, Any]]:
        return [
            *super()._table(),
            *(
                {"name": name, "numel": numel, "rule": None, "codec": "delayed by DDP"}
                for name, numel in self._bypassed.items()
            ),
        ]

    # Checkpoints and recovery.

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and momentum of this rank, as GradientExchange.state_dict(), with
        elements in the order of their indices for every memory format of the parameters."""
        self._lay_out_loaded()
        saved = super().state_dict()
        saved["residuals"] = {
            name: {kind: self._layout.for_checkpoint(name, flat) for kind, flat in memory.items()}
            for name, memory in saved["residuals"].items()
        }
        return saved

    def check_state_dict(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[Residuals, int]:
        """Return the residuals and steps that load_state_dict() would load. Raises its errors."""
        residuals, steps = super().check_state_dict(saved)
        return {name: self._from_checkpoint(name, m) for name, m in residuals.items()}, steps

    def _from_checkpoint(self, name: str, memory: Memory) -> Memory:
        first, second, momentum = memory
        laid_out = self._layout.from_checkpoint
        return Memory(
            laid_out(name, first),
            laid_out(name, second),
            None if momentum is None else laid_out(name, momentum),
        )

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load saved residuals and momentum, as GradientExchange.load_state_dict()."""
        super().load_state_dict(saved)
        self._layout.loaded(self._session.restored)

    def load_momentum(self, momentum: Mapping[str, torch.Tensor]) -> None:
        """Replace the momentum of these parameters, as GradientExchange.load_momentum()."""
        self._lay_out_loaded()
        super().load_momentum(momentum)

    def _lay_out_loaded(self) -> None:
        """Reorder the loaded residuals of parameters that have become known since the load into the
        order of their buckets. In the first step after a load this waits for buckets in flight."""
        kept = self._session.restored
        laid_out = {}
        for name in self._layout.newly_known():
            laid_out[name] = self._from_checkpoint(name, kept[name])
        if laid_out:
            self._session.replace(laid_out)

    def recover(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> Recovery:
        """After an error: continue in a new group, as Compression.recover(); a new rank calls it on
        a new state. Then wrap the model in a new DDP, and register the hook with this state again.

        Args:
            process_group: None: the default group.
            module: if some ranks have made a step that others have not, its parameters and buffers
                are copied from a rank that has. None: the caller must copy them if the result is
                not `equal`.
            optimizer: likewise, with its state.
        """
        check_kind("module", module, (torch.nn.Module, type(None)), "a torch.nn.Module, or None")
        check_kind("optimizer", optimizer, (Optimizer, type(None)), "one of torch.optim, or None")
        result = super().recover(process_group, made=self.steps - self.lost_last_step)
        self._layout.step.abandon()
        if self._group not in (None, resolve(process_group, "recover")):
            private.keep_former_group(self, self._group)  # the old model may outlive it
        self._group = None
        self._take_replica(result, module, optimizer)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedState, (self.codec,)


def follow_joins(state: State, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """With ddp.join(divide_by_initial_world_size=False), make means those of the ranks that have
    not joined yet. Joined ranks take part in the others' steps without a forward pass."""
    ddp.register_forward_pre_hook(_ForwardWatch(state))
    state._ddp = weakref.ref(ddp)


class _ForwardWatch:
    """Notes each forward pass of a DDP model in its State. In a copy of the model it does
    nothing."""

    def __init__(self, state: State | None = None) -> None:
        self._state = (lambda: None) if state is None else weakref.ref(state)

    def __call__(self, *_: Any) -> None:
        if (state := self._state()) is not None:
            state._has_forward = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardWatch, ()


class CopiedState:
    """Stands in a copied DDP model (copy.deepcopy, pickle, AveragedModel) for the original's State.

    Connections and residuals belong to the original only. DDP registers no hook in a copy, so a
    copied model does not use this object. Any use of it raises an error with the fix."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # the original's at the time of the copy

    def reduce_bucket(self, _bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a failed future, so that backward() raises the error."""
        return failed_future(self._error())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for optional methods
            raise AttributeError(name)
        raise self._error()

    def _error(self) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            "this is a copy of a State (deepcopy, pickle or AveragedModel), which has no "
            "connections and no residuals; wrap the copied module in a new DDP model and call "
            "compress(ddp, codec=...), and load_state_dict() if it is to go on with residuals"
        )


def momentum_for(rules: Mapping[str, str] | str, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the options momentum and nesterov of this optimizer if a codec needs them, else {}."""
    specs = [rules] if isinstance(rules, str) else rules.values()
    if optimizer is None or all(codec_info(spec).momentum == "unused" for spec in specs):
        return {}
    group = optimizer.param_groups[0]
    if is_adam(optimizer):
        return {"momentum": group["betas"][0]}
    return {"momentum": group.get("momentum", 0.0), "nesterov": group.get("nesterov", False)}


def _scale(tensor: torch.Tensor, factor: float) -> None:
    tensor.mul_(factor)


def _limit(name: str, limit: float | None) -> float | None:
    if limit is None:
        return None
    value = plain(limit)
    is_float = is_number(value) and (value == math.inf or value <= sys.float_info.max)
    if not (is_float and value > 0):
        raise wrong(name, limit, "a number above 0")
    return value
