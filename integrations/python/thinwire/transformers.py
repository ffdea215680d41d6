"""A callback for the Trainer of Hugging Face's transformers 5."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from thinwire.arguments import check_kind
from thinwire.errors import warn
from thinwire.torch import Compression, compress
from thinwire.torch.exchange.rules import check_no_momentum

_FILE = "thinwire.pt"  # in a checkpoint's folder


class ThinwireCallback(TrainerCallback):
    """Compresses the gradients of a Trainer under DDP:
    trainer.add_callback(ThinwireCallback(trainer, codec="int4")).

    Each checkpoint has the residuals of all ranks in a file of rank 0, thinwire.pt; train() loads
    them in any world size. Logs get thinwire_ratio.

    Args:
        trainer: the Trainer that the callback is added to.
        resume_from: the folder that train() resumes from, if it is neither that of
            TrainingArguments nor in the output folder.
        options: codec and other options of compress(), except momentum.

    Raises:
        InvalidArgumentError: an argument is not valid.
    """

    def __init__(self, trainer: Trainer, resume_from: str | None = None, **options: Any) -> None:
        check_kind("trainer", trainer, Trainer, "the Trainer that gets this callback")
        check_kind("resume_from", resume_from, (str, type(None)), "a folder's name, or None")
        check_no_momentum("the Trainer", options)
        self._trainer, self._resume_from, self._options = trainer, resume_from, options
        self._model: DistributedDataParallel | None = None
        self._state: Compression | None = None

    @property
    def state(self) -> Compression | None:
        """The Compression; None before train(), and in a program of one process."""
        return self._state

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        model = self._trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            if args.world_size > 1:
                warn(
                    f"ThinwireCallback: {type(model).__name__} is not under DDP, so gradients go "
                    "uncompressed; name the trainer that gets this callback, and train under DDP"
                )
            return
        if model is not self._model:  # a second train() may use the same model
            self._model, self._state = model, compress(model, **self._options)
        if state.global_step > 0:
            self._load(args, state.global_step)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._state is None:
            return
        saved = self._state.gathered_state_dict()
        if state.is_world_process_zero:
            torch.save(saved, _folder(args, state.global_step) / _FILE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._state is not None and logs is not None:
            logs["thinwire_ratio"] = self._state.stats()["ratio"]

    def _load(self, args: TrainingArguments, step: int) -> None:
        for folder in self._folders(args, step):
            if (folder / _FILE).is_file():
                self._state.load_state_dict(torch.load(folder / _FILE, weights_only=True))
                return
        warn(
            f"ThinwireCallback: training resumes at step {step}, and there is no {_FILE} in "
            f"{' or '.join(map(str, self._folders(args, step)))}; residuals start empty. Name the "
            "folder as resume_from="
        )

    def _folders(self, args: TrainingArguments, step: int) -> Iterator[Path]:
        for named in (self._resume_from, args.resume_from_checkpoint):
            if isinstance(named, str):
                yield Path(named)
        yield _folder(args, step)


def _folder(args: TrainingArguments, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"
