"""Training with a parameter server. Workers and a server are processes, as in real programs. They
share this machine's processors, so the order of updates in async and ssp depends on the machine."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench import harness, lab
from bench.accuracy.tasks import TASKS, Task, evaluate, loss_of
from bench.accuracy.training import batches, row_of

_PHASES = 20  # phases of the rate; when it changes, all workers wait for one another
_TIMEOUT_S, _RUN_S = 120.0, 86400.0  # seconds for each wait, and for a run


@dataclass(frozen=True)
class StoreMethod:
    """A way of training with a store. mode, codec: as ParameterServerOptimizer takes them. momenta:
    of SGD on the server, tried like outer optimizers, because asynchrony acts like momentum
    (Mitliagkas et al., arXiv 1605.09774). The rate is chosen with the first one; for others it is
    scaled by (1 - momentum), so that an update moves the values as far in the long run."""

    name: str
    mode: str
    codec: str
    against: str
    momenta: tuple[float, ...] = (0.9,)

    @property
    def outers(self) -> tuple[tuple[float], ...]:
        """Return the momenta in the form of outer optimizers."""
        return tuple((momentum,) for momentum in self.momenta)

    def rate(self, task: Task, momentum: float) -> float:
        return task.rate * (1 - momentum) / (1 - self.momenta[0])

    def recipe(self) -> dict[str, Any]:
        recipe = {"mode": self.mode, "codec": self.codec, "phases": _PHASES}
        return recipe | {"rate by momentum": self.momenta[0]}


METHODS = {
    method.name: method
    for method in (
        StoreMethod("store sync", "sync", "fp32", "store sync"),
        StoreMethod("store sync int4", "sync", "int4", "store sync"),
        *(
            StoreMethod(f"store {name}{'' if codec == 'fp32' else ' ' + codec}", mode, codec,
                        "store sync", (0.0, 0.5, 0.9))
            for name, mode in (("ssp", "ssp:staleness=2"), ("async", "async"))
            for codec in ("fp32", "int4")
        ),
    )
}  # fmt: skip


def _work(task: Task, method: StoreMethod, momentum: float, seed: int, split: str) -> None:
    """Run a worker, or the server, which does not return from the optimizer's constructor. Worker 0
    passes its part of the row to the parent."""
    import torch
    from thinwire.torch import ParameterServerOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = task.make_model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=task.rate, momentum=momentum)
    served = ParameterServerOptimizer(
        optimizer,
        model,
        mode=method.mode,
        codec=None if method.codec == "fp32" else method.codec,
        timeout_s=_TIMEOUT_S,
    )
    store = served.store
    losses = []
    phase = max(1, task.steps // _PHASES)
    for step, rows in enumerate(batches(task, store.num_workers, seed)):
        if step % phase == 0:
            optimizer.param_groups[0]["lr"] = task.rate * task.rate_factor(step + phase // 2)
        served.zero_grad()
        loss = loss_of(model, task.data.batch(rows[store.rank]))
        loss.backward()
        served.step()
        losses.append(loss.item())
    served.wait()
    store.barrier()
    store.pull(list(parameters), [p.data for p in parameters.values()])
    if store.rank == 0:
        judged = evaluate(model, getattr(task.data, split)())
        harness.hand_over({"judged": judged, "losses": losses})
    served.close()


def train(task: Task, method: StoreMethod, outer: tuple[float], seed: int, workers: int,
          split: str) -> dict[str, Any]:  # fmt: skip
    """Train from the seed. Return the run's row, as training.train() does. RuntimeError if a
    process fails."""
    start, momentum = time.monotonic(), outer[0]
    rate = method.rate(task, momentum)
    arguments = [task.name, task.steps, task.batch, rate, method.name, momentum, seed, split]
    found = harness.run_ranks(
        lab.Lab(workers + 1, lab.LOOPBACK), [json.dumps(arguments)], _RUN_S,
        "bench.accuracy.stores", THINWIRE_SERVERS=1,
    )  # fmt: skip
    return row_of(
        task, method, seed=seed, split=split, workers=workers, **found,
        ratio=_ratio(task, method.codec), seconds=time.monotonic() - start,
        against=method.against, rate=rate, momentum=momentum,
    )  # fmt: skip


def _ratio(task: Task, codec: str) -> float:
    """Return the bytes of fp32 divided by those of the codec, for the largest parameter."""
    from thinwire import encoded_bytes

    numel = max(p.numel() for p in task.make_model().parameters())
    return 4 * numel / encoded_bytes(codec, numel)


def main() -> int:
    name, steps, batch, rate, method, momentum, seed, split = json.loads(sys.argv[1])
    task = dataclasses.replace(TASKS[name], steps=steps, batch=batch, rate=rate)
    _work(task, METHODS[method], momentum, seed, split)
    return 0


if __name__ == "__main__":
    sys.exit(main())
