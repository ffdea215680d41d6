"""Plain modules, without DDP. Without an optimizer, hooks on their parameters put the means into
.grad; with one, its step() uses the means.

Under policy "p3" (default) the next forward pass begins while means are still in flight: each layer
waits only for its own. Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN
Training", arXiv 1905.03960: input layers are needed first, so their chunks go first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import as_int, check_flag
from thinwire.errors import warn
from thinwire.torch import agree, private, tensors
from thinwire.torch.exchange.bucket import lay_out
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.group import rank_or_0, resolve
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.delay import OneStepDelay
from thinwire.torch.optimizer.model_hooks import ModelHooks
from thinwire.torch.optimizer.step_pipeline import GradientBucket, Phase, StepPipeline
from thinwire.torch.optimizer.wrapped_optimizer import loss_of


class ModuleCompression(GradientExchange):
    """A plain module whose gradients are the means of all ranks when backward() returns.

    Buckets are sent as soon as their gradients are made, so that sending overlaps the rest of
    backward(). In the first step they are sent at its end, because it shows which gradients are
    accumulated in several parts."""

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | None = None,
        optimizer: Optimizer | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool | None = None,
        **options: Any,
    ) -> None:
        """Created by compress(). Parameters, buffers and the optimizer's state are set to those of
        rank 0. MismatchError if models, optimizers or options that no connection compares differ
        between ranks."""
        find_unused = False if find_unused_parameters is None else find_unused_parameters
        check_flag("find_unused_parameters", find_unused)
        self._model, self._optimizer = private.uncompiled(model), optimizer
        self._group = resolve(process_group, "compress")
        self._names = trained_names(model)
        checks.check_trained(model, self._names)
        tensors.check_replica(self._model, rank_or_0(process_group))
        super().__init__(
            codec,
            process_group,
            parameters={name: p.numel() for p, name in self._names.items()},
            structure=tensors.structure_of(model),
            purpose="module",
            **({"policy": "p3"} | {k: v for k, v in options.items() if v is not None}),
        )
        if self.config.momentum and optimizer is None:
            raise errors.InvalidArgumentError(
                f"compress got momentum={self.config.momentum} and no optimizer to take "
                "it out of; pass optimizer="
            )
        self._accumulating = False
        self._passes: set[int] = set()  # numbers of the running backward pass and those inside it
        self._in_step = False  # True after the pass has made a gradient
        # Buckets that are sent at the end of a pass, because it accumulates one of their gradients
        # in several parts; the first step shows which.
        self._late: set[GradientBucket] = set()
        self._overlaps = False
        own_step = None if optimizer is None else optimizer.step
        self._pipeline = StepPipeline(optimizer, self, find_unused, own_step)
        self._find_unused = find_unused
        self._share_replica()
        self._hooks = ModelHooks(
            self._model, self._names, on_gradient=self._on_gradient,
            before_use=None if optimizer is None else self._pipeline.apply, finish=self.finish,
            before_backward=None if optimizer is not None else self._enter_backward,
        )  # fmt: skip

    def _share_replica(self) -> None:
        options = {"find_unused_parameters": self._find_unused, **self._alike()}
        agree.broadcast_replica(self._model, self._group, self._optimizer, options)

    def _alike(self) -> dict[str, object]:
        """Return further options that must be the same on all ranks, by name."""
        return {}

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._accumulating:
            return
        self._enter_backward()
        if not self._in_step:
            self._begin_step()
        bucket = self._pipeline.bucket_of[parameter]
        if bucket.has(parameter):
            self._made_again(bucket, parameter)
        if bucket.ready(parameter) and self._overlaps and bucket not in self._late:
            self._pipeline.send(bucket)

    def _made_again(self, bucket: GradientBucket, parameter: torch.Tensor) -> None:
        """Handle a gradient that is made again in one pass: reentrant checkpoints that share a
        parameter add to its gradient one after the other."""
        if bucket.phase is Phase.IN_FLIGHT:
            error = errors.InvalidArgumentError(
                f"rank {self.rank}: the gradient of '{self._names[parameter]}' was made twice in "
                "one backward pass, unlike in the first step, and had been sent already; take "
                "checkpoint(..., use_reentrant=False)"
            )
            raise errors.again(self.fail(error))
        self._late.add(bucket)

    def _enter_backward(self) -> None:
        """Register a callback for the end of the backward pass, once, at the model's output or at
        the first gradient. The end of an inner pass, such as a reentrant checkpoint's, is
        ignored."""
        number = private.backward_pass()
        if number in self._passes:
            return
        if self._passes and private.in_inner_backward():
            self._passes.add(number)
            return
        self._passes, self._in_step = {number}, False
        private.after_backward(self._end_backward)

    def _begin_step(self) -> None:
        self._lay_out()
        if any(bucket.phase is Phase.IN_FLIGHT for bucket in self._pipeline.buckets):
            error = errors.Error(
                f"rank {self.rank}: the backward pass before this one failed after it had sent "
                "gradients, so the steps of the ranks do not match any more; call recover() on "
                "every rank, or end the program"
            )
            raise errors.again(self.fail(error))
        self._check_reduced()
        self._in_step = True
        for bucket in self._pipeline.buckets:
            bucket.restart(self.steps)

    def _check_reduced(self) -> None:
        try:
            checks.check_reduced(self._model, self._names)
        except errors.Error as error:
            raise errors.again(self.fail(error)) from None

    def _lay_out(self) -> None:
        """Create the buckets, at the first gradient or step."""
        if not self._pipeline.buckets:
            order = self._hooks.agree_on_order(self._group)
            self._pipeline.take(lay_out(GradientBucket, self.bucket, order))
            self._hooks.take(self._pipeline.bucket_of)

    def _end_backward(self) -> None:
        self._passes.clear()
        if not self._in_step:
            self._check_reduced()
            return
        self._in_step, self._overlaps = False, True
        self._check_kept()
        self._pipeline.flush()
        self._pipeline.take_means()
        self.between_steps(self._pipeline.device, lambda: None)

    def _check_kept(self) -> None:
        """Fail if a hook has taken gradients, which are those of this rank alone until the end of
        the pass. A hook that steps with them and keeps them can't be noticed."""
        for bucket in self._pipeline.buckets:
            if (name := bucket.dropped()) is not None:
                error = errors.InvalidArgumentError(
                    f"rank {self.rank}: the gradient of '{name}' was made in backward() and is "
                    "None at its end, so a hook has used it before it was the mean of all ranks, "
                    "as an optimizer in register_post_accumulate_grad_hook() does; call step() "
                    "and zero_grad() after backward()"
                )
                raise errors.again(self.fail(error))

    def finish(self) -> None:
        """Return when step() has updated all parameters. Call it before reading parameters other
        than by a forward pass or model.state_dict()."""
        for bucket in self._pipeline.deferred():
            self._pipeline.apply(bucket)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes in this context add to .grad and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        members = resolve(process_group, "recover")
        self.fail(errors.Error(f"rank {self.rank} left the group to recover"))
        result = super().recover(process_group, made=self._made())
        self._group, self._in_step = members, False
        self._passes.clear()
        self._pipeline.restart(result.step)
        self._take_replica(result, self._model, self._optimizer)
        return result

    def _made(self) -> Mapping[str, int] | None:
        """After a failure: return the steps that the optimizer has made, by parameter, or None if
        this object does not step one."""
        return None

    def close(self) -> None:
        """Remove the hooks from the model and close the connections. Gradients are not reduced any
        more."""
        self._hooks.remove()
        super().close()


