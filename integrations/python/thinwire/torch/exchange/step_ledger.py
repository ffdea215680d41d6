"""StepLedger: what the last step of an exchange has touched, and what of it came back."""

from __future__ import annotations

from thinwire.torch.exchange.bucket import Bucket


class StepLedger:
    """Sets of buckets; additions and removals are single steps of the interpreter, so the waiter's
    thread may note an end while the caller submits."""

    def __init__(self) -> None:
        self.in_step = False  # parts of a step have been submitted, and not its end
        self._touched: set[Bucket] = set()  # by the last step that was begun
        self._unfinished: set[Bucket] = set()  # its buckets that are in flight, or failed

    def submitted(self, bucket: Bucket) -> None:
        if not self.in_step:
            self._touched.clear()
            self._unfinished.clear()
            self.in_step = True
        self._touched.add(bucket)
        self._unfinished.add(bucket)

    def came_back(self, bucket: Bucket) -> None:
        """The bucket holds the mean."""
        self._unfinished.discard(bucket)

    def end_step(self) -> None:
        self.in_step = False

    @property
    def lost(self) -> bool:
        """Whether the last step was submitted as a whole, and a part of it did not come back."""
        return not self.in_step and bool(self._unfinished)

    def touched(self) -> set[str]:
        """The parameters of the last step that was begun."""
        return {part.name for bucket in self._touched for part in bucket.parts}
