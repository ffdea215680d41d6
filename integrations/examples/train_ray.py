"""Ray Train: a TorchTrainer whose worker is killed continues from its checkpoint, including
residuals. The repeated steps have the same bits as the first time.

python integrations/examples/train_ray.py FOLDER"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from thinwire.torch import compress

WIDTH, EPOCHS, BATCHES, BATCH = 128, 4, 20, 32
KILLED_IN, SEEN, KILLED = 2, 5, 10  # an epoch; two of its batches


def total_of(model: torch.nn.Module) -> str:
    return sum(p.double().sum().item() for p in model.parameters()).hex()


def train(config: dict[str, str]) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    # So that a resumed run has the same bits: see train_lightning.py.
    ddp = prepare_model(model, parallel_strategy_kwargs={"find_unused_parameters": True})
    state = compress(ddp, codec="int4", min_bytes=0, timeout_s=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, checkpoint, rank = 0, ray.train.get_checkpoint(), dist.get_rank()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "all.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["thinwire"])
        first = saved["epoch"]
    for epoch in range(first, EPOCHS):
        torch.manual_seed(100 * epoch + rank)  # different data on every rank
        for batch in range(BATCHES):
            if (epoch, batch, rank) == (KILLED_IN, SEEN, 0):
                with open(config["seen"], "a") as file:
                    print(f"{total_of(model)}, begun at epoch {first}", file=file)
            if (epoch, batch, rank) == (KILLED_IN, KILLED, 1) and checkpoint is None:
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            loss = (ddp(x) - x[:, :8].sum(1, keepdim=True) / 8**0.5).square().mean()
            loss.backward()
            optimizer.step()
        found = {"loss": loss.item(), "ratio": state.stats()["ratio"]}
        residuals = state.gathered_state_dict()  # all ranks call it, and rank 0 has them
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                saved = {"model": model.state_dict(), "thinwire": residuals, "epoch": epoch + 1}
                torch.save(saved, Path(folder) / "all.pt")
            made = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report(found, checkpoint=made)


def main(folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    seen = Path(folder).resolve() / "seen"
    seen.parent.mkdir(parents=True, exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"seen": str(seen)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(seen.parent), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    for weights in seen.read_text().splitlines():
        print(f"epoch {KILLED_IN}, batch {SEEN}: weights {weights}")
    print(
        f"int4: loss {result.metrics['loss']:.3f}, {result.metrics['ratio']:.1f} times fewer bytes "
        "than fp32"
    )
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
