"""FSDP2 with expert parallelism: each rank has some of the experts, whose shards lie on fewer ranks
than those of the other parameters."""

import itertools

import pytest
import thinwire
import torch
from models import data
from ranks import run
from thinwire.torch import compress
from thinwire.torch.advanced import DistributedState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS, WIDTH = 4, 20


class Experts(torch.nn.Module):
    """Every expert sees every row, and ranks leave out what others have of the layer, so that they
    need not send rows to one another. A rank has the experts of its place in the dimension
    "expert", and with tensor parallelism a part of their outputs."""

    def __init__(self, mesh):
        super().__init__()
        weight = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH
        placements = [Shard(0), Shard(2)][: mesh.ndim]
        self.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, placements))

    def forward(self, x):
        own = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        outputs = torch.einsum("bi,eio->bo", x, own).tanh()
        return x + torch.nn.functional.pad(outputs, (0, WIDTH - outputs.shape[1]))


NAMES = ("shard", "expert")
WITH_REPLICAS = ("replica", *NAMES)
WITH_TENSORS = (*NAMES, "tensor")


def mixture(codec, shape=(2, 2), dim=0, names=NAMES, **options):
    """Return (model, compression). dim: the dimension of the experts' weights that is sharded."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    outer, inner = names[: names.index("shard")], names[names.index("expert") :]
    flat = mesh[("shard", *inner)]._flatten("all")
    over = mesh[(*outer, "all")] if outer else flat
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), Experts(mesh[inner]), torch.nn.Linear(WIDTH, 10)
    )
    fully_shard(
        model[1],
        mesh=mesh[(*outer, "shard")] if outer else mesh["shard"],
        shard_placement_fn=lambda _: Shard(dim),
        reshard_after_forward=not outer,  # FSDP2 itself can't reshard DTensors to one shard
    )
    if not outer:  # FSDP2 divides the sum over replicas of one shard twice by this
        model[1].set_gradient_divide_factor(torch.distributed.get_world_size())
    fully_shard(model, mesh=over)
    if codec is None:  # Gloo has no PREMUL_SUM, which FSDP2 would ask for
        model[1].set_force_sum_reduction_for_comms(True)
    return model, None if codec is None else compress(model, codec, min_bytes=0, **options)


def trained(model, steps: int, start: int = 0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        x = data(step, torch.distributed.get_rank(), WIDTH)
        (model(x) - torch.sin(x[:, :10])).square().mean().backward()
        optimizer.step()


def local(model):
    return {name: p.detach().to_local().clone() for name, p in model.named_parameters()}


def gradients_of(_: int, shape, dim, names):
    found = []
    for codec in (None, "fp32", {"1.*": "int8", "*": "bf16"}):
        model, made = mixture(codec, shape, dim, names)
        trained(model, 1)
        gradients = {name: p.grad.to_local() for name, p in model.named_parameters()}
        found.append((gradients, None if made is None else made.stats()))
    return found


@pytest.mark.parametrize(
    ("shape", "dim", "names"),
    [
        ((2, 2), 0, NAMES),
        ((2, 2), 1, NAMES),
        ((2, 1, 2), 0, WITH_REPLICAS),
        ((2, 1, 2), 1, WITH_TENSORS),
    ],
)
def test_gradients_are_those_of_plain_fsdp2(shape, dim, names):
    for (plain, _), *ours in run(gradients_of, shape, dim, names, world=4):
        for (found, stats), tolerance in zip(ours, (1e-6, 0.02), strict=True):
            assert stats["exact_reductions"] == 0 and stats["steps"] == 1
            each = stats["meshes"]
            if names == WITH_REPLICAS:  # FSDP2 reduces one shard by itself
                stats, each = stats["replicas"], [mesh["replicas"] for mesh in each]
            assert [len(mesh["parameters"]) for mesh in each] == [4, 1]
            assert stats["wire_bytes"] == sum(mesh["wire_bytes"] for mesh in each) > 0
            for name, exact in plain.items():
                error = (found[name] - exact).abs().max()
                assert error <= tolerance * exact.abs().max(), name
        codecs = {row["name"]: row["codec"] for row in stats["parameters"]}
        assert codecs["1.weight"] == "int8" and codecs["0.weight"] == "bf16"


def resumed(rank: int, folder: str):
    model, made = mixture("int4", dim=1)
    trained(model, 3)
    kept = local(model)
    made.save(f"{folder}/{rank}")
    trained(model, 3, start=3)
    torch.distributed.barrier()
    every = [f"{folder}/{rank}" for rank in range(4)]
    for path in (every[rank], every):
        again, other = mixture("int4", dim=1)
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.to_local().copy_(kept[name])
        other.load(path)
        trained(again, 3, start=3)
        for name, value in local(model).items():
            assert torch.equal(local(again)[name], value), name
    with pytest.raises(thinwire.InvalidArgumentError, match="got the state dict of rank"):
        other.load(every[rank ^ 1])
    wrong = other.state_dict()
    wrong["meshes"][1]["part"] ^= 1
    for memory in wrong["residuals"].values():
        memory["first"] = memory["first"] + 1
    with pytest.raises(thinwire.InvalidArgumentError, match="is of part"):
        other.load_state_dict(wrong)
    for name, memory in other.state_dict()["residuals"].items():  # nothing was loaded
        assert torch.equal(memory["first"] + 1, wrong["residuals"][name]["first"])
    with pytest.raises(thinwire.InvalidArgumentError, match=r"save\(\) a file of each rank"):
        other.gathered_state_dict()
    whole = torch.nn.Linear(WIDTH, WIDTH)
    fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
    alone = compress(whole, "int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="load it into the model that it was"):
        alone.load(every)
    with pytest.raises(thinwire.InvalidArgumentError, match="of 1 sets of ranks, expected 2"):
        other.load_state_dict(alone.state_dict())


def test_each_rank_resumes_with_its_experts(tmp_path):
    run(resumed, str(tmp_path), world=4)


def saved(rank: int, folder: str, dim: int):
    model, made = mixture("int4", dim=dim)
    trained(model, 2)
    made.save(f"{folder}/{rank}")
    return made.state_dict()["residuals"], DistributedState(made).state_dict()


def loaded(rank: int, folder: str, checkpoint):
    _, made = mixture("int4", (1, 2))
    made.load([f"{folder}/{rank}" for rank in range(4)])
    residuals = made.state_dict()["residuals"]
    # torch.distributed.checkpoint reads the keys that this rank would write.
    keys = DistributedState(made).state_dict().keys()
    DistributedState(made).load_state_dict({key: checkpoint.get(key, b"") for key in keys})
    for name, memory in made.state_dict()["residuals"].items():
        assert torch.equal(memory["first"], residuals[name]["first"]), name
    return residuals


@pytest.mark.parametrize("dim", [0, 1])
def test_other_shards_load_the_sum_of_residuals(tmp_path, dim):
    """In the parameters' own order, whichever of its dimensions was and is sharded."""
    ranks = run(saved, str(tmp_path), dim, world=4)
    checkpoint = {}  # one value of a key, as torch.distributed.checkpoint keeps
    for _, parts in ranks:
        checkpoint |= {key: content for key, content in parts.items() if content}
    old = [residuals for residuals, _ in ranks]
    new = run(loaded, str(tmp_path), checkpoint, world=2)
    for name, expert in itertools.product(old[0], range(2)):
        ranks = range(expert, 4, 2) if name == "1.weight" else range(4)
        mine = range(expert, len(new), 2) if name == "1.weight" else range(len(new))
        before = sum(old[rank][name]["first"] for rank in ranks)
        after = sum(new[rank][name]["first"] for rank in mine)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
        assert before.abs().max() > 0


def refused(_: int):
    model, _ = mixture(None)
    said = r"with 'model' sharded over the ranks \[0, 1, 2, 3\], and '1' over"
    for options in ({"codec": "auto"}, {"codec": "int4", "gather": "int4"}):
        with pytest.raises(thinwire.InvalidArgumentError, match=said):
            compress(model, **options)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'2\.gate' matches no parameter"):
        compress(model, {"2.gate": "int8", "*": "int4"})
    made = compress(model, "int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="compressed already"):
        compress(model, "int4")
    made.close()
    compress(model, "int8")


def test_what_expert_parallelism_does_not_have_is_refused():
    run(refused, world=4)
