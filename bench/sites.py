"""Rounds between sites: seconds of a round, and bytes that a member sends, compared with torchft's
DiLoCo if torchft is installed, and with hivemind and Flower if build/peers has environments with
them (`make bench-sites` creates those).

    python -m bench.sites [--link 100mbit] [--delay_ms 20] [--members 2] [--megaparameters 5]

A round is one exchange of a whole model, and its outer step. Subjects take turns in the same
processes, except hivemind and Flower (sites_peers.py). torchft's DiLoCo runs its own code with
ProcessGroupGloo's allreduces, one per parameter, and a stand-in for its Manager, which would add a
quorum and a vote to each round. The bytes come from the counter of member 0's interface; the
formula counts (members - 1) times the encoded model."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench import harness, lab

CODECS = {
    "fp32": "fp32", "int4": "int4", "adaptive 2": "adaptive", "adaptive 0.5": "adaptive:bits=0.5",
    "topk 1.56 %": "topk:density=0.0156",
}  # fmt: skip
LAYERS = 5
START_S = 0.2  # seconds until all members know the start time, on links of up to 50 ms
PEERS = ("hivemind", "flwr")


class Manager:
    """A stand-in for the Manager of torchft's DiLoCo, for fixed members: it averages by torch's
    allreduce, and always commits rounds."""

    def __init__(self) -> None:
        self._use_async_quorum = False
        self._step = 0

    def start_quorum(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, *_arguments: object) -> None: ...

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False
    ) -> torch.futures.Future:
        summed = dist.all_reduce(tensor, async_op=True).get_future()
        return summed.then(lambda _: tensor.div_(dist.get_world_size()))


def model_of(parameters: int) -> torch.nn.Sequential:
    width = int((parameters / LAYERS) ** 0.5)
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def learner(parameters: int) -> tuple[torch.nn.Module, torch.optim.SGD, torch.optim.SGD]:
    """Return a model, its inner optimizer, which does nothing (learn() changes the model), and the
    outer one."""
    model = model_of(parameters)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return model, inner, outer


def learn(model: torch.nn.Module, number: int) -> None:
    """Change the model as a local step would, as far as a round is concerned."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)


Round = tuple[Callable[[], None], Callable[[], None]]  # (local steps, exchange)


@contextlib.contextmanager
def ours(codec: str, parameters: int) -> Iterator[Round]:
    from thinwire.torch import sites

    model, inner, outer = learner(parameters)
    with sites.DiLoCo(
        sites.static(), [model], inner, outer, 1 << 30, codec=codec, weight=1.0
    ) as diloco:
        numbers = iter(range(1 << 30))
        yield (lambda: learn(model, next(numbers)), diloco.sync)


@contextlib.contextmanager
def torchfts(parameters: int) -> Iterator[Round]:
    from torchft.local_sgd import DiLoCo

    model, inner, outer = learner(parameters)
    numbers = iter(range(1 << 30))
    with DiLoCo(Manager(), [model], inner, outer, 1):
        yield (lambda: learn(model, next(numbers)), inner.step)


def sent_bytes() -> int:
    """Return the bytes that the rank's interface has sent."""
    line = rf"{os.environ['GLOO_SOCKET_IFNAME']}:(?:\s*\d+){{8}}\s+(\d+)"
    return int(re.search(line, Path("/proc/net/dev").read_text())[1])


def start_together() -> None:
    """Return on all members at the same time of the machine's clock. After a barrier members
    continue up to one latency apart, which an early member would count as part of its round."""
    dist.barrier()
    moment = torch.tensor(time.monotonic() + START_S, dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, moment.item() - time.monotonic()))


def measure(parameters: int, rounds: int) -> list[harness.Row]:
    """Measure all subjects; runs in a rank."""
    from thinwire.codec import encoded_bytes

    numel = sum(p.numel() for p in model_of(parameters).parameters())
    subjects = {name: ours(codec, parameters) for name, codec in CODECS.items()}
    if importlib.util.find_spec("torchft") is not None:
        subjects["torchft fp32"] = torchfts(parameters)
    took: dict[str, list[tuple[float, int]]] = {name: [] for name in subjects}
    with contextlib.ExitStack() as stack:
        turns = {name: stack.enter_context(subject) for name, subject in subjects.items()}
        for _ in range(rounds + 1):
            for name, (prepare, exchange) in turns.items():
                prepare()
                took[name].append(timed_round(exchange))
    others = dist.get_world_size() - 1
    # The ring of torchft's allreduce sends twice the part that other members own.
    formulas = {"torchft fp32": 2 * others / (others + 1) * 4 * numel} | {
        name: others * LAYERS * encoded_bytes(codec, numel // LAYERS)
        for name, codec in CODECS.items()
    }
    return [row_of(name, took[name][1:], formulas[name]) for name in subjects]  # the first connects


def timed_round(exchange: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of a round, and the bytes that this member sent."""
    start_together()
    before, start = sent_bytes(), time.monotonic()
    exchange()
    took = time.monotonic() - start
    dist.barrier()
    return took, sent_bytes() - before


def row_of(subject: str, took: Sequence[tuple[float, int]], formula: float | None) -> harness.Row:
    seconds, sent = zip(*took, strict=True)
    return {
        "subject": subject, "seconds": statistics.median(seconds), "fastest": min(seconds),
        "slowest": max(seconds), "sent_bytes": statistics.median(sent), "formula_bytes": formula,
    }  # fmt: skip


def peers(given: argparse.Namespace) -> list[harness.Row]:
    """Return rows of the peers that have their own environments, each in a separate lab."""
    rows = []
    for name in PEERS:
        python = harness.ROOT / "build" / "peers" / name / "bin" / "python"
        if not python.exists():
            print(f"{name} is left out: {python} does not exist", file=sys.stderr)
            continue
        argv = [name, f"--megaparameters={given.megaparameters}", f"--rounds={given.rounds}"]
        with lab.open_lab(given.members, given.link, delay_ms=given.delay_ms) as place:
            rows += harness.run_ranks(place, argv, 300, "bench.sites_peers", str(python))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--delay_ms", type=float, default=20.0, help="one way")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--megaparameters", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/sites.json"))
    given = parser.parse_args()
    if harness.is_rank():
        return harness.be_rank(lambda: measure(int(given.megaparameters * 1e6), given.rounds))
    if given.link != lab.LOOPBACK and (refusal := lab.can_shape()):
        print(f"skipped: {refusal}", file=sys.stderr)
        return lab.SKIPPED
    with lab.open_lab(given.members, given.link, delay_ms=given.delay_ms) as place:
        rows = harness.run_ranks(place, sys.argv[1:], 540, "bench.sites")
    rows += peers(given)
    base = next((row["seconds"] for row in rows if row["subject"] == "torchft fp32"), None)
    for row in rows:
        if base:
            row["torchft_over_it"] = base / row["seconds"]
        if row["formula_bytes"]:  # None for hivemind, which splits by measured bandwidth
            row["of_formula"] = row["sent_bytes"] / row["formula_bytes"]
    harness.write(given.out, rows, "torchft", link=given.link, delay_ms=given.delay_ms)
    print(harness.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
