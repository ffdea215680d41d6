"""Tables and single figures made from the files of bench/results/, and the marks for them in pages.
bench/pages.py lists them and writes the pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bench import harness
from bench.harness import Row

BLOCK = re.compile(
    r"(<!-- figures: ([\w-]+) \(bench/\w+\.py\) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
# Not at the beginning of a line, where Markdown takes a comment for a block of HTML.
INLINE = re.compile(r"(<!-- figure: ([\w -]+) -->)[^\n]*?(<!-- end -->)")
_MACHINES = {"xeon-avx512-2cores": "Intel(R) Xeon(R) Processor, 2 cores",
             "epyc-zen4-2cores": "AMD EPYC, 2 cores", "h200": "NVIDIA H200"}  # fmt: skip

# A table has a line for each set of fields, and a column for each form of a row's fields.

Fields = Mapping[str, Any]
Lines = Iterable[tuple[str, Fields]]
Column = tuple[str, str, Fields]  # its heading, a form ("{ms:.1f}"), and the row's fields


@dataclass(frozen=True)
class Table:
    """A table. Each cell is made from one row of the files: the first one with the line's and the
    column's fields; it is empty if there is none. A name with | in it is several cells.

    files: of bench/results/. field: the field of a file that has its rows. rows: computes other
    rows from them."""

    files: Sequence[str]
    head: str  # heading of the lines' names
    lines: Lines | Callable[[list[Row]], Lines]
    columns: Sequence[Column]
    rows: Callable[[list[Row]], Iterable[Row]] = iter
    field: str = "rows"

    def found(self) -> list[Row]:
        return [*self.rows([*chain.from_iterable(_rows(f, self.field) for f in self.files)])]

    def figure(self, form: str, **fields: Any) -> Callable[[], str]:
        """Return a function for a figure in a sentence: one cell of the first row with these
        fields, which must exist."""
        return lambda: form.format_map(next(_having(fields, self.found())))

    def __call__(self) -> str:
        rows = self.found()
        lines = self.lines(rows) if callable(self.lines) else self.lines

        def cell(line: Fields, form: str, fields: Fields) -> str:
            row = next(_having({**line, **fields}, rows), None)
            return form.format_map(row) if row else ""

        body = [[name, *(cell(line, *column[1:]) for column in self.columns)]
                for name, line in lines]  # fmt: skip
        head = [*self.head.split(" | "), *(column[0] for column in self.columns)]
        return f"{harness.markdown(head, body)}\n\nFrom {_sources(self.files)}."


def _having(fields: Fields, rows: Iterable[Row]) -> Iterator[Row]:
    return (row for row in rows if fields.items() <= row.items())


def filled(text: str, made: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its tables and figures replaced, each by the function with its name."""
    text = BLOCK.sub(lambda mark: f"{mark[1]}\n{made[mark[2]]()}\n\n{mark[3]}", text)
    return INLINE.sub(lambda mark: f"{mark[1]}{made[mark[2]]()}{mark[3]}", text)


def _load(file: str) -> Any:
    text = (harness.ROOT / "bench/results" / file).read_text()
    return json.loads(text) if file.endswith(".json") else text.splitlines()


def _sources(files: Iterable[str]) -> str:
    """Return text with the files by machine and commit. Files from before the harness may lack
    either. The commands are in the files."""
    places: dict[str, list[str]] = {}
    for file in files:
        found = _load(file)
        found = found if isinstance(found, dict) else {}
        place = found.get("machine", _MACHINES[file.split("/")[0]])
        place = place if isinstance(place, str) else harness.place(place)
        place += f", commit {found['commit']}" if "commit" in found else ""
        places.setdefault(place, []).append(f"`bench/results/{file}`")
    return "; ".join(f"{', '.join(names)} ({place})" for place, names in places.items())


def _rows(file: str, field: str) -> Iterable[Row]:
    """Yield a file's rows, each with the file's name. A file that is a list has only rows; so does
    one with lines of text."""
    found = _load(file)
    for row in found[field] if isinstance(found, dict) else found:
        yield (row if isinstance(row, dict) else {"line": row}) | {"file": file}


def named(field: str, names: Mapping[Any, str]) -> list[tuple[str, Fields]]:
    """Return a line for each value of a field."""
    return [(name, {field: value}) for value, name in names.items()]


def each(name: str) -> Callable[[list[Row]], Lines]:
    """Return a function that makes a line for each row. name: a form."""
    return lambda rows: [(name.format_map(row), row) for row in rows]


def every(field: str, **fields: Any) -> Callable[[list[Row]], Lines]:
    """Return a function that makes a line for each value of a field in the rows with these
    fields."""

    def lines(rows: list[Row]) -> Lines:
        found = (row.get(field) for row in _having(fields, rows))
        return [(value, {field: value}) for value in dict.fromkeys(found) if value is not None]

    return lines


def by(form: str, field: str, names: Mapping[Any, str], **fields: Any) -> list[Column]:
    """Return a column for each value of a field."""
    return [(name, form, {field: value, **fields}) for value, name in names.items()]


def own(forms: str) -> list[Column]:
    """Return columns of a line's own row: "heading = form | heading = form"."""
    return [(*column.split(" = "), {}) for column in forms.split(" | ")]


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}
