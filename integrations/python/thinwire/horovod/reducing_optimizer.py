"""ReducingOptimizer: an optimizer whose gradients are reduced over all ranks before its step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.arguments import as_int, wrong
from thinwire.horovod.exact import ExactCollectives
from thinwire.horovod.ops import Op
from thinwire.horovod.world import Members
from thinwire.torch.exchange.bucket import lay_out
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.step_pipeline import GradientBucket, Phase, StepPipeline
from thinwire.torch.optimizer.wrapped_optimizer import WrappedOptimizer, loss_of


class ReducingOptimizer(WrappedOptimizer):
    """The base class of what DistributedOptimizer() returns: an instance of a subclass of this and
    of the wrapped optimizer's class."""

    def __init__(
        self,
        inner: Optimizer,
        names: Mapping[torch.Tensor, str],
        exchange: GradientExchange,
        op: Op,
        backward_passes_per_step: int,
        sparse_as_dense: bool,
        members: Members | None,
    ) -> None:
        """members: None outside of the process set. If they may join(), all ranks create their
        optimizers in the same order."""
        super().__init__(inner)
        self._names, self._exchange, self._op = names, exchange, op
        self._sparse_as_dense = sparse_as_dense
        self._pipeline = StepPipeline(inner, exchange, find_unused=False)
        self._passes: Counter[torch.Tensor] = Counter()  # passes since the last reduction
        self._synchronizes = True
        self._restored: Mapping[str, Any] | None = None
        self._members = members  # None after the first step, too
        joining = None if members is None else members.joining
        self._joining, self._kind = joining, ""
        if joining is not None:
            self._kind = f"optimizer {len(joining.makers)}"
            make = weakref.WeakMethod(self._step_of_others)
            joining.makers[self._kind] = lambda *_: make()()
        self._end: Callable[[], object] | None = None  # ends the present step
        self._in_step_of_others = False  # True after join(), in a step of the other ranks
        self.set_backward_passes_per_step(backward_passes_per_step)
        if exchange.config.momentum:
            exchange.take_momentum(inner, names.get)
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a custom wrapped optimizer. Names with an underscore are not
        passed on: torch uses them to decide how it may call an optimizer's step()."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def exchange(self) -> GradientExchange:
        """The exchange: codec, connections and statistics."""
        return self._exchange

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of passes per step. Call it between steps."""
        passes = as_int("passes", passes, 1)
        self.backward_passes_per_step = passes
        self._passes.clear()

    # Gradients, as autograd makes them.

    def _lay_out(self) -> None:
        """Create the buckets, at the first gradient or step."""
        if not self._pipeline.buckets:
            make = functools.partial(self._exchange.bucket, op=self._op.value)
            named = [(name, parameter) for parameter, name in self._names.items()]
            self._pipeline.take(lay_out(GradientBucket, make, named))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._lay_out()
        self._restored = None
        if self._pipeline.synchronized:  # a step was skipped, for example by a loss scaler
            for bucket in self._pipeline.buckets:
                self._pipeline.begin(bucket)
        if parameter.grad.is_sparse:
            if not self._sparse_as_dense:
                raise errors.InvalidArgumentError(
                    f"rank {self._exchange.rank}: the gradient of '{self._names[parameter]}' is "
                    "sparse, expected dense gradients; pass sparse_as_dense=True, or use "
                    "Embedding(sparse=False)"
                )
            parameter.grad = parameter.grad.to_dense()
        self._passes[parameter] += 1
        if self._passes[parameter] < self.backward_passes_per_step:
            return
        bucket = self._pipeline.bucket_of[parameter]
        if self._passes[parameter] > self.backward_passes_per_step:
            error = errors.InvalidArgumentError(
                f"rank {self._exchange.rank}: the gradient of '{self._names[parameter]}' was made "
                f"{self._passes[parameter]} times before step(), expected "
                f"{self.backward_passes_per_step}; raise backward_passes_per_step"
            )
            raise errors.again(self._exchange.fail(error))  # so that peers do not wait next step
        if bucket.ready(parameter):
            self._begin_step()
            self._pipeline.send(bucket)

    def _begin_step(self) -> None:
        """Call before gradients of a step are sent."""
        members, self._members = self._members, None
        if members is not None:
            self._check_first_step(members.exact)
        if self._joining is not None and self._end is None:
            self._end = self._joining.begin(self._kind, (self._kind, None), None)

    def _check_first_step(self, exact: ExactCollectives) -> None:
        settings = {
            "op": self._op.name,
            "backward_passes_per_step": str(self.backward_passes_per_step),
        }
        for number, (parameter, name) in enumerate(self._names.items()):
            settings[f"named_parameters[{number}]"] = f"'{name}' of shape {tuple(parameter.shape)}"
        try:
            exact.check_first_step(settings)
        except errors.Error as error:
            raise errors.again(self._exchange.fail(error)) from None

    # Steps.

    def synchronize(self) -> None:
        """After backward(): return when every .grad is reduced. Then gradients may be clipped or
        unscaled before step(), with or without skip_synchronize()."""
        checks.check_can_synchronize(False, self._exchange)
        self._lay_out()
        if not self._pipeline.synchronized:
            self._begin_step()
            self._pipeline.flush()
            self._take_means()

    def _take_means(self) -> None:
        self._pipeline.take_means()
        self._passes.clear()
        if self._end is not None:
            self._end()
            self._end = None

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which step() uses the gradients as they are after synchronize()."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, wait for all gradients, unless synchronize() has done so, and make
        the wrapped optimizer's step. Return the closure's loss."""
        loss = loss_of(closure)
        self._lay_out()
        checks.check_gradients(self, self._names)
        self._exchange.momentum.check()
        if not self._pipeline.synchronized:
            if not self._synchronizes:
                raise errors.InvalidArgumentError(
                    f"rank {self._exchange.rank}: step() in skip_synchronize() comes after "
                    "gradients that are not reduced; call synchronize() before"
                )
            self._begin_step()
            self._pipeline.send_rest()
            self._take_means()
        self._pipeline.step()
        self._exchange.between_steps(self._pipeline.device, lambda: None)
        return loss

    # After join().

    def _step_of_others(self) -> Callable[[], object]:
        """Send zeros. Return a function that waits for the means and drops them. Call it before the
        next step; until then the others may make other calls."""
        self._finish_step_of_others()
        self._members = None  # the others have compared their first steps
        self._lay_out()
        for bucket in self._pipeline.buckets:
            self._pipeline.begin(bucket)
        with self._no_gradients():
            self._pipeline.flush()
        self._in_step_of_others = True
        return self._finish_step_of_others

    def _finish_step_of_others(self) -> None:
        if not self._in_step_of_others:
            return
        self._in_step_of_others = False
        with self._no_gradients():
            self._pipeline.take_means()
        for bucket in self._pipeline.buckets:
            self._pipeline.begin(bucket)
        self._exchange.between_steps(self._pipeline.device, lambda: None)

    @contextlib.contextmanager
    def _no_gradients(self) -> Iterator[None]:
        """A context in which every .grad is None; they are restored at its end."""
        kept = {parameter: parameter.grad for parameter in self._names}
        for parameter in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Call the wrapped optimizer's zero_grad(). InvalidArgumentError between backward() and
        step(), while gradients are in flight."""
        if any(bucket.phase is Phase.IN_FLIGHT for bucket in self._pipeline.buckets):
            raise errors.InvalidArgumentError(
                f"rank {self._exchange.rank}: zero_grad() comes between backward() and step(), "
                "when gradients are on their way; call it after step() or before backward()"
            )
        super().zero_grad(*arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InvalidArgumentError: the parameters are those of the wrapped optimizer."""
        if hasattr(self, "_pipeline"):
            raise wrong("param_group", param_group, "none after wrapping; add it to the optimizer "
                        "before DistributedOptimizer")  # fmt: skip
        super().add_param_group(param_group)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, which a single rank may save. It has no
        residuals; only between load_state_dict() and the first backward() it has the loaded ones,
        so that broadcast_optimizer_state() can send them to the other ranks."""
        kept = {} if self._restored is None else {"thinwire": self._restored}
        return {**super().state_dict(), **kept}

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict and the residuals of all ranks. All ranks call
        it, and rank 0 saves it; the others get a dict without content."""
        return {**super().state_dict(), "thinwire": self._exchange.gathered_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict() or gathered_state_dict(), on every rank, or on one rank before
        broadcast_optimizer_state(). InvalidArgumentError or torch's ValueError if it does not
        fit."""
        checks.check_state_dict(state_dict)
        kept = state_dict.get("thinwire")
        if kept is not None:
            self._exchange.check_state_dict(kept)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "thinwire"})
        if kept is not None:
            self._exchange.load_state_dict(kept)
            self._pipeline.restart(self._exchange.steps)
        self._passes.clear()
        self._restored = kept

    def close(self) -> None:
        """Close the connections. This also happens at exit."""
        self._exchange.close()
