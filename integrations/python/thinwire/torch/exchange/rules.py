"""Rules: the codec of each parameter."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from thinwire import config
from thinwire.arguments import wrong
from thinwire.codec import CodecInfo, codec_info
from thinwire.errors import InvalidArgumentError, warn

Codec = str | Mapping[str, str]

_ALL = "*"

# Words that select parameters by their structure and not by name: those with one dimension (biases,
# norms), and the weights of embeddings.
STRUCTURES = ("1d", "embedding")
Structure = Mapping[str, Collection[str]]  # parameter names by such a word

# Biases and norms are under 1 % of the bytes, so they are sent exactly.
DEFAULT = {"1d": "fp32", _ALL: "int4"}


class Rules:
    """A codec for all parameters, or {pattern: codec}, of which the first match wins.

    Patterns are those of fnmatch on names ("*.bias", "embed.*", "*"), or words of STRUCTURES."""

    def __init__(
        self,
        codec: Codec,
        structure: Structure | None = None,
        among: Sequence[str] | None = None,
    ) -> None:
        """structure: parameter names by the words of STRUCTURES; None: unknown. among: the joined
        codecs, including some that no rule names yet; None: the codecs that the rules name."""
        self._structure = {} if structure is None else structure
        if not isinstance(self._structure, Mapping) or any(
            word not in STRUCTURES or isinstance(names, str) or not isinstance(names, Collection)
            for word, names in self._structure.items()
        ):
            raise wrong("structure", structure, f"collections of names by words of {STRUCTURES}")
        self.by_pattern = {_ALL: codec} if isinstance(codec, str) else dict(codec)
        if not self.by_pattern:
            raise InvalidArgumentError("codec is an empty dict, expected {'*': 'int4'} or the like")
        for pattern, spec in self.by_pattern.items():
            if not isinstance(spec, str) or not isinstance(pattern, str) or ";" in spec:
                raise InvalidArgumentError(
                    f"codec has {pattern!r}: {spec!r}, expected a name pattern and a codec"
                )
        self.specs = list(dict.fromkeys(among or self.by_pattern.values()))
        if "auto" in self.specs:
            raise InvalidArgumentError(
                "codec 'auto' is for all parameters, codec='auto'; by name take what `thinwire "
                "advise` recommends"
            )

    @property
    def joined(self) -> str:
        """All codecs, separated by ";", in the form of tw_options.codec."""
        return ";".join(self.specs)

    @property
    def needs_names(self) -> bool:
        """True if there is a rule other than "*", so that parameters must have names."""
        return any(pattern != _ALL for pattern in self.by_pattern)

    def index_of(self, name: str) -> int:
        """Return the number of the parameter's codec among the joined codecs."""
        return self.specs.index(self.by_pattern[self.rule_of(name)])

    def rule_of(self, name: str) -> str:
        """Return the first pattern that matches. InvalidArgumentError if none does."""
        for pattern in self.by_pattern:
            if self._matches(name, pattern):
                return pattern
        near = difflib.get_close_matches(name, self.by_pattern, 1)
        hint = f"; did you mean {name!r} by {near[0]!r}?" if near else ""
        raise InvalidArgumentError(
            f"parameter '{name}' matches no pattern of codec, expected one of "
            f"{list(self.by_pattern)}{hint}; add '*': 'int4' as the last one"
        )

    def _matches(self, name: str, pattern: str) -> bool:
        return name in self._structure.get(pattern, ()) or fnmatchcase(name, pattern)

    def check_specs(self) -> None:
        """InvalidArgumentError for an unknown codec, or a wrong option of one."""
        for spec in self.specs:
            codec_info(spec)

    def check_names(self, names: Iterable[str]) -> None:
        """InvalidArgumentError unless every parameter has a rule, and every rule except "*" has a
        parameter. A rule that never applies is misspelt, or comes after a rule that matches all of
        its parameters."""
        names = list(names)
        used = {self.rule_of(name) for name in names}
        for pattern in self.by_pattern:
            if names and pattern not in used and pattern not in (_ALL, *STRUCTURES):
                raise InvalidArgumentError(self._unused(pattern, names))

    def _unused(self, pattern: str, names: list[str]) -> str:
        taken = [name for name in names if self._matches(name, pattern)]
        if taken:
            return (
                f"codec pattern '{pattern}' stands behind '{self.rule_of(taken[0])}', which takes "
                f"all of its parameters, such as '{taken[0]}'; move it to the front, or leave it "
                "out"
            )
        near = difflib.get_close_matches(pattern, names, 1, cutoff=0.4) or names[:1]
        return (
            f"codec pattern '{pattern}' matches no parameter that is trained, expected a name such "
            f"as {near[0]!r} or a pattern of names; correct it, or leave it out"
        )

    def check_momentum(self, momentum: float) -> None:
        """InvalidArgumentError for a codec that diverges without momentum; a warning for one that
        loses accuracy."""
        if momentum:
            return
        for spec in self.specs:
            need = codec_info(spec).momentum
            if need == "required":
                raise InvalidArgumentError(
                    f"codec '{spec}' without momentum diverges: one bit of the bare gradient with "
                    "error feedback is noise of the gradient's own size. Pass optimizer= to "
                    "compress(), an SGD with momentum, an Adam or AdamW, whose momentum moves into "
                    "the exchange, or take int4"
                )
            if need == "advised":
                warn(
                    f"codec '{spec}' without momentum loses accuracy: pass optimizer= to "
                    "compress(), an SGD with momentum, which moves into the exchange (DGC, arXiv "
                    "1712.01887); where the optimizer keeps it, take density=0.01 or more"
                )


def infos_of(codec: Codec | None) -> list[CodecInfo]:
    """Return the CodecInfo of each codec in this argument of compress(); [] for "auto".
    InvalidArgumentError if it is not a codec."""
    named = codec if isinstance(codec, Mapping) else config.resolve(codec=codec).codec
    return [] if named == "auto" else [codec_info(spec) for spec in Rules(named).specs]


def check_no_momentum(adapter: str, options: Mapping[str, Any]) -> None:
    """InvalidArgumentError for momentum, or a codec that needs it, with a framework that does not
    give compress() its optimizer, so that momentum cannot move into the exchange."""
    keeps = f"in {adapter}: its optimizer keeps its own"
    if options.get("momentum"):
        raise wrong(
            "momentum", options["momentum"],
            f"none {keeps}. Leave it out, and take int4 or adaptive for few bits",
        )  # fmt: skip
    for info in infos_of(options.get("codec")):
        if info.momentum == "required":
            raise wrong(
                "codec", info.spec,
                f"one that needs no momentum {keeps}; take int4 or adaptive for few bits",
            )  # fmt: skip
