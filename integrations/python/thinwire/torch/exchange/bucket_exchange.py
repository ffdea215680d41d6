"""BucketExchange: buckets and their submission, the part of GradientExchange that runs in every
step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire import config, errors
from thinwire.arguments import check_call, check_kind, check_whole, wrong
from thinwire.codec import codec_info
from thinwire.torch import tensors
from thinwire.torch.exchange.bucket import Bucket, Part, Submission
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.parameters import Parameters, check_size
from thinwire.torch.exchange.recovery import Agreement, Recovery, fit, progress_of
from thinwire.torch.exchange.rules import Codec, Rules
from thinwire.torch.exchange.session import Session
from thinwire.torch.exchange.setup import Setup
from thinwire.torch.group import Membership, resolve, users_of

_INT32 = -(2**31), 2**31 - 1


class BucketExchange:
    """Reduces buckets over the ranks of a process group; adapters use it as a GradientExchange."""

    def __init__(
        self,
        setup: Setup,
        process_group: dist.ProcessGroup | None,
        parameters: Mapping[str, int] | None,
        purpose: str,
    ) -> None:
        check_kind("purpose", purpose, str, "text")
        self.steps = 0  # the number that were made, with those of a state dict that was loaded
        self._auto, self._rules = setup.auto, setup.rules
        self._process_group, self._purpose = process_group, purpose
        self._parameters = Parameters(parameters)
        self._session = Session(Membership(process_group, purpose), setup.settings)
        self._session.close_with(self)

    # Settings.

    @property
    def codec(self) -> str | dict[str, str]:
        """The codec or the rules in use; with "auto" it changes at most twice."""
        rules = self._rules.by_pattern
        return rules if self._rules.needs_names else next(iter(rules.values()))

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def config(self) -> config.Config:
        """All settings, as they were resolved."""
        return self._session.config

    @property
    def automatic(self) -> bool:
        """Whether the exchange chooses its codec itself (codec="auto")."""
        return self._auto is not None

    @property
    def rank(self) -> int:
        """Within the process group. InvalidArgumentError while there is none."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Ranks of the process group. InvalidArgumentError while there is none."""
        return self._session.size

    # Buckets.

    def bucket(
        self,
        name: str,
        parts: Iterable[Part | tuple[str, int]],
        dtype: torch.dtype,
        *,
        priority: int = 0,
        shape: str | None = None,
        op: str = "mean",
        collective: str = "all_reduce",
    ) -> Bucket:
        """Describes a flat buffer that will be submitted in many steps. Make it once.

        name: equal on all ranks, and of one bucket only. parts: (parameter name, elements), or Part
          for a piece of a parameter, in the buffer's order and without gaps. dtype: float32,
          bfloat16 or float16. priority: under "p3" lower goes first, so it is the number in forward
          order. shape: of the parts, in words that strict=True compares between ranks. op: "mean"
          or "sum". collective: "all_reduce", or "reduce_scatter" with submit(..., result).
          InvalidArgumentError if no rule matches a parameter, or if a state dict was loaded
          that has it with another size."""
        if not isinstance(dtype, torch.dtype) or dtype not in tensors.DTYPES:
            raise errors.InvalidArgumentError(
                f"bucket '{name}': got dtype {dtype!r}, expected float32, bfloat16 or float16"
            )
        listed = _parts_of(parts)
        check_whole("priority", priority, *_INT32)
        for text in (name, *(part.name for part in listed)):
            tensors.check_name(text)
        for part in listed:
            check_size(part.name, part.total or part.numel, self._session.restored)
        bucket = Bucket(
            name, sum(part.numel for part in listed), tensors.DTYPES[dtype], parts=listed,
            codecs=[self._rules.index_of(part.name) for part in listed], priority=priority,
            shape=shape if self.config.strict else None, op=op, collective=collective,
        )  # fmt: skip
        self._parameters.add(bucket)
        return bucket

    def submit(
        self, bucket: Bucket, buffer: torch.Tensor, result: torch.Tensor | None = None
    ) -> Submission:
        """Starts to replace the buffer by its mean over all ranks; wait() must follow, once. With
        `result`, which a reduce-scatter needs, it goes there, and the buffer stays.

        buffer: contiguous, with the bucket's dtype and number of elements, on the CPU or a GPU, the
          same device always. Nothing may touch it until wait() has returned."""
        self._check(bucket, buffer)
        if self._auto and self._auto.observer:
            self._auto.observer.submitting(bucket, buffer)
        return Submission(bucket, buffer, self._session.submit(bucket, buffer, result))

    def wait(self, submission: Submission) -> None:
        """Returns when the buffer holds the mean; on a GPU, for later work of the current stream.
        Submissions may be waited for in any order. Raises the typed error of a failure."""
        check_kind("submission", submission, Submission, "what submit() returned")
        if not (self._auto and self._auto.observer):
            self._session.complete(submission.work)
            return
        with self._auto.observer.waiting(submission.bucket, submission.buffer.device):
            self._session.complete(submission.work)

    def start(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """As submit(), for frameworks that want a future: it completes with the buffer after
        `finish` has run on another thread, and after those of earlier submissions. For codec="auto"
        these buckets come in backward order, and their priorities are their numbers in it."""
        check_call("finish", finish)
        self._check(bucket, buffer)
        if self._auto and self._auto.observer:
            finish = self._auto.observer.starting(bucket, buffer, finish)
        return self._session.start(bucket, buffer, finish).future

    def _check(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        check_kind("bucket", bucket, Bucket, "what GradientExchange.bucket() returned")
        dtype = tensors.check(buffer, self.rank, lambda: str(bucket.name))
        if (dtype, buffer.numel()) != (bucket.dtype, bucket.numel) or not buffer.is_contiguous():
            raise errors.InvalidArgumentError(
                f"rank {self.rank}, bucket '{bucket.name}': got {buffer.numel()} elements of "
                f"{dtype} with strides {buffer.stride()}, expected {bucket.numel} contiguous "
                f"elements of {bucket.dtype}"
            )

    def end_step(self, *, repeats: bool = True) -> None:
        """Says once a step that all of its buckets have been submitted. repeats: the next step will
        submit the same buckets, which lets their order be predicted."""
        self.steps += 1
        self._session.end_step(repeats=repeats)

    def between_steps(self, device: torch.device, finish: Callable[[], None] | None = None) -> None:
        """Once a step on all ranks, when codec="auto" may change the codec; else it does nothing.
        `finish` waits until the adapter has nothing in flight; None: start() was used. Buckets stay
        valid. PeerLostError if a rank was lost."""
        if self._auto is None:
            return
        codec = self._auto.after_step(device, finish or self._session.wait_idle)
        if codec is not None:
            self._change_codec(codec)

    def _change_codec(self, codec: Codec, momentum: float | None = None) -> None:
        """Goes on with another codec, and where it is given with another momentum; residuals and
        counts are kept. All ranks call it, with nothing in flight."""
        self._rules = Rules(codec, self._structure)
        momentum = self.config.momentum if momentum is None else momentum
        self._go_on(self._rules.joined, momentum, self._session.memory())

    def _go_on(self, codec: str, momentum: float, kept: Residuals) -> None:
        """Closes the session, and opens one that starts from `kept` at the next step; allowed after
        a failure."""
        membership = Membership(self._process_group, self._purpose)
        self._session = self._session.successor(membership, codec, momentum, kept, self.steps)
        self._session.close_with(self)

    # The end.

    def fail(self, error: errors.Error) -> errors.Error:
        """Fails the exchange on every rank, each of which is told this reason. The first reason
        stays, and is returned."""
        check_kind("error", error, errors.Error, "a thinwire.Error")
        return self._session.abort(error)

    def recover(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        made: Mapping[str, int] | int | None = None,
    ) -> Recovery:
        """After an error: leaves the failed connections, and goes on in a new group of torch's, of
        any size, with what this rank has kept. Every rank of the new group calls it; a new rank, on
        a new exchange. The ranks agree on a step, and connect at the next use.

        process_group: None for the default group. made: the steps whose means the optimizer has,
          of all parameters, or of those for which it is not the default: a step counts as made when
          all of it came back.
        Returns what was agreed on. Where it is not `equal`, the caller takes parameters, buffers
        and the optimizer's state from its `source`.

        No residual is lost, and none is sent twice: residuals are those after the agreed step, with
        a failed one taken back. Those of a lost rank are gone. Raises InvalidArgumentError while
        torch has no process group, MismatchError if the ranks are not of one run."""
        check_kind("made", made, (int, Mapping, type(None)), "steps, steps by parameter, or None")
        members = resolve(process_group, "recover")
        now, before = self._session.dissolve()
        mine = progress_of(self._session, self.steps, made, users_of(members))
        agreement = Agreement(mine, members)
        kept = agreement.choose(now, before, self._session.ledger.touched())
        kept = agreement.share_momentum(kept, self._sparse())
        if kept:
            kept = fit(kept, self.world_size, dist.get_world_size(members))
        self._process_group, self.steps = process_group, agreement.result.step
        if self._auto is not None:
            self._auto.settle(process_group, agreement.goal.codec)
            self._rules = Rules(agreement.goal.codec)
        self._go_on(agreement.goal.codec, agreement.goal.momentum, kept)
        return agreement.result

    @property
    def lost_last_step(self) -> bool:
        """Whether the last step was submitted as a whole, and a part of it did not come back."""
        return self._session.ledger.lost

    def _sparse(self) -> list[str]:
        """The parameters that are sent as entries, whose momentum is this rank's own."""
        return [
            row["name"]
            for row in self._parameters.table(self._session.communicator, self._rules)
            if row["codec"] != "raw" and codec_info(row["codec"]).entries
        ]

    def close(self) -> None:
        """Closes the connections. Happens by itself when the exchange goes, and at exit."""
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        raise errors.InvalidArgumentError(
            f"a {type(self).__name__} holds connections and can't be pickled; save its "
            "state_dict() instead"
        )


def _parts_of(parts: object) -> list[Part]:
    expected = "(parameter name, elements) or Part, one after the other"
    check_kind("parts", parts, Iterable, expected)
    listed = []
    for part in parts:
        if not isinstance(part, tuple) or not 2 <= len(part) <= 4:
            raise wrong("parts", parts, expected)
        one = Part(*part)
        tensors.check_name(one.name)
        check_whole(f"the number of elements of part '{one.name}'", one.numel, 0)
        check_whole(f"the offset of part '{one.name}'", one.offset, 0)
        if one.total is not None:
            check_whole(f"the total of part '{one.name}'", one.total, one.offset + one.numel)
        listed.append(one)
    return listed
