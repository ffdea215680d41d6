"""Holds the predictions of `advise` against measured steps: advise_report.py FOLDER (filled by
advise_grid.py). Prints every setting's worst errors, the errors over all, and how often the advice
was right: at most 3 % slower than the best that was measured.

The best of twelve noisy figures is too good by its noise. So it is chosen by half of the rounds and
timed by the other half, in both ways, and the advice is held against the mean of the two.

Settings in CALIBRATED were looked at while the simulator was written; their errors do not count."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from thinwire.simulate import CodecCost, Layer, Link, Profile
from thinwire.torch.exchange.auto import START
from thinwire.torch.forecast.choice import Prediction, choose, predict

CALIBRATED = ("mlp-2-1gbit-128", "vgg-2-2gbit-32", "conv-2-100mbit-32")
RIGHT = 1.03


def predictions(found: dict[str, Any], **changes: float) -> tuple[Prediction, ...]:
    profiles = {
        policy: Profile(tuple(Layer(int(n), f, b) for n, f, b in p["layers"]), p["between_s"])
        for policy, p in found["profiles"].items()
    }
    link = dataclasses.replace(Link(**found["link"]), **changes)
    costs = {codec: CodecCost(**found["costs"][codec]) for codec in found["turns_s"]}
    policies = list(next(iter(found["turns_s"].values())))
    return predict(profiles, link, costs, policies, chunk_bytes=found["chunk_bytes"])


Turns = dict[tuple[str, str], list[float]]  # by codec and policy


def regret(turns: Turns, chosen: tuple[str, str]) -> float:
    """The chosen one's time over the best one's."""
    ratios = []
    for first in (0, 1):
        there, here = slice(first, None, 2), slice(1 - first, None, 2)
        best = min(turns, key=lambda key, half=there: statistics.median(turns[key][half]))
        ratios.append(statistics.median(turns[chosen][here]) / statistics.median(turns[best][here]))
    return statistics.fmean(ratios)


def auto_over_plain(auto: dict[str, Any]) -> float:
    """Their turns were beside each other. 1 where it stayed with fp32: it is the same program."""
    if auto["codec"] == START:
        return 1.0
    pairs = zip(auto["turns_s"], auto["plain_turns_s"], strict=True)
    return statistics.median(mine / plain for mine, plain in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    errors: list[float] = []
    right, automatic = [], []
    for file in sorted(arguments.folder.glob("*.json")):
        found = json.loads(file.read_text())
        rows = predictions(found)
        turns = {(c, p): s for c, row in found["turns_s"].items() for p, s in row.items()}
        measured = {key: statistics.median(seconds) for key, seconds in turns.items()}
        off = [row.step_s / measured[row.codec, row.policy] - 1 for row in rows]
        chosen = choose(rows, [row.codec for row in rows])
        loss = regret(turns, (chosen.codec, chosen.policy))
        right.append(loss <= RIGHT)
        known = file.stem in CALIBRATED
        if not known:
            errors += [abs(error) for error in off]
        print(
            f"{file.stem:22} {'calibrated' if known else '':10} errors "
            f"{100 * min(off):+5.1f} to {100 * max(off):+5.1f} %, advice {chosen.codec}/"
            f"{chosen.policy}: {loss:.3f} of the best"
        )
        automatic.append(auto_over_plain(found["auto"]))
        print(f"{'':33} codec='auto' took {found['auto']['codec']}: {automatic[-1]:.3f} of fp32")
        if arguments.verbose:
            for row, error in zip(rows, off, strict=True):
                truth = 1000 * measured[row.codec, row.policy]
                print(
                    f"    {row.codec:6} {row.policy:5} {truth:8.1f} ms, predicted "
                    f"{1000 * row.step_s:8.1f} ({100 * error:+.1f} %)"
                )
    if errors:
        print(
            f"{len(errors)} steps that nothing was fitted to: median error "
            f"{100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"
        )
    print(f"codec='auto' over fp32, both p3: worst {max(automatic):.3f}")
    print(f"advice right (within {100 * (RIGHT - 1):.0f} %): {sum(right)} of {len(right)}")


if __name__ == "__main__":
    main()
