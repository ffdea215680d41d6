"""ExactCollectives: torch.distributed's collectives over Gloo, for data that is never compressed:
gathers, broadcasts, objects, integers, float64, and minima, maxima and products."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire import errors
from thinwire.horovod.joining import Joining, name_of, zeros
from thinwire.horovod.ops import REDUCE_OPS, Op
from thinwire.torch import agree, private

_JOINED = "join"  # the call in the label of a joined rank that does not support the others' call
_FIRST_STEP = "the first step of DistributedOptimizer"
_OPS = REDUCE_OPS | {Op.AVERAGE: dist.ReduceOp.SUM}


class Label(NamedTuple):
    """The description of a call, which ranks compare before they send its data."""

    call: str
    name: str | None
    detail: str = ""  # operation, root, dtypes
    shapes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        name = "" if self.name is None else f" '{self.name}'"
        return " ".join(filter(None, [f"{self.call}{name}", self.detail, *map(str, self.shapes)]))


class Worker:
    """A thread that runs calls in the order of their submission. Unlike the threads of
    concurrent.futures it is a daemon, so that a process whose main thread fails ends soon
    (private.in_torch), even while a call waits for a peer. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Return a future of the call's result or exception."""
        future: Future[Any] = Future()
        if self._closed:
            future.set_exception(
                errors.InvalidArgumentError(
                    "this call's process set was removed, or shutdown() was called, expected one "
                    "in use; make the call, or the DistributedOptimizer that makes it, again after "
                    "init() or add_process_set()"
                )
            )
        else:
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """End the thread after it has run all submitted calls."""
        self._closed = True
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                with private.in_torch():
                    future.set_result(call())
                    del item, call  # they may hold tensors
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            item = call = None
            del future


