"""The site of `make docs`: Sphinx reads the project's Markdown pages where they lie."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent

project = "thinwire"
author = "the thinwire authors"
root_doc = "docs/README"
include_patterns = [
    *("*.md", "*/README.md", "integrations/*/README.md", "compress/FORMAT.md"),
    "kernels/sass.md",
    *("docs/*.md", "docs/**/*.md", "bench/results/**/*.md"),
]
exclude_patterns = [".*", "build*", "dist", "docs/_*"]

extensions = ["myst_parser", "sphinxcontrib.mermaid", "breathe", "sphinx.ext.autodoc"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",  # FORMAT.md's examples are of no language
    "duplicate_declaration.c",  # tw_options_init is a function and a macro
]

breathe_projects = {"thinwire": str(ROOT / "build/docs/doxygen/xml")}  # of scripts/docs.sh
breathe_default_project = "thinwire"
breathe_domain_by_extension = {"h": "c"}

autodoc_typehints = "signature"
html_theme = "furo"
html_title = "thinwire"

# The table of contents is the site's alone: on its own the front page has a table of links.
CONTENTS = """
```{toctree}
:hidden:
:caption: Use
:glob:

/docs/choosing
/docs/settings
/docs/frameworks
/docs/migration/*
/docs/process-groups
/docs/nccl-shim
/docs/ray
/docs/launchers
/docs/measuring
/integrations/python/README
/docs/troubleshooting
/SECURITY
/docs/reference/python
/docs/reference/c
```
```{toctree}
:hidden:
:caption: Understand
:glob:

/docs/architecture
/docs/scale
/docs/robustness
/docs/glossary
/compress/FORMAT
/kernels/sass
/docs/decisions/README
/bench/README
/bench/results/*/README
/bench/results/*/accuracy/**
/bench/results/*/ratio/ratio
```
```{toctree}
:hidden:
:caption: Change
:glob:

/CONTRIBUTING
/CHANGELOG
/README
/docs/guides/*
/*/README
/integrations/*/README
```
"""


def add_contents(app, docname, source):
    if docname == root_doc:
        source[0] += CONTENTS
    if docname == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def read_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text in which `names: text`, with a hanging indent, tells of parameters.
    Those become a list; what reStructuredText would take for markup is escaped."""
    out, in_list = [], False
    for line in lines:
        text = re.sub(r"(?<=\w)_(?!\w)", r"\\_", line).replace("**", r"\*\*")
        item = re.match(r"(\w+(?:, \w+)*): ", line)
        begins = bool(line) and not line.startswith(" ")
        if begins and bool(item) != in_list:
            out.append("")  # a list stands between empty lines
        if begins:
            in_list = bool(item)
        out.append(f"* **{item[1]}**: {text[item.end() :]}" if item else text)
    lines[:] = out


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring)
