"""Horovod's functions that thinwire lacks: each raises an error that says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from thinwire.errors import UnavailableError


class Missing:
    """Takes the place of one of Horovod's functions, classes or modules. Using it raises
    UnavailableError."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def _refuse(self) -> NoReturn:
        raise UnavailableError(f"thinwire.horovod has no {self._name}; {self._instead}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own protocols look for these
            raise AttributeError(name)
        self._refuse()


elastic = Missing(
    "elastic",
    "use thinwire.torch.compress() and its recover(), docs/how-to/recover.md",
)
SyncBatchNorm = Missing("SyncBatchNorm", "use torch.nn.SyncBatchNorm.convert_sync_batchnorm")
start_timeline = Missing("start_timeline", "set THINWIRE_TRACE=run.json, and see `thinwire trace`")
stop_timeline = Missing("stop_timeline", "set THINWIRE_TRACE=run.json, and see `thinwire trace`")
