"""tune: searches for the codec, chunk size and lanes with the shortest step for this model and
link."""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import thinwire
from thinwire import _library
from thinwire.errors import InvalidArgumentError, UnavailableError
from thinwire.torch.agree import from_rank_0, worst_of_ranks
from thinwire.torch.group import resolve
from thinwire.torch.optimizer.module_compression import OptimizedCompression

_WARM_UP = 2  # steps of a trial that are not timed
_SAMPLE = 1 << 20  # the guard measures at most this many elements of a parameter's gradient
_MIB = 1 << 20


class Point(NamedTuple):
    """A setting of compress()."""

    codec: str
    chunk_bytes: int
    lanes: int


@dataclass(frozen=True)
class Space:
    """The values to choose from. The first trial uses the first codec, and the middle values of the
    chunk sizes and of the lanes."""

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


@dataclass(frozen=True)
class Tuned:
    """The result of tune(), equal on all ranks. `options` are arguments for compress()."""

    codec: str
    chunk_bytes: int
    lanes: int
    step_s: float
    trials: int  # 0: the result is from a file
    errors: dict[str, float]  # by codec: squared error over squared norm, as `max_error`

    @property
    def options(self) -> dict[str, Any]:
        return {"codec": self.codec, "chunk_bytes": self.chunk_bytes, "lanes": self.lanes}


def tune(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[], Any],
    *,
    policy: str = "p3",
    space: Space = EVERYTHING,
    max_error: float = 0.05,
    trials: int = 40,
    steps: int = 6,
    log: str | Path | None = None,
    save: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tuned:
    """Search the space for the setting with the shortest step, by Bayesian optimisation. All ranks
    call it.

    Args:
        model: not wrapped. It is restored afterwards.
        optimizer: the model's. It is restored afterwards.
        run: makes one forward and backward pass, including its batch.
        policy: the order of chunks, as compress() takes it.
        space: the settings to choose from.
        max_error: the accuracy guard: codecs that lose more of a gradient of this model, as squared
            error over squared norm, are not tried. int8 loses about 1e-4, int4 0.03.
        trials: the largest number of settings to try.
        steps: the steps of a trial.
        log: a CSV file for the trials.
        save: a JSON file for the result. If it has the result for this model, world, policy, space
            and guard, nothing is measured.
        process_group: torch's group; None: the default group.

    Raises:
        UnavailableError: optuna is not installed.
        InvalidArgumentError: the guard leaves no codec.
    """
    group = resolve(process_group, "tune")
    signature = _signature(model, dist.get_world_size(group), policy, space, max_error)
    leads = dist.get_rank(group) == 0
    kept = from_rank_0(_load(save, signature) if leads else None, group)
    if kept is not None:
        return Tuned(**kept)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.random.get_rng_state()
    try:
        errors = _errors(model, run, space.codecs, group)
        allowed = tuple(codec for codec in space.codecs if errors[codec] <= max_error)
        measure = _Measure(model, optimizer, run, policy, steps, group)
        trial, count = measure.lead(replace(space, codecs=allowed), trials, log)
    finally:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        torch.random.set_rng_state(random)
        optimizer.zero_grad(set_to_none=True)
    tuned = Tuned(*trial.point, trial.step_s, count, errors)
    if save is not None and leads:
        found = {"signature": signature, **asdict(tuned), "trials": 0}
        Path(save).write_text(json.dumps(found, indent=1) + "\n")
    return tuned


def _signature(model, world: int, policy: str, space: Space, max_error: float) -> str:
    parts = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    text = repr((parts, world, policy, space, max_error, _library.load().tw_version()))
    return hashlib.sha256(text.encode()).hexdigest()


def _load(save: str | Path | None, signature: str) -> dict[str, Any] | None:
    if save is None or not Path(save).is_file():
        return None
    found = json.loads(Path(save).read_text())
    return found if found.pop("signature", None) == signature else None


def _errors(
    model: torch.nn.Module,
    run: Callable[[], Any],
    codecs: Sequence[str],
    group: dist.ProcessGroup,
) -> dict[str, float]:
    """Return the squared error over the squared norm of one gradient, by codec; the largest of all
    ranks."""
    model.zero_grad()
    run()
    lost = torch.zeros(len(codecs), dtype=torch.float64)
    norm = 0.0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach().flatten()[:_SAMPLE].float().cpu().numpy()
        norm += float((gradient.astype("float64") ** 2).sum())
        for i, codec in enumerate(codecs):
            sent = thinwire.decode(codec, thinwire.encode(codec, gradient), gradient.size)
            lost[i] += float(((gradient - sent).astype("float64") ** 2).sum())
    lost /= max(norm, 1e-300)
    return dict(zip(codecs, worst_of_ranks(lost.tolist(), group), strict=True))


class _Measure:
    """Times points on all ranks; rank 0 chooses them."""

    def __init__(self, model, optimizer, run, policy: str, steps: int, group) -> None:
        self._model, self._optimizer, self._run = model, optimizer, run
        self._policy, self._steps, self._group = policy, steps, group

    def lead(self, space: Space, trials: int, log: str | Path | None) -> Any:
        """Return (the best trial, the number of trials) on every rank. A failure of rank 0 only,
        such as a missing optuna, is raised on all ranks."""
        space.check()
        if dist.get_rank(self._group) == 0:
            failure: Exception | None = None
            done = []
            try:
                path = None if log is None else Path(log)
                done = search(space, self._announce, trials, log=path)
            except thinwire.Error as error:
                failure = error
            from_rank_0(None, self._group)
        else:
            while (point := from_rank_0(None, self._group)) is not None:
                self._time(Point(*point))
            failure, done = None, []
        found = (best_of(done), len(done)) if done else None
        failure, found = from_rank_0((failure, found), self._group)
        if failure is not None:
            raise failure
        return found

    def _announce(self, point: Point) -> float:
        from_rank_0(tuple(point), self._group)
        return self._time(point)

    def _time(self, point: Point) -> float:
        """Return the seconds of a step on the slowest rank."""
        settings = point._asdict()
        subject = OptimizedCompression(
            self._model, settings.pop("codec"), self._optimizer,
            policy=self._policy, process_group=self._group, **settings,
        )  # fmt: skip
        try:
            start = time.perf_counter()
            for step in range(_WARM_UP + self._steps):
                if step == _WARM_UP:
                    subject.finish()
                    start = time.perf_counter()
                self._optimizer.zero_grad()
                self._run()
                self._optimizer.step()
            subject.finish()
            seconds = (time.perf_counter() - start) / self._steps
        finally:
            subject.close()
        return worst_of_ranks([seconds], self._group)[0]


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
    """Try at most `trials` different points of the space. Return them in this order, each with the
    seconds that `measure` returned. log: a CSV file with a line per trial. UnavailableError without
    optuna."""
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
        # optuna suggests positions in the lists, because ratios of chunk sizes and lanes matter.
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
        if len(study.trials) >= 4 * trials:  # the sampler only repeats points that it knows
            break
    return done


def best_of(done: list[Trial]) -> Trial:
    return min(done, key=lambda trial: trial.step_s)


def _write_log(file: Path, done: list[Trial]) -> None:
    """Write the whole file after every trial, so that an interrupted run leaves its trials."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["trial", "codec", "chunk_bytes", "lanes", "step_ms", "best_ms"])
        for number, trial in enumerate(done, 1):
            best = best_of(done[:number]).step_s
            writer.writerow(
                [number, *trial.point, f"{1000 * trial.step_s:.3f}", f"{1000 * best:.3f}"]
            )
