"""Every public function and method is called with each argument replaced by a wrong one: what it
does not accept is a typed error that names the argument, before anything has changed."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy
import pytest
import thinwire
import thinwire.horovod as hvd
import thinwire.torch
import torch
from horovod_calls import horovod_calls
from public_calls import Call, thinwire_calls
from ranks import run
from thinwire.torch import State, advanced, backend, process_group

WRONG: tuple[Any, ...] = (None, 5, -1, 2.5, "x", b"x", [], {}, (), object(), [5], {5: 5}, {"x": 5})


def table(folder: str) -> dict[str, Callable[[], Call]]:
    return thinwire_calls(folder) | horovod_calls()


# Allowed outcomes of a wrong argument.

ACCEPTED = "an object of no type that it knows is accepted"
# Arguments that are objects to send, and a flag that torch uses as a truth value.
TAKES_ANYTHING = {
    "horovod.broadcast_object(obj)", "horovod.allgather_object(obj)",
    "horovod.ReducingOptimizer.zero_grad(set_to_none)",
}  # fmt: skip


def complaint(call: Callable[..., Any], arguments: dict[str, Any], name: str, got: Any) -> str:
    """Return what is wrong with the call's reaction to `got` as argument `name`; empty: nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = call(**arguments | {name: got})
            if isinstance(result, torch.futures.Future):
                result.wait()
    except thinwire.InvalidArgumentError as error:
        parts = list(got) if isinstance(got, (bytes, list, dict)) else []
        values = [got, *parts]
        known = [name, *map(repr, values), *(type(value).__name__ for value in values)]
        if any(word in str(error) for word in known):
            return ""
        return f"says neither name nor value: {error}"
    except (TypeError, ValueError) as error:  # from torch, whose optimizer ours may wrap
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        if "/torch/optim/" in file and name in str(error):
            return ""
        return f"{error!r} from {file}"
    except thinwire.UnavailableError as error:
        return "" if "pip install" in str(error) else f"{error!r}"  # the argument was accepted
    except FileNotFoundError:
        return ""  # any text may be a path
    except UserWarning as warning:
        file = traceback.extract_tb(warning.__traceback__)[-1].filename
        return "" if "thinwire" in file else f"a warning from {file}: {warning}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} from {frame.filename}:{frame.lineno}: {error}"
    return ACCEPTED if type(got) is object else ""


def complaints(_rank: int, folder: str, callables: list[str]) -> list[str]:
    os.chdir(folder)  # so that "x" is a valid file name
    hvd.init()
    found = []
    for title, make in table(folder).items():
        if title not in callables:
            continue
        for name in make()[1]:
            for got in WRONG:
                call, arguments = make()
                wrong = complaint(call, arguments, name, got)
                if wrong == ACCEPTED and f"{title}({name})" in TAKES_ANYTHING:
                    continue
                if wrong:
                    found.append(f"{title}({name}={got!r}): {wrong}")
    return found


@pytest.mark.parametrize("part", range(4))
def test_a_wrong_argument_is_a_typed_error_that_names_it(tmp_path, part):
    callables = sorted(table(str(tmp_path)))[part::4]
    found = run(complaints, str(tmp_path), callables, world=1)[0]
    assert not found, "\n".join(found)


# Integers of numpy, which are no instances of int, are accepted where Python's are.


def outcome(make: Callable[[], Call], name: str, got: Any) -> str:
    """Return the type of the error of a call with `got` as argument `name`, with its message."""
    call, arguments = make()
    try:
        result = call(**arguments | {name: got})
        if isinstance(result, torch.futures.Future):
            result.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(_rank: int, folder: str, callables: list[str]) -> list[str]:
    os.chdir(folder)
    hvd.init()
    found = []
    for title, make in table(folder).items():
        if title not in callables:
            continue
        for name, valid in make()[1].items():
            one = [1] if isinstance(valid, list) and valid and type(valid[0]) is int else 1
            for got in (one, valid):
                as_numpys = numpys(got)
                if as_numpys is not None and not outcome(make, name, got):
                    why = outcome(make, name, as_numpys)
                    found += [f"{title}({name}={as_numpys!r}): {why}"] if why else []
    return found


def numpys(got: Any) -> Any:
    """Return numpy's number, or a list of them; None for a value of another type."""
    if isinstance(got, list):
        return [numpy.int64(each) for each in got] if all(type(e) is int for e in got) else None
    return numpy.int64(got) if type(got) is int else None


@pytest.mark.parametrize("part", range(2))
def test_numpys_integers_are_accepted_where_pythons_are(tmp_path, part):
    callables = sorted(table(str(tmp_path)))[part::2]
    found = run(refusals, str(tmp_path), callables, world=1)[0]
    assert not found, "\n".join(found)


# The table is complete.


def public() -> Iterator[str]:
    """Yield the names of functions, constructors and methods that take an argument."""
    plain = (thinwire, thinwire.torch, advanced, backend, process_group)
    for prefix, module in (*(("", each) for each in plain), ("horovod.", hvd)):
        for name in module.__all__:
            yield from (f"{prefix}{each}" for each in callables_of(name, getattr(module, name)))


def callables_of(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        if not inspect.isfunction(found):  # a constant, or a stand-in for what only Horovod has
            return
        if inspect.signature(found).parameters:
            yield name
        return
    plain_data = issubclass(found, (Exception, tuple, dict)) or is_dataclass(found)
    if plain_data or inspect.isabstract(found):
        return
    yield name
    for key, method in inspect.getmembers(found, inspect.isfunction):
        ours = method.__module__.startswith("thinwire") and not key.startswith("_")
        if found is State and key not in vars(found):  # inherited from GradientExchange
            continue
        if ours and len(inspect.signature(method).parameters) > 1:
            yield f"{name}.{key}"


# Objects made by other calls, and the hook, which only torch calls.
MADE_ELSEWHERE = {
    "Bucket", "State.note_bypassed", "State.watch", "Work", "hook", "horovod.Compression",
    "horovod.Compressor", "horovod.Handle", "horovod.Op", "horovod.ReducingOptimizer",
}  # fmt: skip


def is_torchs(name: str) -> bool:
    """Return whether torch.distributed calls it. torch has then checked the arguments."""
    return name.startswith("ProcessGroup.") and name != "ProcessGroup.configure"


def test_no_public_call_is_left_out(tmp_path):
    ours = {name for name in public() if not is_torchs(name)}
    assert ours - MADE_ELSEWHERE <= set(table(str(tmp_path)))
