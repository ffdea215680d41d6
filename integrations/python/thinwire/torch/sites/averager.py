"""PeriodicModelAverager: a compressed version of torch's class of this name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import utils

from thinwire.arguments import as_int
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.rules import Codec
from thinwire.torch.group import resolve
from thinwire.torch.sites.diloco import LocalSGD
from thinwire.torch.sites.members import static
from thinwire.torch.sites.state import check_like


class PeriodicModelAverager:
    """Averages parameters over the ranks of a process group every `period` steps, after
    `warmup_steps`. The first arguments are those of
    torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager, in its order. It
    works with torch's PostLocalSGDOptimizer.

    The first average is exact. Later ones average compressed differences to the last one, with
    error feedback, so replicas are bit-identical after each average.

    Args:
        period: steps from one average to the next.
        warmup_steps: steps before the first average.
        process_group: None for the default group.
        codec: as DiLoCo takes it.
        options: those of DiLoCo, except `secure` and `site_group`.

    Raises:
        InvalidArgumentError: an argument is not valid.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: Codec | None = None,
        **options: Any,
    ) -> None:
        period = as_int("period", period, 1)
        warmup_steps = as_int("warmup_steps", warmup_steps, 0)
        self.step, self.period, self.warmup_steps = 0, period, warmup_steps
        self.process_group = process_group
        if options.get("secure"):
            raise InvalidArgumentError(
                "secure=True with an averager, whose first average sends parameters in the clear; "
                "use LocalSGD(static(process_group), model, optimizer, period, secure=True)"
            )
        if options.get("site_group") is not None:
            raise InvalidArgumentError(
                "site_group with an averager, each of whose ranks averages; use "
                "LocalSGD(static(process_group), model, optimizer, period, site_group=...)"
            )
        self._codec, self._options = codec, options
        self._local: LocalSGD | None = None
        self._saved: dict[str, Any] | None = None

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        """Count a step, and average if it is due. params: parameters, or an optimizer's
        param_groups; the same ones in every call."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            self._average(list(params))
        self.step += 1

    def _average(self, params: list[Any]) -> None:
        listed = [p for each in params for p in (each["params"] if _is_group(each) else [each])]
        listed = [p for p in listed if p.requires_grad]
        if self._local is None and self._saved is None:
            utils.average_parameters(iter(listed), resolve(self.process_group, "averaging"))
        if self._local is None:
            self._connect(listed)
            if self._saved is None:
                return
        self._local.sync()

    def _connect(self, parameters: list[torch.nn.Parameter]) -> None:
        model = torch.nn.ParameterList(parameters)
        unused = torch.optim.SGD(parameters, lr=0.0)  # the caller's optimizer makes the steps
        local = LocalSGD(
            static(self.process_group), model, unused, 1, codec=self._codec, weight=1.0,
            **self._options,
        )  # fmt: skip
        if self._saved is not None:
            local.load_state_dict(self._saved)
        self._local = local.__enter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, and the state that is kept between averages. Each rank saves its
        own."""
        kept = self._saved if self._local is None else self._local.state_dict()
        return {"step": self.step, "kept": kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state_dict() of this rank, before the first average. InvalidArgumentError if it is
        not one; the first average checks its contents."""
        check_like("saved", saved, {"step": 0, "kept": None})
        self.step, self._saved = saved["step"], saved["kept"]

    def stats(self) -> dict[str, Any]:
        """Return DiLoCo.stats() without the first, exact average; empty before the second one."""
        return {} if self._local is None else self._local.stats()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()


def _is_group(each: object) -> bool:
    return isinstance(each, dict)
