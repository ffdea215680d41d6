"""The end of a script with work in flight: a normal exit drains it, an exit on an exception aborts
the group and says why."""

from pathlib import Path

import pytest
from ranks import run_scripts

pytestmark = pytest.mark.slow  # each rank imports torch anew

# What uses memory after it was freed finds it overwritten, and does not go on by luck.
OVERWRITE_FREED = {
    "MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}  # fmt: skip

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from thinwire.torch import all_reduce, compress

end, store, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
all_reduce(torch.ones(1), name="x")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compression = compress(model, "int4", optimizer=optimizer, policy="p3", timeout_s=100)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 600)).square().mean().backward()
    if end == "half-way" and rank == 0:
        sys.exit()
    optimizer.step()

def main():
    for _ in range(3):
        if rank == 1:
            time.sleep(0.3)  # so that rank 0 leaves first, with its last step in flight
        step()
    if rank == 0 and end == "exception":
        raise ValueError("boom")
    if rank == 0:
        all_reduce(torch.ones(100_000), name="x", async_op=True)
        return
    compression.finish()
    result = torch.ones(100_000)
    all_reduce(result, name="x")
    print("all there", round(result.mean().item()))

main()
"""


def run_script(tmp_path: Path, end: str):
    return run_scripts(SCRIPT, end, str(tmp_path / "store"), environment=OVERWRITE_FREED)


def test_a_normal_exit_drains_what_is_in_flight(tmp_path):
    first, second = run_script(tmp_path, "normal")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == "all there 2\n"  # a sum of ones
    assert not first.stderr.strip(), first.stderr


@pytest.mark.parametrize("end, reason", [
    ("exception", "rank 0 ended on ValueError: boom"),
    ("half-way", "rank 0 left in the middle of a step"),
])  # fmt: skip
def test_an_abnormal_exit_tells_its_peers_why(tmp_path, end, reason):
    first, second = run_script(tmp_path, end)
    assert first.returncode == (1 if end == "exception" else 0), first.stderr
    assert second.returncode == 1 and "thinwire.errors.Error" in second.stderr
    assert reason in second.stderr, second.stderr
