"""Hugging Face's Trainer with one more callback.

torchrun --nproc-per-node 2 integrations/examples/train_transformers.py FOLDER [resume]"""

from __future__ import annotations

import sys

import torch
from thinwire.transformers import ThinwireCallback
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SAMPLES, LENGTH, STEPS = 512, 16, 40


class Sentences(Dataset):
    """Sentences of random words; the label tells from which half of the words most of them are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(SAMPLES) % 2
        words = torch.randint(0, 50, (SAMPLES, LENGTH), generator=generator)
        self.items = [
            {"input_ids": row + 50 * label, "labels": label}
            for row, label in zip(words, labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.items[index]


def main(folder: str, resume: str = "") -> None:
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, save_steps=STEPS // 2, logging_steps=10,
        per_device_train_batch_size=16, learning_rate=1e-3, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=1, ddp_backend="gloo",
        ddp_find_unused_parameters=True,  # as in train_lightning.py
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences())
    callback = ThinwireCallback(trainer, codec="int4", min_bytes=0)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    if trainer.is_world_process_zero():
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        stats = callback.state.stats()
        total = sum(p.double().sum().item() for p in trainer.model.parameters())
        print(
            f"int4: loss {float(losses[0]):.3f} to {float(losses[-1]):.3f} in {stats['steps']} "
            f"steps, {stats['ratio']:.1f} times fewer bytes than fp32; weights {total.hex()}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
