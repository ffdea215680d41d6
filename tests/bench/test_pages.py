"""Tables of figures on the pages are those of bench/results/."""

import pytest

from bench import harness, pages


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_pages_tables_are_those_of_the_results(page):
    text = (harness.ROOT / page).read_text()
    assert pages.filled(text) == text, "python -m bench.pages writes them"


def test_every_table_is_on_a_page():
    text = "".join((harness.ROOT / page).read_text() for page in pages.PAGES)
    assert {name for name in pages.TABLES if f"<!-- figures: {name} (" in text} == {*pages.TABLES}


def test_a_figure_that_was_changed_by_hand_is_found():
    text = (harness.ROOT / "README.md").read_text()
    figure = next(row for row in pages.speed_and_accuracy().splitlines() if "int4" in row)
    changed = text.replace(figure, figure.replace("int4", "int5"))
    assert changed != text
    assert pages.filled(changed) == text
