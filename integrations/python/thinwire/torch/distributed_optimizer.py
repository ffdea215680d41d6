"""DistributedOptimizer: any torch optimizer, data-parallel, without DDP. Under policy "p3" the next
forward pass begins while gradients are still on their way: every layer waits for its own only.

Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv
1905.03960: the layers of the input are needed first, so their chunks go first."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.torch import checkpoint, tensors
from thinwire.torch.agree import from_rank_0
from thinwire.torch.delay import OneStepDelay
from thinwire.torch.forward_order import ForwardOrder
from thinwire.torch.group import Group, join, resolve
from thinwire.torch.momentum import Pairing, take_over
from thinwire.torch.policy import Codec, Policy
from thinwire.torch.session import Session
from thinwire.torch.settled import Settled, settle
from thinwire.torch.stats import summary
from thinwire.torch.stepper import Stepper
from thinwire.torch.units import Phase, Unit, make_units
from thinwire.torch.watched import Watched, WatchedUnits

_POLICIES = ("p3", "wfbp", "fifo")


class DistributedOptimizer(Optimizer):
    """Wraps `optimizer`, which steps with the means of all ranks' gradients.

    model: the module whose parameters it trains, not wrapped in DDP. Parameters and buffers are
      those of rank 0 from the start.
    codec: as State takes it, or "auto": the first steps are measured with fp32, and then the codec
      that advise() recommends is taken, unless it turns out slower (thinwire.torch.auto).
    momentum, nesterov: of torch.optim.SGD, taken out of it, its weight decay with it: what goes to
      the peers, and what the optimizer steps with, is then the momentum. onebit needs it, topk
      below 1 % as well. A parameter without gradient counts as one of zeros in its momentum.
    timeout_s, lanes, chunk_bytes, min_bytes, interface, trace: as State takes them.
    policy: "p3" (default): step() returns at once, and each module's forward waits for what it
      needs; "wfbp" and "fifo" wait in step(). The weights are the same, bit for bit.
    planned: whether the order of a step's chunks is foretold from the step before; None (default):
      above a millisecond of latency, where announcing each costs more than a wrong guess.
    find_unused_parameters: a parameter that no rank has a gradient for is left alone, as torch
      does; costs a small exchange a step. Without it a missing gradient counts as zeros.
    delay: 1 lets a step's mean come during the next step, which meanwhile computes with weights
      that this rank updated with its own gradient (OD-SGD, thinwire.torch.delay); of
      torch.optim.SGD only, and without synchronize(). warm_up_steps: that wait as usual, at first.

    With p3 parameters change as the next forward pass reaches them. model.state_dict() and this
    optimizer's finish what is under way; before reading parameters in another way call finish().
    Accumulate gradients under no_sync(). Before clipping by norm or unscaling call synchronize(),
    or clip with clip_grad_norm_(): both wait for all gradients.

    Raises InvalidArgumentError for an optimizer whose parameters are coupled (LBFGS), and typed
    errors out of backward(), step() and, under p3, the model's forward, and then stays failed."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        codec: Codec | None = None,
        policy: str = "p3",
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        delay: int = 0,
        warm_up_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise errors.InvalidArgumentError(
                "LBFGS couples all parameters and calls its closure many times; take an optimizer "
                "that steps each parameter for itself"
            )
        if policy not in _POLICIES:
            raise errors.InvalidArgumentError(f"policy is {policy!r}, expected one of {_POLICIES}")
        options |= {"policy": policy, "momentum": momentum, "nesterov": nesterov}
        settled = settle(codec, process_group, WatchedUnits, **options)
        self._auto, self._codecs = settled.auto, settled.codecs
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._inner = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._model, self._policy = model, policy
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._check_parameters()
        self._codecs.check_names(self._names.values())
        group = resolve(process_group, "DistributedOptimizer")
        self._group = group
        session = self._open_session(join(group, "optimizer"), settled)
        self._broadcast(group)
        self._stepper = Stepper(optimizer, session, find_unused_parameters)
        self._needs: dict[torch.nn.Module, list[Unit]] = {}
        self._delay = self._make_delay(delay, warm_up_steps)
        self._accumulating = False
        self._steps = 0
        self._pairing: Pairing | None = None
        self._take_momentum()
        self._order = ForwardOrder(model, self._names)
        self._hooks = [
            *(p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._names),
            *(m.register_forward_pre_hook(self._before_forward) for m in model.modules()),
            model.register_state_dict_pre_hook(lambda *_: self.finish()),
        ]

    def _open_session(self, group: Group, settled: Settled) -> Session | Watched:
        return settled.open_session(group, self)

    @property
    def _session(self) -> Session | Watched:
        return self._stepper.session

    def _change_codec(self, codec: str) -> None:
        """Between steps, on all ranks. What compression has lost so far goes along."""
        group = join(self._group, "optimizer")
        self._stepper.session = self._session.successor(group, codec, self._steps)
        self._session.close_with(self)
        self._codecs = Policy(codec)
        self._lay_out([name for unit in self._stepper.units for name in unit.names])

    def _take_momentum(self) -> None:
        """Of the param groups that have their own still, if it is to be ours."""
        settings = self._session.config
        if not settings.momentum:
            return
        pairing, buffers = take_over(self._inner, settings.momentum, settings.nesterov)
        self._pairing = self._pairing or pairing
        named = {self._names[p]: buffer for p, buffer in buffers.items() if p in self._names}
        self._session.load(checkpoint.with_momentum(self._session.memory(), named), self._steps)

    def _weight_decay_of(self, parameter: torch.Tensor) -> float:
        return 0.0 if self._pairing is None else self._pairing.weight_decay_of(parameter)

    def _make_delay(self, delay: int, warm_up_steps: int) -> OneStepDelay | None:
        if delay and self._auto is not None:
            raise errors.InvalidArgumentError(
                "delay=1 goes with a codec that is chosen, got codec='auto'; see what `thinwire "
                "advise` recommends"
            )
        if delay and self._session.config.momentum:
            raise errors.InvalidArgumentError(
                "delay=1 goes with momentum that the optimizer owns, got "
                f"momentum={self._session.config.momentum}; leave it to torch.optim.SGD"
            )
        if delay not in (0, 1):
            raise errors.InvalidArgumentError(f"delay is {delay!r}, expected 0 or 1")
        return OneStepDelay(self._inner, warm_up_steps, self._stepper.step_unit) if delay else None

    def _check_parameters(self) -> None:
        ours = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        strangers = len(ours - set(self._names))
        if strangers:
            raise errors.InvalidArgumentError(
                f"the optimizer has {strangers} parameter(s) that the model has not, expected "
                "those of model.parameters(); pass the model that they belong to"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        for parameter, name in self._names.items():
            tensors.check(parameter, rank, lambda name=name: name)

    def _broadcast(self, group: dist.ProcessGroup) -> None:
        source = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for tensor in itertools.chain(self._model.parameters(), self._model.buffers()):
                dist.broadcast(tensor.detach(), source, group=group)

    # What comes out of autograd.

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._accumulating:
            return
        self._make_units()
        unit = self._stepper.unit_of[parameter]
        self._stepper.make_way(unit)
        if self._delay is not None:
            self._delay.make_room(unit, self._session)
        if unit.phase is Phase.FLYING:
            raise errors.InvalidArgumentError(
                f"the gradient of '{self._names[parameter]}' was made again before step(), when it "
                "had been sent already; put all backward passes but the last under no_sync()"
            )
        if unit.ready(parameter):
            unit.submit(self._session)

    def _make_units(self) -> None:
        """At the first gradient or step: by rank 0's forward order, which all ranks take."""
        if self._stepper.units:
            return
        self._order.stop()
        self._lay_out(from_rank_0(self._order.order(self._names), self._group))

    def _lay_out(self, order: list[str]) -> None:
        by_name = {name: parameter for parameter, name in self._names.items()}
        parameters = [(name, by_name[name]) for name in order]
        self._stepper.take(make_units(parameters, self._codecs, self._weight_decay_of))
        self._needs = self._order.needs(self._stepper.unit_of)

    def _before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        for unit in self._needs.get(module, ()):
            self._stepper.apply(unit)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_units()
        self._check_unknown()
        if self._pairing is not None:
            self._pairing.check()
        if self._delay is not None and self._delay.begun(self._steps + 1):
            self._step_delayed(self._delay)
            return loss
        stepper, synchronized = self._stepper, self._stepper.synchronized
        if not synchronized:
            self._send_rest()
        self._steps += 1
        if self._policy == "p3" and not synchronized:
            stepper.defer()
        else:
            if not synchronized:
                stepper.take_means()
            stepper.step()
        if self._auto is not None:
            codec = self._auto.after_step(stepper.device, self.finish)
            if codec is not None:
                self._change_codec(codec)
        return loss

    def _send_rest(self) -> None:
        self._stepper.flush()
        for unit in self._stepper.units:
            unit.check_untouched()

    def _step_delayed(self, delay: OneStepDelay) -> None:
        stepper = self._stepper
        for unit in stepper.due():  # the last step of the warm-up
            stepper.apply(unit)
        for unit in stepper.units:
            delay.make_room(unit, self._session)
        stepper.learn_unused()
        self._send_rest()
        self._steps += 1
        delay.step(stepper.units, stepper.groups())

    def _check_unknown(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._names:
                    raise errors.InvalidArgumentError(
                        "a parameter has a gradient that was frozen, or not there, when this "
                        "DistributedOptimizer was made; close() it, and make another after "
                        "unfreezing"
                    )

    def synchronize(self) -> None:
        """After backward(): returns when every .grad holds the mean of all ranks. The next step()
        takes the gradients as they are then, so they can be clipped or unscaled in between."""
        if self._pairing is not None:
            raise errors.InvalidArgumentError(
                f"with momentum={self._session.config.momentum} the means are momentum, which "
                "clipping and unscaling would spoil; clip each rank's own gradients under "
                "no_sync(), or leave the momentum to the optimizer"
            )
        if self._delay is not None:
            raise errors.InvalidArgumentError(
                "with delay=1 the means come after step(), so nothing can be done to them before; "
                "clip your own gradients under no_sync(), or use delay=0"
            )
        self.finish()
        self._make_units()
        if not self._stepper.synchronized:
            self._stepper.flush()
            self._stepper.take_means()

    def finish(self) -> None:
        """After step(): returns when all parameters have taken it."""
        for unit in self._stepper.due():
            self._stepper.apply(unit)
        if self._delay is not None:
            self._delay.finish(self._stepper.units, self._session)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ of the means: between backward() and step()."""
        if self._policy == "p3":
            warnings.warn(
                "clip_grad_norm_ needs all gradients, so this step waits for them as policy='wfbp' "
                "does",
                stacklevel=2,
            )
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(list(self._names), max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to .grad and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; a step under way is not touched."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the first backward pass, of parameters of the model."""
        if not hasattr(self, "_inner"):  # torch's constructor
            super().add_param_group(param_group)
            return
        if self._stepper.units:
            raise errors.InvalidArgumentError(
                "add_param_group comes after the first backward pass; close() this "
                "DistributedOptimizer, and make another"
            )
        self._inner.add_param_group(param_group)
        self._check_parameters()
        self._take_momentum()

    # State.

    @property
    def codec(self) -> str:
        """What gradients go with now: with codec="auto" it may change once or twice."""
        return self._session.config.codec

    def stats(self) -> dict[str, Any]:
        """As State.stats(), but for parameters."""
        self.finish()
        return summary(self._session.stats(), self._steps)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "thinwire" what compression has lost on this rank."""
        self.finish()
        kept = checkpoint.pack(
            self._session.memory(), self._codecs.rules, self._session.group.size,
            self._session.group.rank, self._steps,
        )  # fmt: skip
        return {**self._inner.state_dict(), "thinwire": kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's state_dict(), or that of a plain optimizer."""
        self.finish()
        if "thinwire" in state_dict:
            group = self._session.group
            residuals, steps = checkpoint.unpack(state_dict["thinwire"], group.size, group.rank)
            self._session.load(residuals, steps)
            self._steps = steps
        self._inner.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "thinwire"}
        )
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._take_momentum()  # the dict may be a plain optimizer's

    def close(self) -> None:
        """Finishes the step under way, lets the model go, says goodbye to the peers. At exit the
        goodbye is said by itself."""
        try:
            self.finish()
        finally:
            self._order.stop()
            for hook in self._hooks:
                hook.remove()
            self._session.close()