class ExactCollectives:
    """Runs each call on one thread, in the order of submission, which must be the same on all
    ranks. Each call first compares its label. If labels differ, all ranks get a MismatchError, and
    the next call works again. Tensors are on the host."""

    def __init__(self, group: dist.ProcessGroup, joining: Joining | None) -> None:
        """joining: for groups whose ranks may join(); None: joined ranks ignore the calls."""
        self._joining = joining
        if joining is not None:
            joining.makers["exact"] = self._make_for_joined
        self._group, self._rank = group, dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)  # in messages
        self._size = len(self._ranks)
        self._worker = Worker("thinwire-horovod")

    def close(self) -> None:
        """Wait for all submitted calls."""
        self._worker.close()

    def all_reduce(self, label: Label, tensor: torch.Tensor, op: Op) -> Future[torch.Tensor]:
        """Reduce in the tensor's type and precision; means of integers are rounded towards
        zero."""

        part = (name_of(tensor.dtype), op.value) if op in (Op.AVERAGE, Op.SUM) else None
        return self.agreed(label, self._reducing(tensor, op), part=part)

    def _reducing(self, tensor: torch.Tensor, op: Op) -> Callable[[list[Label]], torch.Tensor]:
        def run(_: list[Label]) -> torch.Tensor:
            wide = tensor.to(_wide(tensor.dtype), copy=True).contiguous()
            dist.all_reduce(wide, _OPS[op], group=self._group)
            if op is Op.AVERAGE:
                whole = not (wide.is_floating_point() or wide.is_complex())
                wide = torch.div(wide, self._size, rounding_mode="trunc" if whole else None)
            return wide.to(tensor.dtype)

        return run

    def _make_for_joined(self, part: Any, _: torch.device | None) -> Callable[[], object]:
        """Make the call of a joined rank: zeros for an average or a sum. Any other call is a
        MismatchError on the other ranks."""
        (call, name, detail, shapes), reduction = part
        label = Label(call, name, detail, tuple(map(tuple, shapes)))
        if reduction is None:
            mine = Label(_JOINED, None)
            if label.call == _FIRST_STEP:  # the others then gather their settings
                return self._submit(mine, lambda _: self._gather(None), lambda label: label).result
            return self._submit(mine, lambda _: None, lambda label: label).exception
        dtype, op = reduction
        mine = zeros(label.shapes[0], dtype)
        return self._submit(label, self._reducing(mine, Op(op)), lambda label: label).result

    def all_gather(self, label: Label, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """Concatenate the tensors of all ranks in the first dimension, in which sizes may differ.
        `label` has one shape, with at least one dimension."""

        def run(labels: list[Label]) -> torch.Tensor:
            shapes = [each.shapes[0] for each in labels]
            counts = [torch.Size(shape).numel() * tensor.element_size() for shape in shapes]
            padded = torch.zeros(max(counts), dtype=torch.uint8)
            padded[: counts[self._rank]] = _bytes_of(tensor)
            found = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(found, padded, group=self._group)
            parts = [
                part[:count].view(tensor.dtype).view(shape)
                for part, count, shape in zip(found, counts, shapes, strict=True)
            ]
            return torch.cat(parts)

        return self.agreed(label, run, _but_first_dimension)

    def all_to_all(
        self, label: Label, tensor: torch.Tensor, splits: list[int]
    ) -> Future[tuple[torch.Tensor, list[int]]]:
        """Send splits[r] rows to each member r. Return the received rows, by member, and the number
        from each. `label` has two shapes: the tensor's, and the splits."""

        def run(labels: list[Label]) -> tuple[torch.Tensor, list[int]]:
            came = [each.shapes[1][self._rank] for each in labels]
            shape = (sum(came), *tensor.shape[1:])
            row = torch.Size(shape[1:]).numel() * tensor.element_size()
            found = torch.empty(shape[0] * row, dtype=torch.uint8)
            sent = _bytes_of(tensor[: sum(splits)])
            sizes = [[count * row for count in counts] for counts in (came, splits)]
            dist.all_to_all_single(found, sent, *sizes, group=self._group)
            return found.view(tensor.dtype).view(shape), came

        return self.agreed(label, run, lambda label: _but_first_dimension(label, 1))

    def broadcast(self, label: Label, tensor: torch.Tensor, root: int) -> Future[torch.Tensor]:
        """Return the tensor of rank `root` of the job."""

        def run(_: list[Label]) -> torch.Tensor:
            shared = _bytes_of(tensor)
            dist.broadcast(shared, root, group=self._group)
            return shared.view(tensor.dtype).view(tensor.shape)

        return self.agreed(label, run)

    def object_from(self, label: Label, value: Any, root: int) -> Future[Any]:
        """Return the object of rank `root` of the job."""
        source = self._ranks.index(root)
        return self.agreed(label, lambda _: agree.from_rank(source, value, self._group))

    def all_objects(self, label: Label, value: Any) -> Future[list[Any]]:
        """Return the objects of all ranks, by rank."""
        return self.agreed(label, lambda _: self._gather(value))

    def check_first_step(self, settings: Mapping[str, str]) -> None:
        """Return when all ranks that have not joined have called it. MismatchError on every rank if
        their settings differ, or if a rank has made another of these calls, such as a broadcast
        that the others leave out."""
        self.agreed(
            Label(_FIRST_STEP, None), lambda _: self._check_settings(self._gather(dict(settings)))
        ).result()

    def _check_settings(self, of_ranks: list[dict[str, str] | None]) -> None:
        """of_ranks: None for a rank that has joined."""
        told = {r: each for r, each in zip(self._ranks, of_ranks, strict=True) if each is not None}
        first, expected = next(iter(told.items()))
        for rank, settings in told.items():
            for name in {**expected, **settings}:
                got, right = settings.get(name, "nothing"), expected.get(name, "nothing")
                if got != right:
                    raise errors.MismatchError(
                        f"rank {rank}: DistributedOptimizer got {name}={got}, expected {right} as "
                        f"on rank {first}; pass the same on every rank"
                    )

    def agreed(
        self,
        label: Label,
        run: Callable[[list[Label]], Any],
        compared: Callable[[Label], Any] = lambda label: label,
        part: Any = None,
    ) -> Future[Any]:
        """Call run(labels of all ranks) when all ranks have come and the `compared` parts of their
        labels are equal. part: dtype and operation, with which joined ranks can pass zeros."""
        if self._joining is None:
            return self._submit(label, run, compared)
        end = self._joining.begin("exact", label[:2], (label, part))
        future = self._submit(label, run, compared)
        future.add_done_callback(lambda _: end())
        return future

    def _submit(
        self, label: Label, run: Callable[[list[Label]], Any], compared: Callable[[Label], Any]
    ) -> Future[Any]:
        def call() -> Any:
            try:
                labels = self._gather(label)
                self._check(labels, compared)
                return run(labels)
            except errors.Error:
                raise
            except (RuntimeError, ValueError) as error:  # the errors of Gloo, and of torch's checks
                raise self._typed(label, error) from error

        return self._worker.submit(call)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _check(self, labels: list[Label], compared: Callable[[Label], Any]) -> None:
        made = {
            r: each for r, each in zip(self._ranks, labels, strict=True) if each.call != _JOINED
        }
        joined = [rank for rank in self._ranks if rank not in made]
        first, expected = next(iter(made.items()))
        for rank, label in made.items():
            if joined and label.call != _FIRST_STEP:
                raise errors.MismatchError(
                    f"rank {rank} called {label}, but ranks {joined} have joined, expected "
                    "averages and sums, which they take part in with zeros; make this call before "
                    "join(), or after it"
                )
            if compared(label) != compared(expected):
                raise errors.MismatchError(
                    f"rank {rank} called {label}, expected {expected} as on rank {first}; make "
                    "these calls in the same order on every rank, with the same names, types and "
                    "shapes"
                )

    def _typed(self, label: Label, error: Exception) -> errors.Error:
        text = f"rank {self._ranks[self._rank]}, {label}: {error}"
        if "imed out" in str(error):
            return errors.TimeoutError(f"{text}; a rank did not make this call in time")
        if "gloo" in str(error):
            return errors.PeerLostError(f"{text}; a rank has ended, look at its last lines")
        return errors.Error(text)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor's bytes. contiguous() would not change the stride of a single
    element, which is 0 if it was expanded (as the gradient of sum() is) and prevents a view as
    bytes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for Gloo's reduction: Gloo lacks some small types, and their sums
    overflow."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _but_first_dimension(label: Label, shapes: int | None = None) -> Any:
    return label[:3], [shape[1:] for shape in label.shapes[:shapes]]
