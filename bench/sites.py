"""Rounds between sites: seconds of a round, and bytes that a member sends, beside torchft's DiLoCo
where torchft is installed.

    python -m bench.sites [--link 100mbit] [--delay_ms 20] [--members 2] [--megaparameters 5]

A round is one exchange of a whole model, and its outer step. Subjects take turns in the same
processes. torchft's DiLoCo has its own code and ProcessGroupGloo's allreduces, one a parameter,
with a stand-in for its Manager, which would add a quorum and a vote to each round. The bytes are
those of the interface's counter; the formula counts (members - 1) times the encoded model."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from bench import harness, lab

CODECS = {
    "fp32": "fp32", "int4": "int4", "adaptive 2": "adaptive", "adaptive 0.5": "adaptive:bits=0.5",
    "topk 1.56 %": "topk:density=0.0156",
}  # fmt: skip
LAYERS = 5


class Manager:
    """What torchft's DiLoCo asks of its Manager, for members that stay: the mean by torch's own
    allreduce, and rounds that are always committed."""

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

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Mean:
        return Mean(dist.all_reduce(tensor, async_op=True), tensor)


class Mean:
    """An allreduce that ends in the mean."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.div_(dist.get_world_size())


def model_of(parameters: int) -> torch.nn.Sequential:
    width = int((parameters / LAYERS) ** 0.5)
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def learn(model: torch.nn.Module, number: int) -> None:
    """A local step, as far as a round sees it."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)


def ours(codec: str, parameters: int) -> Iterator[Callable[[], None]]:
    from thinwire.torch import sites

    model = model_of(parameters)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with sites.DiLoCo(
        sites.static(), [model], inner, outer, 1 << 30, codec=codec, weight=1.0
    ) as diloco:
        numbers = iter(range(1 << 30))
        yield lambda: learn(model, next(numbers))
        yield diloco.sync


def torchfts(parameters: int) -> Iterator[Callable[[], None]]:
    from torchft.local_sgd import DiLoCo

    model = model_of(parameters)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    numbers = iter(range(1 << 30))
    with DiLoCo(Manager(), [model], inner, outer, 1):
        yield lambda: learn(model, next(numbers))
        yield inner.step


def sent_bytes() -> int:
    """Of the rank's interface."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(
        next(
            line.split(":")[1].split()[8]
            for line in Path("/proc/net/dev").read_text().splitlines()
            if line.strip().startswith(f"{name}:")
        )
    )


def measure(parameters: int, rounds: int) -> list[harness.Row]:
    """In a rank."""
    from thinwire.codec import encoded_bytes

    numel = sum(p.numel() for p in model_of(parameters).parameters())
    subjects = {name: ours(codec, parameters) for name, codec in CODECS.items()}
    if importlib.util.find_spec("torchft") is not None:
        subjects["torchft fp32"] = torchfts(parameters)
    turns = {name: (next(subject), next(subject)) for name, subject in subjects.items()}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    sent: dict[str, list[int]] = {name: [] for name in subjects}
    for number in range(rounds + 1):  # the first one connects
        for name, (prepare, exchange) in turns.items():
            prepare()
            dist.barrier()
            before, start = sent_bytes(), time.monotonic()
            exchange()
            took = time.monotonic() - start
            dist.barrier()
            if number > 0:
                seconds[name].append(took)
                sent[name].append(sent_bytes() - before)
    for subject in subjects.values():
        for _ in subject:
            pass
    others = dist.get_world_size() - 1
    rows = []
    for name in subjects:
        spec = CODECS.get(name)
        # torchft's ring sends twice the part that others own.
        formula = (
            others * LAYERS * encoded_bytes(spec, numel // LAYERS)
            if spec
            else (2 * others / (others + 1) * 4 * numel)
        )
        rows.append({
            "subject": name,
            "seconds": statistics.median(seconds[name]),
            "fastest": min(seconds[name]), "slowest": max(seconds[name]),
            "sent_bytes": statistics.median(sent[name]),
            "formula_bytes": formula,
        })  # fmt: skip
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
    harness.write(given.out, rows, "torchft", link=given.link, delay_ms=given.delay_ms)
    base = next((row["seconds"] for row in rows if row["subject"] == "torchft fp32"), None)
    print(f"{'':14} {'seconds':>22} {'torchft / it':>12} {'sent MB':>8} {'of formula':>10}")
    for row in rows:
        spread = f"{row['seconds']:.3f} ({row['fastest']:.3f} to {row['slowest']:.3f})"
        ratio = f"{base / row['seconds']:.1f}" if base else ""
        share = row["sent_bytes"] / row["formula_bytes"]
        sent = row["sent_bytes"] / 1e6
        print(f"{row['subject']:14} {spread:>22} {ratio:>12} {sent:8.2f} {share:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
