"""DistributedOptimizer: any torch optimizer, data-parallel, without DDP. Under policy "p3" the next
forward pass begins while gradients are still in flight: every layer waits for its own only.

Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv
1905.03960: the layers of the input are needed first, so their chunks go first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import wrong
from thinwire.errors import warn
from thinwire.torch import agree, private, tensors
from thinwire.torch.exchange.bucket import lay_out
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.group import resolve
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.delay import OneStepDelay
from thinwire.torch.optimizer.model_hooks import ModelHooks
from thinwire.torch.optimizer.step_pipeline import GradientBucket, Phase, StepPipeline
from thinwire.torch.optimizer.wrapped_optimizer import WrappedOptimizer, loss_of


class DistributedOptimizer(WrappedOptimizer):
    """Wraps `optimizer`, which steps with the means of all ranks' gradients.

    model: the module whose parameters it trains, not wrapped in DDP. Parameters and buffers are
      those of rank 0 from the start.
    codec: as State takes it, or "auto": the first steps are measured with fp32, and then the codec
      that advise() recommends is taken, unless it turns out slower (thinwire.torch.exchange.auto).
    momentum, nesterov: of torch.optim.SGD. They are taken out of it, its weight decay with them;
      the peers get momentum, and the optimizer steps with it. onebit needs it, topk below 1 % as
      well. A parameter without gradient counts as a gradient of zeros in its momentum.
    timeout_s, lanes, chunk_bytes, min_bytes, interface, trace, strict: as State takes them.
    policy: the order of chunks. "p3" (default): step() returns at once, and each module's forward
      waits for the parameters that it needs; "wfbp" and "fifo" wait in step(). The weights are the
      same, bit for bit.
    planned: whether the order of a step's chunks is predicted from the step before; None (default):
      above a millisecond of latency, where announcing each costs more than a wrong prediction.
    find_unused_parameters: a parameter that no rank has a gradient for is left alone, as torch
      does; costs a small exchange a step. Without it a missing gradient counts as zeros.
    delay: 1 lets a step's mean come during the next step, which meanwhile computes with weights
      that this rank updated with its own gradient (OD-SGD, thinwire.torch.optimizer.delay); only
      for torch.optim.SGD, and without synchronize(). warm_up_steps: the first steps, which wait.

    With p3 parameters change as the next forward pass reaches them. model.state_dict() and this
    optimizer's finish what is in flight; before reading parameters in another way call finish().
    Accumulate gradients under no_sync(). Before clipping by norm or unscaling call synchronize(),
    or clip with clip_grad_norm_(): both wait for all gradients.

    Raises InvalidArgumentError for an optimizer whose parameters are coupled (LBFGS), and typed
    errors out of backward(), step() and, under p3, the model's forward, and then stays failed
    until recover()."""

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
        own_step: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        checks.check_types(optimizer, model)
        checks.check_optimizer(optimizer)
        options |= {
            "structure": tensors.structure_of(model),
            "policy": policy,
            "momentum": momentum,
            "nesterov": nesterov,
        }
        self._exchange = self._open_exchange(codec, process_group, options)
        super().__init__(optimizer)
        self._model, self._policy = model, policy
        self._names = {
            p: private.plain_name(name) for name, p in model.named_parameters() if p.requires_grad
        }
        checks.check_parameters(self, self._model, self._names)
        self._exchange.rules.check_names(self._names.values())
        self._group = resolve(process_group, "DistributedOptimizer")
        self._broadcast(self._group)
        self._pipeline = StepPipeline(optimizer, self._exchange, find_unused_parameters, own_step)
        checks.check_delay(delay, self._exchange)
        self._delay: OneStepDelay | None = None
        if delay:
            self._delay = OneStepDelay(optimizer, warm_up_steps, self._exchange, self._pipeline)
        self._accumulating = False
        self.take_momentum()
        self._hooks = ModelHooks(
            model, self._names, on_gradient=self._on_gradient,
            before_use=self._pipeline.apply, finish=self.finish,
        )  # fmt: skip

    def _open_exchange(
        self, codec: Codec | None, group: dist.ProcessGroup | None, options: Mapping[str, Any]
    ) -> GradientExchange:
        return GradientExchange(codec, group, purpose="optimizer", **options)

    def _broadcast(self, group: dist.ProcessGroup) -> None:
        agree.broadcast_replica(self._model, group)

    def take_momentum(self) -> None:
        """Out of the param groups that still have their own, if the exchange is to own it."""
        if self._exchange.config.momentum:
            self._exchange.take_momentum(self._inner, self._names.get)

    @property
    def exchange(self) -> GradientExchange:
        """Everything but the steps: codec, connections, statistics."""
        return self._exchange

    # Gradients, as autograd makes them.

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._accumulating:
            return
        self._lay_out()
        bucket = self._pipeline.bucket_of[parameter]
        self._pipeline.begin(bucket)
        if self._delay is not None:
            self._delay.make_room(bucket)
        if bucket.phase is Phase.IN_FLIGHT:
            error = errors.InvalidArgumentError(
                f"rank {self._exchange.rank}: the gradient of '{self._names[parameter]}' was made "
                "again before step(), when it had been sent already; put all backward passes but "
                "the last under no_sync()"
            )
            raise errors.again(self._exchange.fail(error))  # peers would wait for the next step
        if bucket.ready(parameter):
            self._pipeline.send(bucket)

    def _lay_out(self) -> None:
        """Makes the buckets at the first gradient or step."""
        if not self._pipeline.buckets:
            order = self._hooks.agree_on_order(self._group)
            self._pipeline.take(lay_out(GradientBucket, self._exchange.bucket, order))
            self._hooks.take(self._pipeline.bucket_of)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer. Returns the closure's loss, if there is one."""
        loss = loss_of(closure)
        self._lay_out()
        checks.check_gradients(self, self._names)
        self._exchange.momentum.check()
        if self._delay is not None and self._delay.begun():
            self._delay.step()
            return loss
        pipeline, synchronized = self._pipeline, self._pipeline.synchronized
        if not synchronized:
            pipeline.send_rest()
        if self._policy == "p3" and not synchronized:
            pipeline.defer()
        else:
            if not synchronized:
                pipeline.take_means()
            pipeline.step()
        self._exchange.between_steps(pipeline.device, self.finish)
        return loss

    def synchronize(self) -> None:
        """After backward(): returns when every .grad holds the mean of all ranks. The next step()
        takes the gradients as they are then, so they can be clipped or unscaled in between."""
        checks.check_can_synchronize(self._delay is not None, self._exchange)
        self.finish()
        self._lay_out()
        if not self._pipeline.synchronized:
            self._pipeline.flush()
            self._pipeline.take_means()

    def finish(self) -> None:
        """After step(): returns when all parameters have taken it."""
        for bucket in self._pipeline.deferred():
            self._pipeline.apply(bucket)
        if self._delay is not None:
            self._delay.finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ of the means: between backward() and step()."""
        if self._policy == "p3":
            warn(
                "clip_grad_norm_ needs all gradients, so this step waits for them as policy='wfbp' "
                "does"
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

    # Param groups, statistics and checkpoints.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the first backward pass, and only parameters of the model."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise wrong("param_group", param_group, "a dict with 'params'")
        if not hasattr(self, "_pipeline"):
            super().add_param_group(param_group)
            return
        if self._pipeline.buckets:
            raise errors.InvalidArgumentError(
                "add_param_group comes after the first backward pass; close() this "
                "DistributedOptimizer, and make another"
            )
        super().add_param_group(param_group)
        checks.check_parameters(self, self._model, self._names)
        self.take_momentum()

    @property
    def codec(self) -> str:
        """The codec in use, or all of them separated by ";"; with "auto" it changes at most
        twice."""
        return self._exchange.config.codec

    def stats(self) -> dict[str, Any]:
        """As State.stats()."""
        self.finish()
        return self._exchange.stats()

    def describe(self) -> str:
        """As GradientExchange.describe()."""
        return self._exchange.describe()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "thinwire" what compression has lost on this rank."""
        self.finish()
        kept = {**self._exchange.state_dict(), "codec": self._exchange.rules.by_pattern}
        return {**super().state_dict(), "thinwire": kept}

    def gathered_state_dict(self) -> dict[str, Any]:
        """As state_dict(), with what compression has lost on all ranks, for checkpoints that rank 0
        alone writes. All ranks call it; that entry is without content on the others."""
        self.finish()
        return {**super().state_dict(), "thinwire": self._exchange.gathered_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's state_dict(), gathered_state_dict(), or a plain optimizer's. A dict
        that does not fit is an InvalidArgumentError, or torch's own ValueError, and changes
        nothing."""
        checks.check_state_dict(state_dict)
        self.finish()
        kept = state_dict.get("thinwire")
        if kept is not None:
            self._exchange.check_state_dict(kept)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "thinwire"})
        if kept is not None:
            self._exchange.load_state_dict(kept)
            self._pipeline.restart(self._exchange.steps)
        self.take_momentum()  # the dict may be a plain optimizer's

    def load_residuals(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes what compression has lost, in the forms of GradientExchange.load_state_dict."""
        self.finish()
        self._exchange.load_state_dict(saved)
        self._pipeline.restart(self._exchange.steps)

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        """After an error: goes on in a new group of torch's, of any size, with the residuals and
        the momentum of this rank; every rank of the new group calls it, each one of the old group.
        Where some ranks have made a step that others have not, parameters, buffers and the
        optimizer's state are taken from one that has; under p3 that step may be in some layers
        only, the same on every rank. Gradients of the failed step are dropped.

        As GradientExchange.recover otherwise."""
        members = resolve(process_group, "DistributedOptimizer")
        self._exchange.fail(errors.Error(f"rank {self._exchange.rank} left the group to recover"))
        self._finish_what_came()
        result = self._exchange.recover(process_group, made=self._pipeline.made())
        self._pipeline.restart(result.step)
        self._group = members
        if not result.equal:
            agree.replica_from_rank(result.source, self._model, self._inner, members)
        return result

    def _finish_what_came(self) -> None:
        """Steps with the means that came back before the failure, and with no others."""
        for bucket in self._pipeline.deferred():
            with contextlib.suppress(errors.Error):
                self._pipeline.apply(bucket)
        if self._delay is not None:
            self._delay.give_up()

    def close(self) -> None:
        """Finishes the step in flight, lets the model go, and closes the connections, as happens at
        exit by itself."""
        try:
            self.finish()
        finally:
            self._hooks.remove()
            self._exchange.close()
