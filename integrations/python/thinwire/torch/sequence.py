"""GradientSequence: error feedback for the exchanges of a process group in backward passes, which
have no names."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire import errors
from thinwire.torch import tensors
from thinwire.torch.exchange.bucket import Bucket, Part
from thinwire.torch.exchange.session import Session

FEEDBACK, PLAIN = 0, 1  # numbers of the two codecs of a sequence's session
_BYTES = 4  # per element of a residual
# Places of a kind in its first step. With an optimizer that is not torch's, the end of a step is
# never known; later exchanges then use the codec that needs no feedback.
_FIRST_PLACES = 256


class Kind(NamedTuple):
    """The properties of an exchange."""

    collective: str  # a key of comm.COLLECTIVES
    op: str  # "sum" or "mean"
    dtype: str  # a key of comm.DTYPES
    numel: int
    on_gpu: bool = False


class GradientSequence:
    """Assigns to each exchange of a backward pass the bucket that keeps its residual.

    An exchange is identified by its kind and its place: it is the k-th of this kind since the last
    step of a torch optimizer, the same on all ranks. If a step has another number of exchanges of a
    kind than the last step that had any, the places may belong to other parameters, so all
    residuals of the kind are dropped. A new order of parameters inside an exchange is not noticed:
    DDP changes the order once, after its first step, and those residuals go to other parameters.
    Residuals of a kind that is not exchanged any more are kept. Thread-safe.

    Args:
        session: has two codecs, the second for exchanges without a residual.
        budget: returns the bytes that residuals may take on the GPU (True) or the host, equal on
            all ranks; called once. Exchanges beyond the budget have no residual.
    """

    def __init__(self, session: Session, budget: Callable[[bool], int]) -> None:
        self._session = session
        self._budget = budget
        self._left: int | None = None
        self._lock = threading.Lock()
        self._buckets: dict[Kind, list[Bucket]] = {}
        self._plain: dict[Kind, list[Bucket]] = {}  # plain buckets that are not in use
        self._used: Counter[Kind] = Counter()  # exchanges since the last step
        self._before: dict[Kind, int] = {}  # exchanges in the last step that had the kind
        # residual_bytes, dropped_residuals, without_feedback (exchanges)
        self.counts: Counter[str] = Counter()
        mine = weakref.ref(self)

        def after_step(*_: object) -> None:
            sequence = mine()
            if sequence is not None:
                sequence.end_step()

        handle = register_optimizer_step_post_hook(after_step)
        self._end = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Stop counting the steps of optimizers."""
        self._end()

    def next(self, kind: Kind) -> Bucket:
        """Return the bucket of the next exchange. It has a residual unless the budget is used up or
        the last step had fewer exchanges of this kind."""
        if self._left is None:
            self._left = self._budget(kind.on_gpu)
        with self._lock:
            place = self._used[kind]
            self._used[kind] += 1
            buckets = self._buckets.setdefault(kind, [])
            if place < len(buckets):
                return buckets[place]
            needed = _BYTES * kind.numel
            if place < self._before.get(kind, _FIRST_PLACES) and needed <= self._left:
                self._left -= needed
                self.counts["residual_bytes"] += needed
                name = f"{kind.collective} {kind.op} {kind.dtype} {kind.numel} #{place}"
                buckets.append(_bucket(kind, name, name, FEEDBACK))
                return buckets[place]
            self.counts["without_feedback"] += 1
        return self.plain(kind)

    def plain(self, kind: Kind) -> Bucket:
        """Return a bucket for an exchange without a residual, which ranks match by order. Call
        give_back() after the exchange."""
        with self._lock:
            free = self._plain.setdefault(kind, [])
            return free.pop() if free else _bucket(kind, None, "-", PLAIN)

    def give_back(self, kind: Kind, bucket: Bucket) -> None:
        """Call when the exchange of a bucket of plain() or next() is over, so that another exchange
        of its kind may use it."""
        if bucket.name is None:
            with self._lock:
                self._plain[kind].append(bucket)

    def end_step(self) -> None:
        """Call after an optimizer's step. No-op if there were no exchanges since the last one."""
        with self._lock:
            used, self._used = self._used, Counter()
            if not used:
                return
            changed = [kind for kind, n in used.items() if self._before.get(kind, n) != n]
            self._before.update(used)
            stale = [bucket for kind in changed for bucket in self._buckets[kind]]
        self._session.end_step(repeats=None)
        if stale:
            self._drop({part.name: part.numel for bucket in stale for part in bucket.parts})

    def _drop(self, parts: dict[str, int]) -> None:
        self._session.wait_idle()
        communicator = self._session.communicator
        if communicator is None or self._session.error is not None:
            return
        try:
            kept = communicator.residuals()
            numels = {name: numel for name, numel in parts.items() if name in kept}
            zeros = tensors.zeros(max(numels.values(), default=0))
            communicator.set_residuals(
                [(name, "first", zeros.data_ptr(), numel) for name, numel in numels.items()]
            )
        except errors.Error as error:  # the next exchange raises it
            self._session.fail(error)
            return
        self.counts["dropped_residuals"] += len(numels)


def _bucket(kind: Kind, name: str | None, part: str, codec: int) -> Bucket:
    return Bucket(
        name, kind.numel, kind.dtype, op=kind.op, parts=[Part(part, kind.numel)], codecs=[codec],
        collective=kind.collective,
    )  # fmt: skip
