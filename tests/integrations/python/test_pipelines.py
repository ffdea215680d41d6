"""Pipelines of torch.distributed.pipelining: two dimensions of ranks, stages and copies of each
stage, with two stages on every rank."""

import pytest
import torch
from models import data
from ranks import run
from thinwire.torch import compress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, PARTS, STEPS = 48, 16, 4, 3


def trained(mesh, wrap: str, codec: str | None):
    """Return (the parameters of this rank's stages, their compressions) after STEPS steps."""
    first, copies = mesh["stage"].get_local_rank(), mesh["copy"]
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    batch = torch.zeros(ROWS // PARTS, WIDTH)
    stages, made, parameters = [], [], []
    for number in (first, first + 2):
        part = torch.nn.Sequential(layers[number], torch.nn.Tanh())
        if wrap == "ddp":
            part = DistributedDataParallel(part, process_group=copies.get_group())
        else:
            fully_shard(part, mesh=copies)
        parameters += part.parameters()
        made += [] if codec is None else [compress(part, codec, min_bytes=0)]
        shown = {
            "input_args": batch.clone().requires_grad_(number > 0),
            "output_args": batch.clone().requires_grad_(),
        }
        group = mesh["stage"].get_group()
        stages.append(PipelineStage(part, number, 4, batch.device, group=group, **shown))

    def loss(output, expected):
        return (output - expected).square().mean()

    schedule = ScheduleInterleaved1F1B(stages, PARTS, loss_fn=loss)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = data(step, copies.get_local_rank(), WIDTH, ROWS)
        if first == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.sin(x))
        optimizer.step()
    with torch.no_grad():
        return [p.to_local() if hasattr(p, "to_local") else p for p in parameters], made


def both(_: int, wrap: str):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "copy"))
    plain, _ = trained(mesh, wrap, None)
    for codec, tolerance in (("fp32", 1e-6), ("int4", 2e-3)):
        found, made = trained(mesh, wrap, codec)
        for stats in (each.stats() for each in made):
            assert stats["steps"] == stats["all_reduces"] == STEPS
            assert stats["ratio"] > 7 or codec == "fp32"
        for mine, exact in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, exact, rtol=0, atol=tolerance)
    return found


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_stages_train_as_without_compression(wrap):
    found = run(both, wrap, world=4)
    if wrap == "ddp":
        for one, other in (found[:2], found[2:]):
            assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))
