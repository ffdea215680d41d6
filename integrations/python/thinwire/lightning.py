"""Strategies for Lightning 2: DDP with compressed gradients, on GPUs and on the CPU (where
Lightning itself does not register communication hooks).

trainer = Trainer(strategy=ThinwireStrategy(codec="int4"))
fabric = Fabric(strategy=ThinwireFabricStrategy(codec="int4"))"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import as_int, wrong
from thinwire.options import ARGUMENTS
from thinwire.torch import Compression, compress
from thinwire.torch.exchange.rules import check_no_momentum

_KEY = "thinwire"  # the key of the residuals in a checkpoint
_OF_STATE = {*ARGUMENTS, "clip_value", "clip_norm", "warm_up_steps", "warm_up_codec"}


def _split(strategy: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the options of compress(), those of Lightning's strategy). TypeError for an option of
    neither, which Lightning would only find when it creates the DDP model; InvalidArgumentError for
    a value that is not valid."""
    ours = {name: value for name, value in options.items() if name in _OF_STATE}
    theirs = {name: value for name, value in options.items() if name not in ours}
    known = {*inspect.signature(strategy).parameters}
    known |= {*inspect.signature(DistributedDataParallel).parameters}
    for name in theirs.keys() - known:
        near = difflib.get_close_matches(name, _OF_STATE | known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"'{name}' is an option of neither thinwire nor {strategy.__name__}{hint}")
    check_no_momentum("Lightning", ours)
    if theirs.get("ddp_comm_hook") is not None:
        raise wrong(
            "ddp_comm_hook", theirs["ddp_comm_hook"], "none: thinwire's hook is in its place"
        )
    return ours, theirs


class ThinwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy with thinwire.torch.compress.

    Checkpoints of the Trainer include the residuals of all ranks, and load in any world size.

    Args:
        options: those of compress() (codec, min_bytes, ...) and of DDPStrategy
            (find_unused_parameters, ...), except momentum and ddp_comm_hook.

    Raises:
        TypeError: neither has an option of this name.
        InvalidArgumentError: a value is not valid, or momentum or ddp_comm_hook is passed.
    """

    strategy_name = "thinwire"

    def __init__(self, **options: Any) -> None:
        self._thinwire_options, rest = _split(DDPStrategy, options)
        super().__init__(**rest)
        self._thinwire_state: Compression | None = None
        self._thinwire_saved: Mapping[str, Any] | None = None

    @property
    def thinwire_state(self) -> Compression | None:
        """The Compression; None before fit(). It stays valid after fit(), for
        Trainer.save_checkpoint() and stats()."""
        return self._thinwire_state

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self._thinwire_state is not None:  # of an earlier fit()
            self._thinwire_state.close()
        self._thinwire_state = compress(self.model, **self._thinwire_options)
        if self._thinwire_saved is not None:
            self._thinwire_state.load_state_dict(self._thinwire_saved)
            self._thinwire_saved = None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Keep the residuals of a checkpoint: Lightning loads this part before it wraps the
        model."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self._thinwire_saved = checkpoint.get(_KEY)

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Add the residuals to the checkpoint. Lightning calls it on all ranks, and rank 0
        writes."""
        if self._thinwire_state is not None:
            checkpoint[_KEY] = self._thinwire_state.gathered_state_dict()
        super().save_checkpoint(checkpoint, *arguments, **options)


class ThinwireFabricStrategy(FabricDDPStrategy):
    """Fabric's DDPStrategy with thinwire.torch.compress; options as ThinwireStrategy takes them.

    For checkpoints pass GatheredState(strategy.states[0]) to fabric.save() and fabric.load(), one
    for each model that was passed to fabric.setup()."""

    def __init__(self, **options: Any) -> None:
        self._thinwire_options, rest = _split(FabricDDPStrategy, options)
        super().__init__(**rest)
        self.states: list[Compression] = []

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        ddp = super().setup_module(module)
        self.states.append(compress(ddp, **self._thinwire_options))
        return ddp


class ThinwireStats(Callback):
    """Logs steps, bytes, their ratio and seconds by stage to the trainer's loggers, as
    "thinwire/...".

    Args:
        every: log after this many batches.

    Raises:
        InvalidArgumentError: `every` is not a whole number from 1 on.
    """

    def __init__(self, every: int = 50) -> None:
        every = as_int("every", every, 1)
        self._every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = getattr(trainer.strategy, "thinwire_state", None)
        if state is None or (batch_idx + 1) % self._every:
            return
        stats = state.stats()
        found = {key: value for key, value in stats.items() if isinstance(value, (int, float))}
        found |= {f"{stage}_s": seconds for stage, seconds in stats["seconds"].items()}
        named = {f"thinwire/{key}": float(value) for key, value in found.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
