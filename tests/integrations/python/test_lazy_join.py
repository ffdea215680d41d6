"""A state joins its group at its first bucket, whenever and wherever it was made."""

import torch.distributed as dist
from models import digest, make_mlp, train
from policies import Wrapped
from ranks import run
from thinwire.torch import GradientExchange, State, hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def trained(state: State) -> str:
    ddp = DistributedDataParallel(make_mlp())
    ddp.register_comm_hook(state, hook)
    train(ddp, 3)
    return digest(ddp)


def with_one_more_on_rank_0(rank: int):
    unused = [State("int8"), GradientExchange()] if rank == 0 else []
    states = [State("int4", min_bytes=0), State("int4", min_bytes=0)]
    if rank == 0:
        assert (unused[0].rank, unused[1].world_size) == (0, 2)  # does not count as use
    order = [states[rank], states[1 - rank]]  # rank 1 uses them in another order than it made them
    return [trained(state) for state in order]


def test_states_that_are_not_used_count_for_nothing():
    first, second = run(with_one_more_on_rank_0)
    assert first == second


def over_a_new_group(rank: int):
    """Make the state first and the process group later, like trainers that make their own."""
    state = State("int4", min_bytes=0)
    store = dist.group.WORLD and dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("new", store), rank=rank, world_size=2)
    return trained(state)


def test_a_state_outlives_the_group_that_it_was_made_under():
    first, second = run(over_a_new_group)
    assert first == second


def mixed(rank: int):
    model = make_mlp()
    optimizer = Wrapped(SGD(model.parameters(), lr=0.1), model, min_bytes=0)
    state = State("int4", min_bytes=0)
    first = trained(state)
    model.train()
    model(next(iter(model.parameters())).detach()).sum().backward()
    optimizer.step()
    optimizer.finish()
    return first, digest(model)


def test_kinds_of_users_are_counted_apart():
    first, second = run(mixed)
    assert first == second
