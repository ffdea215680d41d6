"""The figures on the pages are those of bench/results/."""

# ruff: noqa: RUF001 - tables have the multiplication sign

import re

import pytest
import thinwire

from bench import harness, pages
from bench.figures import BLOCK, INLINE, filled

# Measured figures: a speed-up, a mean with its error, points of accuracy, a rate, and times and per
# cents that have a fraction or follow a word such as "takes". Other round numbers are limits and
# settings.
MEASURED = re.compile(
    r"\d\.\d+ ×|\d ± \.?\d|\d (?:times (?:as fast|faster|slower)|points)\b|\d [GMT]B/s"
    r"|\d\.\d+ (?:ms|µs|s|%)(?!\w)"
    r"|\b(?:took|takes|lasts|costs?|spends?|saves?|gains?|loses?|lost|median)\b[^.;|\n]{0,30}?"
    r" \d[\d.,]* (?:ms|µs|s|seconds|%)(?!\w)"
)
FEWER = re.compile(r"^\| `([^`]+)` \| ([\d.]+) × \|", re.MULTILINE)
PYTHON = "integrations/python/thinwire"  # the pages show its docstrings
NOT_MEASURED = {
    "compress/FORMAT.md": ["3.5 %", "1.5 %"],  # follow from the codes, for Gaussian blocks
    "docs/architecture.md": ["0.25 s", "1.5 s"],  # constants of the engine
    "docs/how-to/choose.md": [FEWER],  # checked by its own test
    "docs/how-to/sites.md": ["costs at most 5 %"],  # an argument
    f"{PYTHON}/torch/ddp/state.py": ["takes 15 to 20 %"],  # from the paper
    "schedule/README.md": ["takes longer than 100 ms"],  # a constant of the engine
}
FOLDERS = ("bench", "compress", "demo", "docs", "integrations", "kernels", "schedule", "scripts",
           "tests", "transport")  # fmt: skip
# Dated records, and output of other programs.
NO_SENTENCES = re.compile(
    r"docs/decisions.md|CHANGELOG.md|docs/explanation/gpu-nodes.md|kernels/sass.md"
    r"|bench/results/.*/(accuracy|drift|ratio).md"
)


def text_of(page):
    return (harness.ROOT / page).read_text()


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_pages_figures_are_those_of_the_results(page):
    text = text_of(page)
    assert filled(text, pages.MADE) == text, "python -m bench.pages writes them"


def test_every_table_and_figure_is_on_a_page():
    text = "".join(map(text_of, pages.PAGES))
    assert {mark[2] for form in (BLOCK, INLINE) for mark in form.finditer(text)} == {*pages.MADE}


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_figure_that_was_changed_by_hand_is_found(page):
    text = text_of(page)
    for mark in (*BLOCK.finditer(text), *INLINE.finditer(text)):
        last = [*re.finditer(r"\d", mark[0].split("\n\nFrom ")[0].removesuffix(mark[3]))][-1]
        at = mark.start() + last.start()
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        assert filled(changed, pages.MADE) == text != changed


def by_hand(page, text):
    """Return the measured figures in sentences of the page that no program generates."""
    made = (BLOCK, INLINE) if page in pages.PAGES else ()
    for form in (*made, *NOT_MEASURED.get(page, ())):
        text = re.sub(form, "", text)
    return [match[0] for match in MEASURED.finditer(text)]


def test_sentences_have_no_measured_figures():
    everywhere = [*harness.ROOT.glob("*.md"), *(harness.ROOT / PYTHON).rglob("*.py")]
    for folder in FOLDERS:
        everywhere += (harness.ROOT / folder).rglob("*.md")
    assert len(everywhere) > 40
    for path in everywhere:
        page = str(path.relative_to(harness.ROOT))
        if not NO_SENTENCES.fullmatch(page):
            assert not by_hand(page, path.read_text()), page


@pytest.mark.parametrize("sentence", [
    "int4 is 5.5 times as fast", "a speed-up of 4.82 ×", "within 0.03 ± 0.05 of fp32",
    "it loses 2 points", "decodes at 15.7 GB/s", "a step takes 30 ms", "it ends after 18.6 ms",
])  # fmt: skip
def test_a_measured_figure_in_a_sentence_is_found(sentence):
    assert by_hand("README.md", f"Of two ranks {sentence}.")
    assert not by_hand("README.md", f"Of two ranks <!-- figure: x -->{sentence}<!-- end -->.")


def test_no_line_begins_with_a_figure():
    """Markdown would take the whole line for HTML, and show its asterisks."""
    for page in pages.PAGES:
        assert not re.search(r"^[ >*-]*<!-- figure:", text_of(page), re.MULTILINE), page


def test_fewer_bytes_of_a_codec_are_those_of_its_format():
    """topk is left out: its bytes depend on the number of ranks."""
    text = text_of("docs/how-to/choose.md")
    in_sentences = re.findall(r"([\d.]+) times fewer bytes `([^`]+)`", text)
    rows = [*FEWER.findall(text), *((spec, figure) for figure, spec in in_sentences)]
    assert len(rows) == 8
    for spec, figure in rows:
        info, numel = thinwire.codec_info(spec), 1 << 24
        sent = sum(thinwire.encoded_bytes(way, numel) for way in (info.up, info.down))
        digits = len(figure.partition(".")[2])
        assert f"{2 * 4 * numel / sent:.{digits}f}" == figure, spec
