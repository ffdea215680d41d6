"""Measures steps of every codec and policy on several links, and beside them what `advise` measures
there: the truth that its predictions are held against (advise_report.py).

    python bench/advise_grid.py [--settings vgg:2:200mbit:40,... | --far] [--out FOLDER]

A setting is model : ranks : link : batch, and : ms of latency on a far link. Each gets a JSON file
with all raw figures, so that predictions can be made anew without measuring again."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import lab_ranks
import torch
from subjects import ALONE, Subject
from thinwire.simulate import Layer, Profile
from thinwire.torch.advise import ACCURATE, CODECS, rehearse
from thinwire.torch.exchange.auto import START
from thinwire.torch.forecast.probe import probe

POLICIES = ("fifo", "wfbp", "p3")
SETTINGS = (
    "mlp:2:1gbit:128", "vgg:2:2gbit:32", "conv:2:100mbit:32", "mlp:3:2gbit:32",
    "conv:2:20mbit:16", "conv:2:loopback:32", "conv:3:50mbit:16", "conv:4:100mbit:16",
    "mlp:2:1gbit:16", "mlp:2:2gbit:64", "mlp:2:loopback:512", "vgg:2:1gbit:16",
    "vgg:2:1gbit:40", "vgg:2:loopback:16", "vgg:3:2gbit:8",
)  # fmt: skip
FAR = ("vgg:2:1gbit:16:5", "mlp:2:1gbit:64:15")
CHUNK_BYTES = 1 << 20
AUTO_STEPS = 48  # in which codec="auto" has made up its mind
ROUNDS = 9  # of everything in turns, so that all see the same machine
# Seconds of a turn: short steps depend more on their minute, and where packets are lost a few
# steps are much longer than the others.
_TURN_S = 0.3
_LEAST_STEPS, _MOST_STEPS = 4, 12
TIMEOUT_S = 900.0


def typical_profile(profiles: list[Profile]) -> Profile:
    """Medians of all rounds, as the steps' are."""
    layers = tuple(
        Layer(*(statistics.median(values) for values in zip(*layer, strict=True)))
        for layer in zip(*(profile.layers for profile in profiles), strict=True)
    )
    return Profile(layers, statistics.median(profile.between_s for profile in profiles))


def turn_steps(step_s: float) -> int:
    """Equal on all ranks, as the slowest rank's step is."""
    return max(_LEAST_STEPS, min(_MOST_STEPS, math.ceil(_TURN_S / step_s)))


def measure_link() -> dict[str, Any]:
    measured = probe(CODECS, torch.device("cpu"))
    return {
        "link": dataclasses.asdict(measured.link),
        "costs": {codec: dataclasses.asdict(cost) for codec, cost in measured.costs.items()},
    }


def measure_steps(model: str, batch: int) -> dict[str, Any]:
    """All that the ranks find out; equal on all of them."""
    alone = Subject(model, batch, ALONE, "fp32")
    subjects = {
        (codec, policy): Subject(model, batch, policy, codec, chunk_bytes=CHUNK_BYTES)
        for codec in ACCURATE
        for policy in POLICIES
    }
    steps = {}
    for key, subject in subjects.items():
        subject.train(2)
        subject.turn(2)
        steps[key] = turn_steps(subject.turns.pop())
    alone.train(2)
    alone.turn(2)
    steps_alone = turn_steps(alone.turns.pop())
    auto = Subject(model, batch, "p3", "auto", chunk_bytes=CHUNK_BYTES)
    auto.train(AUTO_STEPS)
    plain = Subject(model, batch, "p3", START, chunk_bytes=CHUNK_BYTES)
    plain.train(2)
    profiles: dict[str, list[Profile]] = {"p3": [], "wfbp": []}
    for number in range(ROUNDS):
        for policy, found in profiles.items():
            given = alone.model, alone.optimizer, alone.run, policy, steps_alone, None
            found.append(rehearse(*given))
        alone.turn(steps_alone)
        for key, subject in subjects.items():
            subject.turn(steps[key])
        pair = [plain, auto] if number % 2 else [auto, plain]  # beside each other
        for subject in pair:
            subject.turn(steps[START, "p3"])
    for subject in (auto, plain, *subjects.values()):
        subject.close()
    return {
        "alone_s": statistics.median(alone.turns),
        "profiles": {
            policy: dataclasses.asdict(typical_profile(p)) for policy, p in profiles.items()
        },
        # By round: everything in one round saw the same minute of the machine.
        "turns_s": {
            codec: {policy: subjects[codec, policy].turns for policy in POLICIES}
            for codec in ACCURATE
        },
        "auto": {
            "codec": auto.optimizer.codec,
            "turns_s": auto.turns,
            "plain_turns_s": plain.turns,
        },
    }


def measure(model: str, batch: int, probe_only: bool) -> dict[str, Any]:
    return measure_link() | ({} if probe_only else measure_steps(model, batch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--far", action="store_true", help="settings with latency instead")
    parser.add_argument("--out", type=Path, default=Path("build/bench/advise"))
    parser.add_argument("--probe_only", action="store_true", help="renew what advise measures")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # set in the ranks
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    lab_ranks.add_argument(parser)
    arguments = parser.parse_args()
    if lab_ranks.is_rank(arguments):
        inside = arguments.model, arguments.batch, arguments.probe_only
        return lab_ranks.be_one(arguments, lambda: measure(*inside))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for setting in FAR if arguments.far else arguments.settings.split(","):
        model, world, link, batch, *delay_ms = setting.split(":")
        options = {"model": model, "batch": batch, "probe_only": arguments.probe_only}
        measured = lab_ranks.run(
            __file__, int(world), link, options, TIMEOUT_S, *map(float, delay_ms)
        )
        if measured is None:
            continue
        file = arguments.out / f"{setting.replace(':', '-')}.json"
        found = {"setting": setting, "chunk_bytes": CHUNK_BYTES}
        if arguments.probe_only:
            found = json.loads(file.read_text())
        found |= measured
        file.write_text(json.dumps(found, indent=1) + "\n")
        best = min(
            (statistics.median(turns), codec, policy)
            for codec, row in found["turns_s"].items()
            for policy, turns in row.items()
        )
        print(f"{setting}: alone {1000 * found['alone_s']:.1f} ms, best {best}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
