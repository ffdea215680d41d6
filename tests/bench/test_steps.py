"""A benchmark's measured step ends only after its exchange has ended."""

import itertools
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from bench.subjects import steps

SUBJECTS = {"ddp": steps.ddp, "horovod": steps.horovod}


def gradients_at_the_clock(rank: int, subject: str, way: str) -> list[bool]:
    """Return whether, each time the clock was read, all ranks had the same gradient."""
    models, seen = [], []

    class Watched(steps.Net):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            models.append(self)

    def read() -> float:
        grads = [p.grad for p in models[0].parameters()]
        seen.append(None if grads[0] is None else torch.cat([g.flatten() for g in grads]))
        return time.monotonic()

    steps.Net, clock, steps.time.perf_counter = Watched, steps.time.perf_counter, read
    try:
        with SUBJECTS[subject](way) as turn:
            seen.clear()
            torch.manual_seed(rank)  # each rank has different batches
            turn(3)
    finally:
        steps.Net, steps.time.perf_counter = Watched.__base__, clock
    found = []
    for mine in seen:
        both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(both, mine)
        found.append(torch.equal(*both))
    return found


@pytest.mark.parametrize(("subject", "way"), [*itertools.product(SUBJECTS, ("plain", "int4"))])
def test_a_turn_ends_after_its_exchange(subject, way):
    for found in ranks.run(gradients_at_the_clock, subject, way):
        assert found == [True] * 6, "by a step's begin and end, in turn"
