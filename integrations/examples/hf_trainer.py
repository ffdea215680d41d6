"""Hugging Face's Trainer: torchrun --nproc-per-node 2 hf_trainer.py

Only the lines that end in `# thinwire` differ from the uncompressed program."""

import torch
from thinwire.transformers import ThinwireCallback  # thinwire
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Samples(Dataset):
    def __init__(self):
        self.x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index, :8].sum(0, keepdim=True) / 8**0.5}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
        )

    def forward(self, x, y):
        return {"loss": (self.net(x) - y).square().mean()}


arguments = TrainingArguments(
    output_dir="build/hf_trainer", num_train_epochs=8, per_device_train_batch_size=64,
    learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, use_cpu=True,
    ddp_backend="gloo", save_strategy="no", logging_steps=16, report_to=[], disable_tqdm=True,
    remove_unused_columns=False, seed=1,
)  # fmt: skip
trainer = Trainer(Net(), arguments, train_dataset=Samples())
trainer.add_callback(ThinwireCallback(trainer, codec="int4"))  # thinwire
trainer.train()
if trainer.is_world_process_zero():
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[-1]:.3f}")
