"""Search: Bayesian optimisation of a few settings, by optuna's Gaussian processes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import InvalidArgumentError, UnavailableError

_MIB = 1 << 20


class Point(NamedTuple):
    """A setting of DistributedOptimizer or State."""

    codec: str
    chunk_bytes: int
    lanes: int


@dataclass(frozen=True)
class Space:
    """The values that may be chosen. The first trial takes the first codec, and the middle one of
    the chunk sizes and of the lanes."""

    codecs: tuple[str, ...] = ("int4", "int8", "bf16", "fp32")
    chunk_bytes: tuple[int, ...] = tuple(_MIB >> 2 << i for i in range(7))  # 256 KiB to 16 MiB
    lanes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)

    def __len__(self) -> int:
        return len(self.codecs) * len(self.chunk_bytes) * len(self.lanes)

    def check(self) -> None:
        """InvalidArgumentError for an empty space."""
        if not len(self):
            raise InvalidArgumentError(
                "the space to search is empty, expected codecs, chunk_bytes and lanes; if an "
                "accuracy guard left no codec, loosen it"
            )


EVERYTHING = Space()


class Trial(NamedTuple):
    point: Point
    step_s: float


def search(
    space: Space,
    measure: Callable[[Point], float],
    trials: int,
    seed: int = 0,
    log: Path | None = None,
) -> list[Trial]:
    """At most `trials` points of the space, each with the seconds that `measure` returned for it,
    in the order of the trials; no point comes twice. log: a CSV file, a line for each trial.
    UnavailableError without optuna."""
    space.check()
    try:
        import optuna
    except ImportError as error:
        raise UnavailableError(
            "tuning needs optuna and scipy: pip install 'thinwire[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=8)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(
        {
            "codec": space.codecs[0],
            "chunk": len(space.chunk_bytes) // 2,
            "lanes": len(space.lanes) // 2,
        }
    )
    seen: dict[Point, float] = {}
    done: list[Trial] = []
    while len(done) < min(trials, len(space)):
        trial = study.ask()
        # Positions in the lists are suggested, since chunk sizes and lanes act by their ratios.
        point = Point(
            trial.suggest_categorical("codec", space.codecs),
            space.chunk_bytes[trial.suggest_int("chunk", 0, len(space.chunk_bytes) - 1)],
            space.lanes[trial.suggest_int("lanes", 0, len(space.lanes) - 1)],
        )
        if point not in seen:
            seen[point] = measure(point)
            done.append(Trial(point, seen[point]))
            if log is not None:
                _write_log(log, done)
        study.tell(trial, seen[point])
        if len(study.trials) >= 4 * trials:  # the model is sure; it proposes what it knows
            break
    return done


def best_of(done: list[Trial]) -> Trial:
    return min(done, key=lambda trial: trial.step_s)


def _write_log(file: Path, done: list[Trial]) -> None:
    """Writes the whole file at every trial, so that a run that is stopped leaves its trials."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["trial", "codec", "chunk_bytes", "lanes", "step_ms", "best_ms"])
        for number, trial in enumerate(done, 1):
            best = best_of(done[:number]).step_s
            writer.writerow(
                [number, *trial.point, f"{1000 * trial.step_s:.3f}", f"{1000 * best:.3f}"]
            )
