"""What budgets between chunks would gain: the error of adaptive on a transformer's gradients where
each shard has `bits`, as now, and where the whole model has them.

    python bench/budgets.py --out build/budgets

A GPT of 4.8 M parameters on the accuracy benchmark's text, AdamW, one worker. Its gradient is cut
as an allreduce cuts it: chunks of 4 MiB, and those into as many shards as there are ranks. Errors
are |x - D(x)|^2 / |x|^2 of one encoding, by the real codec, at about the same bytes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import thinwire
import torch
from accuracy import machine
from tasks import GPT, TASKS, loss_of
from tqdm import tqdm
from training import batches

_CHUNK = 1 << 20  # elements
_BLOCK = 256
_STEPS = (20, 40, 50, 59, 60)  # whose gradients are kept; the last one is encoded
_AGES = {1: 3, 10: 2, 20: 1, 40: 0}  # steps since the sizes were seen, and where in _STEPS
_BITS = (2.0, 1.0)
_WORLDS = (2, 4, 16)
_STEP = 16  # bits go in sixteenths

Floats = np.ndarray


def record() -> list[Floats]:
    """Flat gradients at _STEPS, the last layers first, as DDP's buckets have them."""
    torch.manual_seed(1)
    model, task = GPT(width=256, layers=6), TASKS["gpt AdamW"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, kept = batches(task, 1, seed=1), []
    for step in tqdm(range(1, _STEPS[-1] + 1), "gradients"):
        loss = loss_of(model, task.data.batch(next(rows)[0]))
        optimizer.zero_grad()
        loss.backward()
        if step in _STEPS:
            parts = [p.grad.flatten() for p in reversed(list(model.parameters()))]
            kept.append(torch.cat(parts).numpy().copy())
        optimizer.step()
    return kept


def shards_of(numel: int, world: int) -> list[slice]:
    shards = []
    for begin in range(0, numel, _CHUNK):
        chunk = min(_CHUNK, numel - begin)
        blocks = -(-chunk // _BLOCK)
        bounds = [begin + min(chunk, blocks * r // world * _BLOCK) for r in range(world + 1)]
        shards += [slice(a, b) for a, b in pairwise(bounds) if a < b]
    return shards


def heads(x: Floats) -> Floats:
    """The binary logarithm of each block's root mean square."""
    rows = np.pad(x, (0, -len(x) % _BLOCK)).reshape(-1, _BLOCK).astype(np.float64)
    return np.log2(np.maximum(np.sqrt((rows * rows).mean(1)), 2.0**-100))


def _allowed(bits: Floats) -> Floats:
    return np.clip(np.round(bits * _STEP) / _STEP, 0.5, 6)


def _filled(wanted: Callable[[float], Floats], sizes: Floats, bits: float) -> Floats:
    """wanted(T) at the lowest threshold T whose mean, by size, is within `bits`."""
    low, high = -120.0, 120.0
    for _ in range(60):
        middle = (low + high) / 2
        over = np.average(wanted(middle), weights=sizes) > bits
        low, high = (middle, high) if over else (low, middle)
    return wanted(high)


def spread(parts: list[Floats], bits: float) -> Floats:
    """Bits for each part, of one threshold for all of their blocks."""
    logs = [heads(part) for part in parts]
    return _filled(
        lambda t: _allowed(np.array([np.clip(np.floor(h - t), 0, 8).mean() for h in logs])),
        np.array([len(part) for part in parts]), bits,
    )  # fmt: skip


def spread_by_norm(parts: list[Floats], bits: float) -> Floats:
    """Bits for each part, of nothing but its norm."""
    logs = np.array([math.log2(max(math.sqrt(np.mean(np.square(p))), 1e-30)) for p in parts])
    return _filled(lambda t: _allowed(logs - t), np.array([len(part) for part in parts]), bits)


def error(x: Floats, parts: list[slice], bits: Floats) -> dict[str, float]:
    """Relative squared error, and the bits an element that it took."""
    lost = size = 0.0
    for part, mine in zip(parts, bits, strict=True):
        spec = f"adaptive:bits={mine:g}"
        wire = thinwire.encode(spec, x[part])
        decoded = np.asarray(thinwire.decode(spec, wire, part.stop - part.start))
        lost += float(np.square((x[part] - decoded).astype(np.float64)).sum())
        size += 8 * len(wire)
    return {"error": lost / float(np.square(x.astype(np.float64)).sum()), "bits": size / len(x)}


def dealt(x: Floats, hands: int) -> Floats:
    """The blocks dealt out like cards: of neighbours each goes to another hand."""
    rows = x[: len(x) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return np.concatenate([rows[first::hands] for first in range(hands)]).ravel()


def error_dealt(x: Floats, world: int, bits: float, reach: int) -> dict[str, float]:
    """Of shards whose blocks are dealt over `reach` elements: the bucket, or a chunk."""
    cards = np.concatenate([
        dealt(x[begin : begin + reach], world * -(-min(reach, len(x) - begin) // _CHUNK))
        for begin in range(0, len(x), reach)
    ])  # fmt: skip
    shards = shards_of(len(cards), world)
    return error(cards, shards, np.full(len(shards), bits))


def measure(kept: list[Floats]) -> list[dict]:
    x, rows = kept[-1], []
    for bits in _BITS:
        whole = error(x, [slice(0, len(x))], np.array([bits]))
        rows.append({"budget": "the whole model", "bits": bits, "world": 1} | {"measured": whole})
        for world in _WORLDS:
            parts = shards_of(len(x), world)
            found = {
                "each shard": error(x, parts, np.full(len(parts), bits)),
                "each shard, blocks dealt in its chunk": error_dealt(x, world, bits, _CHUNK),
                "each shard, blocks dealt over all": error_dealt(x, world, bits, len(x)),
            }
            for age, place in _AGES.items():
                seen = [kept[place][part] for part in parts]
                found[f"of heads {age} steps old"] = error(x, parts, spread(seen, bits))
            seen = [kept[_AGES[10]][part] for part in parts]
            found["of norms 10 steps old"] = error(x, parts, spread_by_norm(seen, bits))
            rows += [
                {"budget": name, "bits": bits, "world": world, "measured": one}
                for name, one in found.items()
            ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/budgets"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    kept = record()
    rows = measure(kept)
    lines = ["| budget of | asked | ranks | bits | error² |", "|---|---|---|---|---|"]
    for row in rows:
        one = row["measured"]
        cells = [row["budget"], f"{row['bits']:g}", str(row["world"]), f"{one['bits']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{one['error']:.3g}"]) + " |")
    print("\n".join(lines))
    command = "python bench/budgets.py " + " ".join(sys.argv[1:])
    report = {"machine": machine(), "command": command, "numel": len(kept[0]), "rows": rows}
    (arguments.out / "budgets.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
