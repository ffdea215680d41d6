"""Plain modules, without DDP: hooks on their parameters, in whose gradients the means appear."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from thinwire import errors
from thinwire.torch import agree, private, tensors
from thinwire.torch.exchange.bucket import lay_out
from thinwire.torch.exchange.compression import COMPRESSED, Compression
from thinwire.torch.exchange.gradient_exchange import GradientExchange
from thinwire.torch.exchange.recovery import Recovery
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.group import rank_or_0, resolve
from thinwire.torch.optimizer.distributed_optimizer import DistributedOptimizer
from thinwire.torch.optimizer.model_hooks import ModelHooks
from thinwire.torch.optimizer.step_pipeline import GradientBucket, StepPipeline

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from thinwire.options import Options


class ModuleCompression(GradientExchange):
    """A plain module whose gradients are the means of all ranks when backward() returns.

    Buckets go as soon as their gradients are made, so that they overlap the rest of backward."""

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        """compress() makes it. Parameters and buffers become those of rank 0."""
        self._model, self._group = model, resolve(process_group, "compress")
        self._names = trained_names(model)
        sizes = {name: p.numel() for p, name in self._names.items()}
        options = {"policy": "p3", **options}
        super().__init__(
            codec,
            process_group,
            parameters=sizes,
            structure=tensors.structure_of(model),
            purpose="module",
            **options,
        )
        if self.config.momentum:
            raise errors.InvalidArgumentError(
                f"compress got momentum={self.config.momentum} and no optimizer to take "
                "it out of; pass optimizer="
            )
        self._accumulating = False
        self._pipeline = StepPipeline(None, self, find_unused=False)
        agree.broadcast_replica(model, self._group)
        self._hooks = ModelHooks(
            model, self._names, on_gradient=self._on_gradient, before_use=lambda _: None,
            finish=lambda: None,
        )  # fmt: skip
        self._in_backward = False

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._accumulating:
            return
        if not self._pipeline.buckets:
            order = self._hooks.agree_on_order(self._group)
            self._pipeline.take(lay_out(GradientBucket, self.bucket, order))
        if not self._in_backward:
            self._in_backward = True
            for bucket in self._pipeline.buckets:  # of a pass that failed, or is over
                bucket.restart(self.steps)
            private.after_backward(self._end_backward)
        bucket = self._pipeline.bucket_of[parameter]
        if bucket.ready(parameter):
            self._pipeline.send(bucket)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._pipeline.flush()
        self._pipeline.take_means()
        self.between_steps(self._pipeline.device, lambda: None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to .grad and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        self._group = resolve(process_group, "recover")
        rank = self.rank
        self.fail(errors.Error(f"rank {rank} left the group to recover"))
        result = super().recover(process_group)
        self._in_backward = False
        self._pipeline.restart(result.step)
        if not result.equal:
            agree.replica_from_rank(result.source, self._model, None, self._group)
        return result

    def close(self) -> None:
        """Let the model go and close the connections. Its gradients are reduced no more."""
        self._hooks.remove()
        vars(self._model).pop(COMPRESSED, None)
        super().close()


class OptimizedCompression(Compression):
    """A plain module and its optimizer, whose step() takes the means: under policy "p3" (default)
    each layer waits for its own just before the next forward pass needs it."""

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | None,
        optimizer: Optimizer,
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """compress() makes it, and replaces the optimizer's step()."""
        own_step = optimizer.step
        self._engine = DistributedOptimizer(
            optimizer, model, codec, process_group=process_group, own_step=own_step, **options
        )
        self._model, self._optimizer, self._own_step = model, optimizer, own_step
        engine = self._engine

        private.replace_step(optimizer, engine.step)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda *_: engine.finish()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: engine.finish()),
            optimizer.register_load_state_dict_post_hook(lambda *_: engine.take_momentum()),
        ]

    @property
    def exchange(self) -> GradientExchange:
        """The GradientExchange behind the hooks."""
        return self._engine.exchange

    def finish(self) -> None:
        """After step(): return when all parameters have taken it. Call it before parameters are
        read otherwise than by a forward pass or model.state_dict()."""
        self._engine.finish()

    def synchronize(self) -> None:
        """After backward(): return when every .grad holds the mean of all ranks, so that it can be
        clipped or unscaled before step()."""
        self._engine.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ of the means, between backward() and step()."""
        return self._engine.clip_grad_norm_(max_norm, norm_type)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes in here add to .grad and send nothing."""
        return self._engine.no_sync()

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def describe(self) -> str:
        return self._engine.describe()

    def state_dict(self) -> dict[str, Any]:
        self._engine.finish()
        return self._engine.exchange.state_dict()

    def gathered_state_dict(self) -> dict[str, Any]:
        self._engine.finish()
        return self._engine.exchange.gathered_state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._engine.load_residuals(saved)

    def recover(self, process_group: dist.ProcessGroup | None = None) -> Recovery:
        return self._engine.recover(process_group)

    def close(self) -> None:
        """Finish the step in flight, give the optimizer its own step() back, and close."""
        try:
            self._engine.close()
        finally:
            vars(self._model).pop(COMPRESSED, None)
            self._optimizer.step = self._own_step
            for handle in self._handles:
                handle.remove()


def trained_names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The parameters that are trained, with their names. InvalidArgumentError for one whose
    gradients cannot be reduced."""
    names = {p: private.plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    rank = rank_or_0(None)
    tensors.check_parameters(names, rank)
    tensors.check_modules(model, rank)
    return names
