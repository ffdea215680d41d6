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
from thinwire.arguments import check_whole, wrong
from thinwire.horovod.joining import Joining
from thinwire.horovod.ops import Op
from thinwire.torch.exchange.bucket import lay_out
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.step_pipeline import GradientBucket, Phase, StepPipeline
from thinwire.torch.optimizer.wrapped_optimizer import WrappedOptimizer, loss_of


class ReducingOptimizer(WrappedOptimizer):
    """The base of what DistributedOptimizer() returns: a subclass of this and of the class of the
    optimizer that it was given."""

    def __init__(
        self,
        inner: Optimizer,
        names: Mapping[torch.Tensor, str],
        exchange: GradientExchange,
        op: Op,
        backward_passes_per_step: int,
        sparse_as_dense: bool,
        joining: Joining | None,
    ) -> None:
        """joining: where ranks may join(), whose optimizers are made in one order."""
        super().__init__(inner)
        self._names, self._exchange, self._op = names, exchange, op
        self._sparse_as_dense = sparse_as_dense
        self._pipeline = StepPipeline(inner, exchange, find_unused=False)
        self._passes: Counter[torch.Tensor] = Counter()  # since the last reduction
        self._synchronizes = True
        self._restored: Mapping[str, Any] | None = None
        self._joining, self._kind = joining, ""
        if joining is not None:
            self._kind = f"optimizer {len(joining.makers)}"
            make = weakref.WeakMethod(self._step_of_others)
            joining.makers[self._kind] = lambda *_: make()()
        self._end: Callable[[], object] | None = None  # of the step under way
        self._in_step_of_others = False  # after join()
        self.set_backward_passes_per_step(backward_passes_per_step)
        if exchange.config.momentum:
            exchange.take_momentum(inner, names.get)
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def __getattr__(self, name: str) -> Any:
        """Returns what a wrapped optimizer of the user's has beside torch's names. Names with an
        underscore are not passed on: they say how torch may drive an optimizer's step()."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def exchange(self) -> GradientExchange:
        """Codec, connections and statistics."""
        return self._exchange

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Between steps."""
        check_whole("passes", passes, 1)
        self.backward_passes_per_step = passes
        self._passes.clear()

    # Gradients, as autograd makes them.

    def _lay_out(self) -> None:
        """Makes the buckets at the first gradient or step."""
        if not self._pipeline.buckets:
            make = functools.partial(self._exchange.bucket, op=self._op.value)
            named = [(name, parameter) for parameter, name in self._names.items()]
            self._pipeline.take(lay_out(GradientBucket, make, named))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._lay_out()
        self._restored = None
        if self._pipeline.synchronized:  # a step was left out, as a loss scaler does
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
            raise errors.again(self._exchange.fail(error))  # peers would wait for the next step
        if bucket.ready(parameter):
            self._begin_step()
            self._pipeline.send(bucket)

    def _begin_step(self) -> None:
        """Before gradients of a step are sent."""
        if self._joining is not None and self._end is None:
            self._end = self._joining.begin(self._kind, (self._kind, None), None)

    # Steps.

    def synchronize(self) -> None:
        """After backward(): returns when every .grad is reduced. It may be clipped or unscaled
        then; step() follows, under skip_synchronize() or not."""
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
        """step() in here takes the gradients as synchronize() and its caller have left them."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for all gradients, unless synchronize() has, and makes the wrapped optimizer's
        step. The closure comes first, once. Returns its loss."""
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
        """Sends zeros. Returns a function that takes the means and drops them, to be called before
        the next step at the latest; until then the others may do something else."""
        self._finish_step_of_others()
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
        """Every .grad is None in here, and what it was after."""
        kept = {parameter: parameter.grad for parameter in self._names}
        for parameter in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """As the wrapped optimizer's. InvalidArgumentError between backward() and step(), when
        gradients are on their way."""
        if any(bucket.phase is Phase.IN_FLIGHT for bucket in self._pipeline.buckets):
            raise errors.InvalidArgumentError(
                f"rank {self._exchange.rank}: zero_grad() comes between backward() and step(), "
                "when gradients are on their way; call it after step() or before backward()"
            )
        super().zero_grad(*arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """An InvalidArgumentError: parameters are those of the optimizer that was wrapped."""
        if hasattr(self, "_pipeline"):
            raise wrong("param_group", param_group, "none after wrapping; add it to the optimizer "
                        "before DistributedOptimizer")  # fmt: skip
        super().add_param_group(param_group)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which one rank alone may save. What compression has lost is not
        in it, but for that of a dict that was loaded, until the first backward(), so that
        broadcast_optimizer_state() takes it to the other ranks."""
        kept = {} if self._restored is None else {"thinwire": self._restored}
        return {**super().state_dict(), **kept}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and what compression has lost on all ranks. All ranks call it,
        and rank 0 saves it; the others get no content."""
        return {**super().state_dict(), "thinwire": self._exchange.gathered_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes state_dict() or gathered_state_dict(), on every rank, or on one before
        broadcast_optimizer_state(). InvalidArgumentError, or torch's ValueError, if it does not
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
        """Says goodbye to the peers; at exit that happens by itself."""
        self._exchange.close()
