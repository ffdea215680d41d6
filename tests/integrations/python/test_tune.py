"""The tuner: its search on a known surface, its guard, its log and its file."""

import csv
import math

import pytest
import thinwire
import torch
from models import data, digest, make_mlp
from ranks import run
from thinwire.torch.tune import EVERYTHING, Point, Space, best_of, search, tune

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'thinwire[tune]'")


def bowl(point: Point) -> float:
    """Return a cost that is lowest at int8, 1 MiB and 3 lanes."""
    codec = {"int4": 0.3, "int8": 0.0, "bf16": 0.5, "fp32": 1.0}[point.codec]
    return 1 + codec + 0.2 * abs(math.log2(point.chunk_bytes) - 20) + 0.1 * abs(point.lanes - 3)


@pytest.mark.slow
def test_it_finds_the_best_of_a_bowl(tmp_path):
    log = tmp_path / "log.csv"
    done = search(EVERYTHING, bowl, 30, log=log)
    assert len({trial.point for trial in done}) == len(done) <= 30
    assert best_of(done).step_s <= 1.05
    rows = list(csv.DictReader(log.open()))
    assert len(rows) == len(done)
    assert float(rows[-1]["best_ms"]) == pytest.approx(1000 * best_of(done).step_s)


def test_a_small_space_is_tried_out(tmp_path):
    space = Space(("int4",), (1 << 20, 4 << 20), (2, 4))
    assert len(search(space, bowl, 50)) == 4
    with pytest.raises(thinwire.InvalidArgumentError, match="guard"):
        search(Space(codecs=()), bowl, 5)


def tuned(rank: int, folder: str, max_error: float):
    model = make_mlp(width=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = digest(model)
    result = tune(
        model,
        optimizer,
        lambda: model(data(0, rank, width=256)).square().mean().backward(),
        space=Space(chunk_bytes=(1 << 16, 1 << 20), lanes=(1, 2)),
        max_error=max_error,
        trials=5,
        steps=2,
        log=f"{folder}/log.csv",
        save=f"{folder}/tuned.json",
    )
    assert digest(model) == before and not optimizer.state_dict()["state"]
    return result


@pytest.mark.slow
def test_every_rank_gets_the_result_and_the_file_saves_the_work(tmp_path):
    first, second = run(tuned, str(tmp_path), 0.05)
    assert first == second
    assert first.trials == 5 and set(first.options) == {"codec", "chunk_bytes", "lanes"}
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 6
    again, _ = run(tuned, str(tmp_path), 0.05)
    assert again.trials == 0 and again.options == first.options
    other, _ = run(tuned, str(tmp_path), 0.01)  # a saved result is not used for another guard
    assert other.trials == 5


def test_the_guard_keeps_codecs_out(tmp_path):
    result, _ = run(tuned, str(tmp_path), 1e-3)
    assert result.codec != "int4"
    assert result.errors["int4"] > 1e-3 > result.errors["int8"] > result.errors["fp32"] == 0.0


def hopeless(rank: int, folder: str):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(thinwire.InvalidArgumentError, match="guard"):
        tune(
            model,
            optimizer,
            lambda: model(data(0, rank)).square().mean().backward(),
            space=Space(codecs=("int4",)),
            max_error=0.0,
        )


def test_a_guard_that_leaves_nothing_is_an_error(tmp_path):
    run(hopeless, str(tmp_path))
