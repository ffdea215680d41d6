"""Stores with a quorum: weighted rounds of the workers that are there, and late workers."""

from ranks import run_program

ROUNDS = '''
"""Worker 2 is late for the first round, which the others make without it; its gradient is part of
the second one, in which it is in time."""
import os, sys, time
import thinwire
import thinwire.kvstore as kvs
import torch

folder = sys.argv[1]


def say(what):
    open(os.path.join(folder, what), "w").close()


def hear(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.01)


kv = kvs.create(sys.argv[2], timeout_s=100)
w, table = torch.zeros(5), torch.zeros(4, 3)
kv.init("w", w)
kv.init("table", table, row_sparse=True)
kv.set_optimizer("add", learning_rate=1.0)
for call in (lambda: kv.push("w", w, weight=0), lambda: kv.pushpull("w", w, weight=-1.0),
             lambda: kv.push("table", table, weight=float("inf"))):
    try:
        call()
        sys.exit("a weight that can not be was taken")
    except thinwire.InvalidArgumentError as error:
        assert f"worker {kv.rank}: key" in str(error) and "above 0" in str(error), error


def push(gradient, weight):
    kv.push("w", torch.full((5,), gradient), weight=weight)
    kv.push("table", torch.full((4, 3), gradient) * torch.tensor([[1], [0], [0], [0]]),
            weight=weight)
    kv.pull("w", out=w)
    kv.row_sparse_pull("table", out=table, row_ids=range(4))
    assert torch.equal(table[0], w[:3]) and not table[1:].any(), (w, table)
    return w[0].item()


if kv.rank == 2:
    hear("first-0", "first-1")
    values = [push(100.0, 400)]
    say("late")
    values.append(push(20.0, 200))
else:
    values = [push((4.0, 8.0)[kv.rank], (100, 300)[kv.rank])]
    say(f"first-{kv.rank}")
    hear("late")
    values.append(push(0.0, 200))
kv.barrier()
kv.pull("w", out=w)
print(f"worker {kv.rank}: {values} {w[0].item()}", flush=True)
kv.close()
'''


def test_rounds_are_means_by_weight_and_a_late_gradient_counts_in_the_next(tmp_path):
    program = tmp_path / "rounds.py"
    program.write_text(ROUNDS)
    # The first round waits out the grace; all workers arrive within it in the second round.
    name = "dist_sync:quorum=2,grace=3"
    arguments = (str(tmp_path), name)
    printed = run_program(program, *arguments, world=4, environment={"THINWIRE_SERVERS": "1"})
    lines = sorted(line for line in printed.splitlines() if line.startswith("worker"))
    # (100 * 4 + 300 * 8) / 400 = 7. The second round adds (400 * 100 + 200 * 20) / 1000 = 44.
    assert lines == [f"worker {rank}: [7.0, 51.0] 51.0" for rank in range(3)], printed
