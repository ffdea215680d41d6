"""State: what a DDP communication hook remembers from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.torch import checkpoint, tensors
from thinwire.torch.buckets import Buckets
from thinwire.torch.group import join
from thinwire.torch.session import Session
from thinwire.torch.waiter import failed_future


class State:
    """Compresses the gradients of one DDP model.

    codec: "int4" (default), "int8", "bf16", "fp32", with options ("int8:block=128").
    process_group: torch's group of the model; None: the default group.
    policy: "wfbp" (default) or "fifo", the order of chunks.
    timeout_s: seconds; of connecting, and of one allreduce.
    lanes, chunk_bytes: chunks in flight, and bytes of fp32 in one.
    min_bytes: gradients of at most this many bytes times (ranks - 1) go uncompressed; 0: none.
    interface: network interface to listen on. trace: file for a Chrome trace.
    names: parameters and their names for residuals and checkpoints; attach() gives the model's own.

    None means the THINWIRE_* variable, else the library's default. All ranks must use the same
    values, and create their states in the same order. Connecting happens at the first backward.
    After an error the state stays failed: every later use raises the first reason."""

    def __init__(
        self,
        codec: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        policy: str | None = None,
        timeout_s: float | None = None,
        lanes: int | None = None,
        chunk_bytes: int | None = None,
        min_bytes: int | None = None,
        interface: str | None = None,
        trace: str | None = None,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        settings = config.resolve(
            codec=codec, policy=policy, timeout_s=timeout_s, lanes=lanes, chunk_bytes=chunk_bytes,
            min_bytes=min_bytes, interface=interface, trace=trace,
        )  # fmt: skip
        self._session = Session(join(process_group, "state"), settings)
        self._session.close_with(self)
        self._buckets = Buckets(names)
        self._steps = 0

    @property
    def codec(self) -> str:
        return self._session.config.codec

    @property
    def rank(self) -> int:
        """Within the process group."""
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.size

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks, in place. Failures come out of the future, and so
        out of backward(): an exception from here would leave DDP's reducer in mid-step."""
        try:
            return self._start(bucket)
        except errors.Error as error:
            if self._session.error is None:
                self._session.fail(error)
                self._session.abort()
            return failed_future(error)

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, name = bucket.buffer(), f"bucket{bucket.index()}"
        dtype = tensors.check(buffer, self.rank, lambda: self._buckets.describe(name, bucket))
        layout = self._buckets.layout(bucket, self._session.restored)
        future = self._session.start(buffer, dtype, "mean", name, layout, priority=bucket.index())
        self._steps += int(bucket.is_last())
        return future

    def stats(self) -> dict[str, Any]:
        """steps (backward passes), all_reduces, raw_bytes (what a ring of fp32 would have sent),
        wire_bytes (sent by this rank), ratio = raw / wire, and seconds per stage, summed over the
        lanes: queue, encode, exchange, reduce, gather, decode."""
        self._session.wait_idle()
        communicator = self._session.communicator
        counts = communicator.stats() if communicator is not None else {}
        raw, wire = int(counts.get("raw_bytes", 0)), int(counts.get("wire_bytes", 0))
        return {
            "steps": self._steps,
            "all_reduces": int(counts.get("all_reduces", 0)),
            "raw_bytes": raw,
            "wire_bytes": wire,
            "ratio": raw / wire if wire else 1.0,
            "seconds": {stage: counts.get(f"{stage}_s", 0.0) for stage in config.STAGES},
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals: {"format", "codec", "world", "rank", "residuals": {parameter:
        {"first": t, "second": t}}}, both flat float32 tensors of the parameter's size; first in
        units of a gradient, second in units of the mean. Every rank saves its own."""
        self._session.wait_idle()
        communicator = self._session.communicator
        residuals = self._session.restored
        if communicator is not None:
            residuals = checkpoint.read(communicator)
        return checkpoint.pack(residuals, self.codec, self.world_size, self.rank)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes what state_dict() gave on this rank, or the list of all ranks' dicts, which may be
        of another world size: see merge_state_dicts. With the same buckets, training goes on as if
        it had never stopped, bit by bit. InvalidArgumentError if the dict does not fit."""
        residuals = checkpoint.unpack(saved, self.world_size, self.rank)
        self._buckets.check(residuals)
        self._session.load(residuals)

    def close(self) -> None:
        """Says goodbye to the peers. Done by itself when the state goes, and at exit."""
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        raise errors.InvalidArgumentError(
            "a State holds connections and can't be pickled; save state.state_dict() instead"
        )
