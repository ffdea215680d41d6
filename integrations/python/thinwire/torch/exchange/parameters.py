"""The parameters of an exchange: their sizes, and the buckets that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.comm import Communicator
from thinwire.errors import InvalidArgumentError
from thinwire.torch.exchange.bucket import Bucket
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.rules import Rules


class Parameters:
    """Sizes in elements, and the bucket that each parameter was last seen in."""

    def __init__(self, sizes: Mapping[str, int] | None) -> None:
        """sizes: of all parameters, by name; None: they become known with their buckets."""
        self._all_known = sizes is not None
        self._sizes: dict[str, int] = dict(sizes or {})
        self._buckets: dict[str, Bucket] = {}

    def add(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            self._sizes[part.name] = part.total or part.numel
            self._buckets[part.name] = bucket

    def add_size(self, name: str, numel: int) -> None:
        self._sizes[name] = numel

    def check(self, residuals: Residuals) -> None:
        """InvalidArgumentError if residuals belong to no parameter, or to one of another size."""
        for name in residuals:
            if name in self._sizes:
                check_size(name, self._sizes[name], residuals)
            elif self._all_known:
                raise InvalidArgumentError(
                    f"the state dict has a residual for '{name}', which is no parameter of this "
                    "model; load it into the model that it was saved from"
                )

    def table(self, communicator: Communicator | None, rules: Rules) -> list[dict[str, Any]]:
        """As stats()["parameters"]; empty while there is no communicator."""
        if communicator is None:
            return []
        rows = []
        for name, bucket in sorted(self._buckets.items()):
            halves = bucket.collective != "all_reduce"  # which compress every size
            raw = not halves and communicator.goes_raw(bucket.numel, bucket.dtype)
            codec = "raw" if raw else communicator.codec(rules.index_of(name))
            rule = rules.rule_of(name)
            numel = self._sizes[name]
            rows.append({"name": name, "numel": numel, "rule": rule, "codec": codec})
        return rows


def check_sizes(sizes: object) -> None:
    """InvalidArgumentError unless it is a dict of element counts by name."""
    right = isinstance(sizes, Mapping) and all(
        isinstance(name, str) and isinstance(numel, int) for name, numel in sizes.items()
    )
    if not right:
        raise InvalidArgumentError(
            f"parameters is {sizes!r}, expected a dict of element counts by name"
        )


def check_size(name: str, numel: int, residuals: Residuals) -> None:
    """InvalidArgumentError if there is a residual of `name` with another number of elements."""
    if name in residuals and residuals[name].first.numel() != numel:
        raise InvalidArgumentError(
            f"the state dict's residual for '{name}' has {residuals[name].first.numel()} elements, "
            f"expected {numel}; load it into the model that it was saved from"
        )
