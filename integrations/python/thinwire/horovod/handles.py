"""Handles of collectives in flight, and the names that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from thinwire.arguments import check_kind
from thinwire.errors import Error, InvalidArgumentError, again
from thinwire.horovod.world import Members, rank
from thinwire.torch import tensors


class Handle:
    """A collective in flight; synchronize() ends it. Handles may be waited for in any order."""

    def __init__(self, done: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.done, self._wait = done, wait
        self._result: Any = None
        self._error: Error | None = None
        self._ended = False

    def wait(self) -> Any:
        """The result, or the typed error; again and again the same."""
        if not self._ended:
            try:
                self._result = self._wait()
            except Error as error:
                self._error = error
            self._ended = True
            del self._wait  # it holds tensors
        if self._error is not None:
            raise again(self._error)
        return self._result

    def __call__(self) -> Any:
        """As wait(), since Horovod returns a function from sparse_allreduce_async()."""
        return self.wait()


def of_future(future: Future[Any], finish: Callable[[Any], Any]) -> Handle:
    """finish: makes the result of the future's."""
    return Handle(future.done, lambda: finish(future.result()))


def of_several(handles: Sequence[Handle]) -> Handle:
    """Its result is the list of theirs. All are waited for, also if one fails."""

    def wait() -> list[Any]:
        errors: list[Error] = []
        results = [_or_error(handle, errors) for handle in handles]
        if errors:
            raise errors[0]
        return results

    return Handle(lambda: all(handle.done() for handle in handles), wait)


def _or_error(handle: Handle, errors: list[Error]) -> Any:
    try:
        return handle.wait()
    except Error as error:
        errors.append(error)
        return None


def put(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The target, with the result's values."""
    with torch.no_grad():
        return target.copy_(result)


def in_place(target: torch.Tensor, handle: Handle) -> Handle:
    """A handle whose result is the target, with the values of the given handle's result."""
    return Handle(handle.done, lambda: put(handle.wait(), target))


def start(members: Members, call: str, name: str | None, make: Callable[[], Handle]) -> Handle:
    """make()'s handle, which holds the name, if there is one, until it is waited for.

    InvalidArgumentError if a call of this kind and name was not waited for yet: that does not
    depend on how fast it was, so every rank of a program gets it."""
    tensors.check_name(name)
    if name is None:
        return make()
    key = f"{call} {name}"
    if key in members.in_flight:
        raise InvalidArgumentError(
            f"rank {rank()}: {call} of name '{name}' is in flight already; call "
            "synchronize() on its handle first, or use another name"
        )
    handle = make()
    members.in_flight.add(key)
    wait = handle.wait

    def release() -> Any:
        try:
            return wait()
        finally:
            members.in_flight.discard(key)

    return Handle(handle.done, release)


def names_of(name: str | None, count: int) -> Iterable[str | None]:
    """The names of a group's tensors."""
    tensors.check_name(name)
    return [None if name is None else f"{name}.{number}" for number in range(count)]


def poll(handle: Handle) -> bool:
    """True if synchronize(handle) would return at once."""
    check_kind("handle", handle, Handle, "what a call named ..._async has returned")
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Returns the collective's result, when it is there; for grouped calls the list. Raises the
    typed error of a failure."""
    check_kind("handle", handle, Handle, "what a call named ..._async has returned")
    return handle.wait()
