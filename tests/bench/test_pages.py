"""Figures on the pages are those of bench/results/."""

# ruff: noqa: RUF001 - tables have the multiplication sign

import re

import pytest
import thinwire

from bench import harness, pages

BY_HAND = re.compile(r"\d\.\d+ ×|\d ± \.?\d")  # a speed-up, a mean with its error
CHOOSE, FORMULAS = "how-to/choose.md", "explanation/gpu-nodes.md"  # have tests of their own


def text_of(page):
    return (harness.ROOT / page).read_text()


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_pages_tables_are_those_of_the_results(page):
    assert pages.filled(text_of(page)) == text_of(page), "python -m bench.pages writes them"


def test_every_table_is_on_a_page():
    text = "".join(map(text_of, pages.PAGES))
    assert {name for name in pages.TABLES if f"<!-- figures: {name} (" in text} == {*pages.TABLES}


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_figure_that_was_changed_by_hand_is_found(page):
    text = text_of(page)
    for table in pages.BLOCK.finditer(text):
        last = [*re.finditer(r"\d", table[0].split("\n\nFrom ")[0])][-1]
        at = table.start() + last.start()
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        assert pages.filled(changed) == text != changed


def test_sentences_have_no_measured_figures():
    docs = harness.ROOT / "docs"
    found = [page for folder in ("explanation", "how-to", "tutorial")
             for page in (docs / folder).glob("*.md")
             if not str(page).endswith((CHOOSE, FORMULAS))]  # fmt: skip
    for page in (harness.ROOT / "README.md", *found):
        assert not BY_HAND.findall(pages.BLOCK.sub("", page.read_text())), page


def test_fewer_bytes_of_a_codec_are_those_of_its_format():
    """topk's depend on the ranks."""
    rows = re.findall(r"^\| `([^`]+)` \| ([\d.]+) × \|", text_of(f"docs/{CHOOSE}"), re.MULTILINE)
    assert len(rows) == 7
    for spec, figure in rows:
        info, numel = thinwire.codec_info(spec), 1 << 24
        sent = sum(thinwire.encoded_bytes(way, numel) for way in (info.up, info.down))
        digits = len(figure.partition(".")[2])
        assert f"{2 * 4 * numel / sent:.{digits}f}" == figure, spec
