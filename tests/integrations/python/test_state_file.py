"""State files are atomic and without pickle. Damaged ones are refused with a typed error."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import thinwire
import torch
from models import digest, make_mlp, train, wrap
from ranks import HANG_S, run, started_programs
from thinwire.torch.exchange import state_file

safetensors = pytest.importorskip("safetensors.torch")


def make_state(value: float = 1.0, numel: int = 1000) -> dict:
    memory = {kind: torch.full((numel,), value) for kind in ("first", "second", "momentum")}
    return {
        "format": 2, "codec": {"*.bias": "bf16", "*": "int4"}, "world": 2, "rank": 1, "steps": 7,
        "sparse": ["a/b"], "residuals": {"a/b": memory, "c": memory},
    }  # fmt: skip


def equal(one: dict, other: dict) -> bool:
    flat = [
        {key: value for key, value in state.items() if key != "residuals"} for state in (one, other)
    ]
    residuals = one["residuals"], other["residuals"]
    return flat[0] == flat[1] and all(
        residuals[0][name].keys() == residuals[1][name].keys()
        and all(torch.equal(t, residuals[1][name][kind]) for kind, t in memory.items())
        for name, memory in residuals[0].items()
    )


def test_a_file_gives_back_what_was_saved(tmp_path):
    path = tmp_path / "state.safetensors"
    for value in (1.0, 2.0):
        state_file.save(make_state(value), path)
        assert equal(state_file.load(path), make_state(value))
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_the_header_says_whose_it_is(tmp_path):
    state_file.save(make_state(), tmp_path / "s")
    with safetensors.safe_open(tmp_path / "s", framework="pt") as file:
        header = file.metadata()
    assert (header["thinwire_state"], header["world"], header["rank"]) == ("2", "2", "1")
    assert header["steps"] == "7" and json.loads(header["codec"]) == {"*.bias": "bf16", "*": "int4"}


def damaged_files() -> dict[str, tuple[bytes, str]]:
    """Return name -> (content, words of the error)."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        state_file.save(make_state(), Path(folder) / "s")
        whole = (Path(folder) / "s").read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    other = safetensors.save({"x": torch.zeros(3)})
    header = {"thinwire_state": "9"}
    return {
        "empty": (b"", "whole safetensors file"),
        "cut": (whole[:-9], "whole safetensors file"),
        "cut header": (whole[:40], "whole safetensors file"),
        "flipped": (bytes(flipped), "digest"),
        "pickle": (b"\x80\x04K\x01.", "whole safetensors file"),
        "foreign": (other, "something else"),
        "newer": (safetensors.save({"x": torch.zeros(3)}, header), "expected version 2, got 9"),
    }


@pytest.mark.parametrize("kind", sorted(damaged_files()))
def test_a_damaged_or_foreign_file_is_refused(kind, tmp_path):
    content, words = damaged_files()[kind]
    path = tmp_path / "bad.state"
    path.write_bytes(content)
    with pytest.raises(thinwire.InvalidArgumentError, match=words) as caught:
        state_file.load(path)
    assert str(path) in str(caught.value) and "expected" in str(caught.value)


def test_every_cut_is_noticed(tmp_path):
    state_file.save(make_state(numel=20), tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "s").write_bytes(whole[:size])
        with pytest.raises(thinwire.InvalidArgumentError):
            state_file.load(tmp_path / "s")


def test_a_missing_file_and_a_missing_folder(tmp_path):
    with pytest.raises(thinwire.InvalidArgumentError, match="can't be read"):
        state_file.load(tmp_path / "none")
    with pytest.raises(thinwire.InvalidArgumentError, match="can't be written"):
        state_file.save(make_state(), tmp_path / "none" / "s")


_CRASH = """
import io, os, signal, sys
from test_state_file import make_state
from thinwire.torch.exchange import state_file

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def open_and_die_in_mid_write(*args):
    class Dying(io.FileIO):
        def write(self, content):
            super().write(content[: len(content) // 2])
            die()
    return Dying(args[0], args[1].replace("b", ""))

where, path = sys.argv[1:]
if where == "write":
    state_file.open = open_and_die_in_mid_write
else:
    setattr(os, where, die)
state_file.save(make_state(2.0, 100_000), path)
"""


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_crash_in_mid_save_leaves_the_old_file_whole(where, tmp_path):
    path = tmp_path / "s"
    state_file.save(make_state(1.0, 100_000), path)
    program = tmp_path / "crash.py"
    program.write_text(_CRASH)
    with started_programs(program, where, str(path), environments=[{}]) as [crashing]:
        assert crashing.exit_code(time.monotonic() + HANG_S) == -signal.SIGKILL
    assert equal(state_file.load(path), make_state(1.0, 100_000))
    state_file.save(make_state(3.0), path)  # the rest of the crashed save does no harm
    assert equal(state_file.load(path), make_state(3.0))


def train_through(rank: int, folder: str, pause: bool):
    """Train like train_through() of test_checkpoint.py, but save to files."""
    model = make_mlp()
    ddp, state = wrap(model, "int4", find_unused_parameters=True)
    train(ddp, 5)
    if pause:
        path = f"{folder}/{rank}.safetensors"
        state.save(path)
        state.close()
        ddp, state = wrap(model, "int4", find_unused_parameters=True)
        state.load(path)
    train(ddp, 3, start=5)
    return digest(model)


def test_resuming_from_files_is_bitwise_never_having_stopped(tmp_path):
    through, paused = (run(train_through, str(tmp_path), pause) for pause in (False, True))
    assert through == paused


def load_into_three(rank: int, folder: str):
    _, state = wrap(make_mlp(), "int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="rank 0 of 2"):
        state.load(f"{folder}/0.safetensors")
    state.load([f"{folder}/{r}.safetensors" for r in range(2)])
    return state.state_dict()["residuals"]


def test_loading_into_another_world_keeps_the_sum(tmp_path):
    run(train_through, str(tmp_path), True)
    saved = [state_file.load(tmp_path / f"{r}.safetensors")["residuals"] for r in range(2)]
    loaded = run(load_into_three, str(tmp_path), world=3)
    for name in saved[0]:
        before = sum(one[name]["first"] + 2 * one[name]["second"] for one in saved)
        after = sum(one[name]["first"] + 3 * one[name]["second"] for one in loaded)
        assert torch.allclose(before, after, atol=1e-7) and before.any()
