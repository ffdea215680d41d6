"""The pages: links lead somewhere, and errors.md has the messages of the sources."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCE_FOLDERS = ("compress", "kernels", "transport", "schedule", "integrations")


def tracked(pattern: str) -> list[pathlib.Path]:
    """Return the files of the checkout. A source archive has no git; then all files count."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listing.returncode == 0:
        return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]
    return sorted(ROOT.rglob(pattern))


PAGES = tracked("*.md")


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub and the site make from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_pages():
    assert len(PAGES) > 10


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name(page)} links to {link}, which is not there"
        assert file.is_relative_to(ROOT), f"{link} leaves the project"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name(page)} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_in_tables_are_there(page):
    """A folder's page lists its files in a table `file | is`; names in its first column exist."""
    for table in re.findall(r"^\| *file *\|.*\n\|[-|]+\n((?:\|.*\n?)+)", page.read_text(), re.M):
        for row in table.splitlines():
            for word in re.findall(r"`([\w./*-]+)`", row.split("|")[1]):
                assert list(page.parent.glob(word)), (
                    f"{name(page)} lists {word}, which is not there"
                )


def messages() -> list[str]:
    """Return the messages of the table by symptom: text in backticks in its column `message`."""
    page = (ROOT / "docs/reference/errors.md").read_text()
    table = re.search(r"^\| symptom \| message .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)[1]
    cells = [line.split(" | ")[1] for line in table.splitlines()]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def literals() -> str:
    text = ""
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".cc", ".h", ".py"}:
                text += path.read_text()
    # Adjacent literals are one text. C++ joins them with commas too.
    return re.sub(r'"(\s|,|f(?="))*"', "", text)


def test_there_are_messages():
    assert len(messages()) >= 20


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_of_the_sources(message, literals):
    for words in message.split("…"):
        assert words.strip() in literals, f"no source says '{words}' (of '{message}')"
