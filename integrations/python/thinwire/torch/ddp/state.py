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
from thinwire.arguments import check_kind, is_number, wrong
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

    compress(ddp, ...) makes one and registers the hook. With
    ddp.register_comm_hook(State(codec="int4"), hook) residuals are named "p0", "p1", ..., unless
    `names` is given, and rules by name need it.

    A state can be made before torch.distributed.init_process_group. All ranks use the same values.
    Ranks join the group and connect at the first backward pass; the states of a group are told
    apart by the order of that. A copied or unpickled state has no connections. After an error the
    state stays failed, and every later use raises the first reason, until recover().

    Args:
        codec: as compress() takes it.
        process_group: torch's group of the model; None: the default group.
        names: parameters and their names, for rules, residuals and checkpoints.
        structure: names of parameters by the words "1d" and "embedding", for rules by structure.
        clip_value: clips each rank's gradients to [-clip_value, clip_value] before the exchange.
        clip_norm: scales each parameter's gradient of each rank to a norm of at most
            clip_norm / sqrt(ranks) (DGC's local clipping, arXiv 1712.01887, section 3.2).
        warm_up_steps: gradients go by warm_up_codec for so many steps before the codec takes over.
        warm_up_codec: None means fp32.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default. With momentum=... call take_momentum(optimizer) before the first backward
            pass.

    Raises:
        InvalidArgumentError: a codec, rule or value cannot be.
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
        settings: Any = options  # names are checked, and None stands for the default
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
        self._reduced: set[torch.Tensor] = set()  # of the module, with those that DDP ignores
        self._frozen: list[torch.Tensor] = []
        self._has_forward, self._factor = False, 1.0
        self._group: dist.ProcessGroup | None = None  # of the model, from its first bucket on

    # The warm-up.

    @property
    def warmed_up(self) -> bool:
        """True if the last backward pass went by the codec, and not by that of a warm-up."""
        return not self._warms_up(self.steps)

    def _warms_up(self, steps: int) -> bool:
        """Until the next step begins, since the optimizer's last step of the warm-up makes the
        momentum with which 1-bit Adam's exchange goes on."""
        return self._warm_up is not None and steps <= self._warm_up.steps

    def _momentum_of_warm_up(self) -> float:
        """1-bit Adam keeps its momentum itself."""
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
        the optimizer applies it with its learning rate, so schedulers keep their meaning. Weight
        decay is added to the gradients before the exchange; it is group["thinwire_weight_decay"]
        then. Changing gradients between backward() and step() is an InvalidArgumentError out of
        step(), as is momentum or weight decay that comes back; clip by State(clip_value=...).

        Args:
            optimizer: torch.optim.SGD with momentum 0 or the state's; buffers that it has already
                move along. Or torch.optim.Adam or AdamW with betas[0] as the state's momentum:
                1-bit Adam (arXiv 2102.02888), of a state with warm_up_steps, after which its
                variance is frozen. The paper takes 15 to 20 % of a run.
            name_of: a parameter's name; None: as this state names it.
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
        self._take_phase(warming_up=self._warms_up(self.steps))  # whose momentum is Adam's now

    # Buckets of DDP.

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks, in place. Failures come out of the future, and so
        out of backward(): an exception from here would leave DDP's reducer in mid-step."""
        try:
            check_kind("bucket", bucket, dist.GradBucket, "the bucket that DDP hands its hook")
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
        """Clips this rank's gradients in place and, if the exchange owns the momentum, adds weight
        decay, as the optimizer would have done. Returns a function to call when the bucket holds
        the result, if there is one."""
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
        """The factor from the mean over all ranks to that over those left; once a step."""
        ddp = self._ddp()
        active, self._has_forward = self._has_forward, False
        if ddp is None or not private.divides_by_those_left(ddp):
            return 1.0
        count = torch.tensor(float(active), device=device)
        dist.all_reduce(count, group=self._process_group)
        return self.world_size / max(1.0, count.item())

    def watch(self, module: torch.nn.Module, ignored: Collection[str]) -> None:
        """From now on a parameter of the module that is trained later, which DDP would not reduce,
        is an InvalidArgumentError in backward(). ignored: names of those that it leaves out."""
        named = dict(module.named_parameters())
        self._module = weakref.ref(module)
        self._reduced = {p for name, p in named.items() if p.requires_grad or name in ignored}
        self._frozen = [p for p in named.values() if not p.requires_grad]

    def _check_reduced(self) -> None:
        module = self._module()
        if module is None:
            return
        thawed = any(p.requires_grad for p in self._frozen)
        if thawed or self.steps % _LOOK_STEPS == 0:  # names of all parameters take a while
            checks.check_reduced(
                module,
                self._reduced,
                "wrap the module in a new DistributedDataParallel, and compress that",
            )

    def note_bypassed(self, sizes: Mapping[str, int]) -> None:
        """DDP reduces these parameters (elements by name) itself, so this state never sees them."""
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
        """As that of GradientExchange. Elements are in the order of their indices, whatever the
        parameters' memory format."""
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
        """Return the residuals and steps that load_state_dict() would take. Raises as that does."""
        residuals, steps = super().check_state_dict(saved)
        return {name: self._from_checkpoint(name, m) for name, m in residuals.items()}, steps

    def _from_checkpoint(self, name: str, memory: Memory) -> Memory:
        laid_out = (
            flat if flat is None else self._layout.from_checkpoint(name, flat) for flat in memory
        )
        return Memory(*laid_out)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As that of GradientExchange."""
        super().load_state_dict(saved)
        self._layout.loaded(self._session.restored)

    def load_momentum(self, momentum: Mapping[str, torch.Tensor]) -> None:
        """As that of GradientExchange."""
        self._lay_out_loaded()
        super().load_momentum(momentum)

    def _lay_out_loaded(self) -> None:
        """Puts what was loaded of parameters that have become known since then into the order of
        their buckets. In the first step after that it waits for the buckets that are in flight."""
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
        """After an error: go on in a new group, as Compression.recover(); a new rank, on a new
        state. Then wrap the model in a new DDP, and register the hook with this state again.

        Args:
            process_group: None: the default group.
            module: where some ranks have made a step that others have not, it takes parameters and
                buffers from one that has. None: the caller does so if the result is not `equal`.
            optimizer: likewise.
        """
        check_kind("module", module, (torch.nn.Module, type(None)), "a torch.nn.Module, or None")
        check_kind("optimizer", optimizer, (Optimizer, type(None)), "one of torch.optim, or None")
        result = super().recover(process_group, made=self.steps - self.lost_last_step)
        self._layout.step.abandon()
        if self._group not in (None, resolve(process_group, "recover")):
            private.keep_former_group(self, self._group)  # which the old model may outlive
        self._group = None
        self._take_replica(result, module, optimizer)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedState, (self.codec,)


def follow_joins(state: State, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """With ddp.join(divide_by_initial_world_size=False) means are those of the ranks that have not
    joined yet. Ranks that have take part in the others' steps, without a forward pass."""
    ddp.register_forward_pre_hook(_ForwardWatch(state))
    state._ddp = weakref.ref(ddp)


class _ForwardWatch:
    """Notes each forward pass of a DDP model in its State. A copy of the model notes none."""

    def __init__(self, state: State | None = None) -> None:
        self._state = (lambda: None) if state is None else weakref.ref(state)

    def __call__(self, *_: Any) -> None:
        if (state := self._state()) is not None:
            state._has_forward = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardWatch, ()


class CopiedState:
    """Stands in a copied DDP model (copy.deepcopy, pickle, AveragedModel) for the original's State.

    Connections and residuals belong to the original alone. DDP does not register hooks again in a
    copy, so a copy that is only evaluated never uses this; any use raises an error with the fix."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # of the original when it was copied

    def reduce_bucket(self, _bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Fails, out of backward()."""
        return failed_future(self._error())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for methods that may not be there
            raise AttributeError(name)
        raise self._error()

    def _error(self) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            "this is a copy of a State (deepcopy, pickle or AveragedModel), which has no "
            "connections and no residuals; wrap the copied module in a new DDP model and call "
            "compress(ddp, codec=...), and load_state_dict() if it is to go on with residuals"
        )


def momentum_for(rules: Mapping[str, str] | str, optimizer: Optimizer | None) -> dict[str, Any]:
    """The options momentum and nesterov that codecs need of this optimizer; empty if none does."""
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
    is_float = is_number(limit) and (limit == math.inf or limit <= sys.float_info.max)
    if limit is not None and not (is_float and limit > 0):
        raise wrong(name, limit, "a number above 0")
    return limit
