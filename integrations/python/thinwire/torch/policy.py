"""Which parameter goes with which codec."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from thinwire.errors import InvalidArgumentError

Codec = str | Mapping[str, str]

_ALL = "*"
_MOMENTUM_BELOW = 0.01  # density of topk under which DGC's momentum correction is needed


class Policy:
    """A codec for all parameters, or {pattern of names: codec}, of which the first match wins.

    Patterns are those of fnmatch: "*.bias", "embed.*", "*"."""

    def __init__(self, codec: Codec) -> None:
        self.rules = {_ALL: codec} if isinstance(codec, str) else dict(codec)
        if not self.rules:
            raise InvalidArgumentError("codec is an empty dict, expected {'*': 'int4'} or the like")
        for pattern, spec in self.rules.items():
            if not isinstance(spec, str) or not isinstance(pattern, str) or ";" in spec:
                raise InvalidArgumentError(
                    f"codec has {pattern!r}: {spec!r}, expected a name pattern and a codec"
                )
        self._specs = list(dict.fromkeys(self.rules.values()))
        if "auto" in self._specs:
            raise InvalidArgumentError(
                "codec 'auto' is for all parameters, codec='auto'; by name take what `thinwire "
                "advise` recommends"
            )

    @property
    def joined(self) -> str:
        """All codecs, as tw_options.codec takes them."""
        return ";".join(self._specs)

    @property
    def needs_names(self) -> bool:
        return any(pattern != _ALL for pattern in self.rules)

    def index_of(self, name: str) -> int:
        """Of the parameter's codec, among the joined ones."""
        return self._specs.index(self.rules[self.rule_of(name)])

    def rule_of(self, name: str) -> str:
        """The first pattern that matches. InvalidArgumentError if none does."""
        for pattern in self.rules:
            if fnmatchcase(name, pattern):
                return pattern
        near = difflib.get_close_matches(name, self.rules, 1)
        hint = f"; did you mean {name!r} by {near[0]!r}?" if near else ""
        raise InvalidArgumentError(
            f"parameter '{name}' matches no pattern of codec, expected one of {list(self.rules)}"
            f"{hint}; add '*': 'int4' as the last one"
        )

    def check_names(self, names: Iterable[str]) -> None:
        """Every parameter has a rule, and every rule but the last a parameter."""
        used = {self.rule_of(name) for name in names}
        for pattern in list(self.rules)[:-1]:
            if pattern not in used:
                warnings.warn(f"codec pattern '{pattern}' matches no parameter", stacklevel=4)

    def check_momentum(self, momentum: float) -> None:
        """Refuses what diverges and warns of what loses accuracy."""
        if momentum:
            return
        for spec in self._specs:
            if "onebit" in spec:
                raise InvalidArgumentError(
                    f"codec '{spec}' without momentum diverges: one bit of the bare gradient with "
                    "error feedback is noise of the gradient's own size. Pass momentum=0.9 (and "
                    "under DDP call move_momentum(optimizer, state)), or take int4"
                )
            if spec.startswith("topk") and _density(spec) < _MOMENTUM_BELOW:
                warnings.warn(
                    f"codec '{spec}' without momentum loses accuracy below a density of "
                    f"{_MOMENTUM_BELOW}: pass momentum=0.9 (and under DDP call move_momentum; DGC, "
                    "arXiv 1712.01887)",
                    stacklevel=4,
                )


def _density(spec: str) -> float:
    for parameter in spec.partition(":")[2].split(","):
        key, _, value = parameter.partition("=")
        if key == "density":
            try:
                return float(value)
            except ValueError:
                break  # the library says what is wrong with it
    return _MOMENTUM_BELOW