class OptimizedCompression(ModuleCompression):
    """A plain module and its optimizer, whose step() uses the means of all ranks' gradients.

    Under policy "p3" step() returns at once, and each module's forward waits for the parameters
    that it needs; "wfbp" and "fifo" wait in step(), and so does p3 if the optimizer has step hooks.
    With equal chunk_bytes all policies give bit-identical weights. Accumulate gradients in
    no_sync(). Call synchronize() before clipping by norm or unscaling, or clip with
    clip_grad_norm_(): both wait for all gradients. Typed errors are raised by backward(), step()
    and, under p3, the model's forward."""

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | None,
        optimizer: Optimizer,
        *,
        delay: int | None = None,
        warm_up_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Created by compress(), which replaces the optimizer's step().

        Args:
            delay: 1: a step's mean may come during the next step, which computes with weights that
                this rank updated with its own gradient (OD-SGD, thinwire.torch.optimizer.delay).
            warm_up_steps: with delay: the number of first steps, which wait for the mean.
        """
        delay = 0 if delay is None else delay
        warm_up_steps = 0 if warm_up_steps is None else warm_up_steps
        warm_up_steps = as_int("warm_up_steps", warm_up_steps, 0)
        if warm_up_steps and not delay:
            raise errors.InvalidArgumentError(
                f"compress got warm_up_steps={warm_up_steps} for a plain module without delay=1, "
                "expected it with delay=1 there; leave it out, or wrap the model in "
                "DistributedDataParallel, under which the first steps go in fp32"
            )
        checks.check_optimizer(optimizer)
        self._delay: OneStepDelay | None = None
        self._when = {"delay": delay, "warm_up_steps": warm_up_steps}
        super().__init__(model, codec, optimizer, **options)
        try:
            checks.check_parameters(optimizer, self._names)
            checks.check_policy(optimizer, self.config.policy)
            checks.check_delay(delay, self)
            if delay:
                self._delay = OneStepDelay(optimizer, warm_up_steps, self, self._pipeline)
            self._take_over()
        except errors.Error:
            super().close()
            raise
        self._own_step = optimizer.step
        private.replace_step(optimizer, self.step)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda *_: self.finish()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._take_over()),
        ]

    def _alike(self) -> dict[str, object]:
        return self._when

    def _take_over(self) -> None:
        """Move momentum out of the param groups that still have it, if the exchange owns it."""
        if self.config.momentum:
            self.take_momentum(self._optimizer, self._names.get)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._accumulating:
            self._lay_out()
        bucket = self._pipeline.bucket_of.get(parameter)  # None: accumulated in the first step
        if self._pipeline.is_due(bucket):
            error = errors.InvalidArgumentError(
                f"rank {self.rank}: the gradient of '{self._names[parameter]}' was made while its "
                "last step was still due, so the forward pass has not waited for it; call finish() "
                "after step() if parameters are read outside of their modules, and "
                "torch.compiler.reset() after compress() if the model was compiled and used before"
            )
            raise errors.again(self.fail(error))
        if bucket is None or self._accumulating:
            return
        self._pipeline.begin(bucket)
        if self._delay is not None:
            self._delay.make_room(bucket)
        if bucket.phase is Phase.IN_FLIGHT:
            fix = (
                "reentrant checkpoints share it; take checkpoint(..., use_reentrant=False)"
                if private.in_inner_backward()
                else "put all backward passes but the last under no_sync(), or, if reentrant "
                "checkpoints share the parameter, take checkpoint(..., use_reentrant=False); to "
                "leave out a step on all ranks, call synchronize() of what compress() returned "
                "after its backward()"
            )
            error = errors.InvalidArgumentError(
                f"rank {self.rank}: the gradient of '{self._names[parameter]}' was made again "
                f"before step(), when it had been sent already; {fix}"
            )
            raise errors.again(self.fail(error))  # so that the peers do not wait in the next step
        if bucket.ready(parameter):
            self._pipeline.send(bucket)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; this replaces the optimizer's step(). Returns the closure's loss. If the
        optimizer has step hooks, this waits for all means under p3 too, since the hooks are called
        once for each step, after all parameters are updated."""
        loss = loss_of(closure)
        self._lay_out()
        checks.check_gradients(self._optimizer, self._names, self._model)
        self.momentum.check()
        if not self._pipeline.synchronized and private.is_stepped_by_scaler():
            checks.check_can_synchronize(self._delay is not None, self)
            raise errors.InvalidArgumentError(
                "a GradScaler steps this optimizer, and has unscaled gradients that had been sent "
                "already; call synchronize() of what compress() returned after backward() and "
                "before unscale_() and step() of the scaler"
            )
        hooked = not all(map(self.momentum.is_own, private.step_hooks(self._optimizer)))
        if self._delay is not None:
            checks.check_delayed_hooks(hooked)
            if self._delay.begun():
                self._delay.step()
                return loss
        pipeline, synchronized = self._pipeline, self._pipeline.synchronized
        if not synchronized:
            pipeline.send_rest()
        by_layers = self.config.policy == "p3" and not synchronized
        if by_layers and hooked:
            warn(
                "the optimizer has step hooks, which are called once for a whole step, so this "
                "step waits for all gradients as policy='wfbp' does"
            )
        if by_layers and not hooked:
            pipeline.defer()
        else:
            if not synchronized:
                pipeline.take_means()
            pipeline.step()
        self.between_steps(pipeline.device, self.finish)
        return loss

    def synchronize(self) -> None:
        """After backward(): return when every .grad holds the mean of all ranks. The next step()
        uses .grad, so gradients can be clipped or unscaled in between."""
        checks.check_can_synchronize(self._delay is not None, self)
        self.finish()
        self._lay_out()
        if not self._pipeline.synchronized:
            self._pipeline.flush()
            self._pipeline.take_means()

    def finish(self) -> None:
        super().finish()
        if self._delay is not None:
            self._delay.finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the means with torch.nn.utils.clip_grad_norm_, between backward() and step()."""
        if self.config.policy == "p3":
            warn(
                "clip_grad_norm_ needs all gradients, so this step waits for them as policy='wfbp' "
                "does"
            )
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(list(self._names), max_norm, norm_type)

    # Statistics, checkpoints, recovery and the end.

    def stats(self) -> dict[str, Any]:
        self.finish()
        return super().stats()

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self.finish()
        super().load_state_dict(saved)
        self._pipeline.restart(self.steps)

    def _made(self) -> Mapping[str, int]:
        """Step with the means that came back before the failure; return the steps made, by
        parameter."""
        for bucket in self._pipeline.deferred():
            with contextlib.suppress(errors.Error):
                self._pipeline.apply(bucket)
        if self._delay is not None:
            self._delay.give_up()
        return self._pipeline.made()

    def close(self) -> None:
        """Finish the step in flight, restore the optimizer's own step(), and close."""
        try:
            if self._session.error is None:  # else the caller has got the error of the step
                self.finish()
        finally:
            self._optimizer.step = self._own_step
            for handle in self._handles:
                handle.remove()
            super().close()


def trained_names(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None, ignored: Collection[str] = ()
) -> dict[torch.Tensor, str]:
    """Return the trained parameters with their names. InvalidArgumentError for one whose gradients
    cannot be reduced. ignored: torch's names of parameters to leave out."""
    names = {
        p: private.plain_name(name)
        for name, p in model.named_parameters()
        if p.requires_grad and name not in ignored
    }
    rank = rank_or_0(group)
    tensors.check_parameters(names, rank)
    tensors.check_modules(model, rank)
    return names
