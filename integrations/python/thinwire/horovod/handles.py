"""Handles of collectives in flight, and the names that are in use."""

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
    """A collective in flight; synchronize() completes it. Handles may be waited for in any
    order."""

    def __init__(self, done: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.done, self._wait = done, wait
        self._result: Any = None
        self._error: Error | None = None
        self._ended = False

    def wait(self) -> Any:
        """Return the result, or raise the typed error; the same in each call."""
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
        """Call wait(): Horovod's sparse_allreduce_async() returns a function."""
        return self.wait()


def of_future(future: Future[Any], finish: Callable[[Any], Any]) -> Handle:
    """Return a handle whose result is finish(the future's result)."""
    return Handle(future.done, lambda: finish(future.result()))


def of_several(handles: Sequence[Handle]) -> Handle:
    """Return a handle whose result is the list of theirs. It waits for all, even if one fails."""

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
    """Copy the result to the target; return the target."""
    with torch.no_grad():
        return target.copy_(result)


def in_place(target: torch.Tensor, handle: Handle) -> Handle:
    """Return a handle whose result is the target, with the values of the given handle's result."""
    return Handle(handle.done, lambda: put(handle.wait(), target))


def start(members: Members, call: str, name: str | None, make: Callable[[], Handle]) -> Handle:
    """Return make()'s handle. The name, if there is one, is in use until the handle is waited for.

    InvalidArgumentError if a call with this kind and name was not waited for yet. That does not
    depend on its speed, so all ranks of a program get the error."""
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
    """Return the names of a group's tensors."""
    tensors.check_name(name)
    return [None if name is None else f"{name}.{number}" for number in range(count)]


def poll(handle: Handle) -> bool:
    """Return whether synchronize(handle) would return at once."""
    check_kind("handle", handle, Handle, "what a call named ..._async has returned")
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the collective; return its result, a list for grouped calls. Raises the typed error
    of a failure."""
    check_kind("handle", handle, Handle, "what a call named ..._async has returned")
    return handle.wait()
