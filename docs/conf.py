"""Sphinx's settings for `make docs`: it reads the project's Markdown pages in place."""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent

project = "thinwire"
author = "the thinwire authors"
root_doc = "docs/README"
# Decisions, raw results and pages for contributors are only in the repository.
include_patterns = [
    *("README.md", "SECURITY.md", "compress/FORMAT.md", "docs/README.md"),
    *("docs/tutorial/*.md", "docs/how-to/*.md", "docs/reference/*.md", "docs/explanation/*.md"),
]
exclude_patterns = [
    *(".*", "build*", "dist", "docs/_*"),
    *("docs/explanation/gpu-nodes.md", "docs/explanation/robustness.md"),
]

extensions = [
    *("myst_parser", "sphinxcontrib.mermaid", "breathe"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon"),
]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",  # FORMAT.md's examples have no language
    "duplicate_declaration.c",  # tw_options_init is a function and a macro
    "myst.xref_missing",  # files off the site; tests/test_docs.py checks all links
]

breathe_projects = {"thinwire": str(ROOT / "build/docs/doxygen/xml")}  # written by scripts/docs.sh
breathe_default_project = "thinwire"
breathe_domain_by_extension = {"h": "c"}

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
html_theme = "furo"
html_title = "thinwire"

# Only the site has this table of contents; in the repository the front page has a table of links.
CONTENTS = """
```{toctree}
:hidden:
:caption: Tutorial

/docs/tutorial/first-run
/docs/tutorial/fsdp2
/docs/tutorial/between-frameworks
```
```{toctree}
:hidden:
:caption: How to
:glob:

/docs/how-to/*
```
```{toctree}
:hidden:
:caption: Reference
:glob:

/docs/reference/*
/compress/FORMAT
```
```{toctree}
:hidden:
:caption: Explanation

/docs/explanation/how-it-works
/docs/explanation/error-feedback
/docs/explanation/scale
/docs/explanation/benchmarks
/SECURITY
/README
```
"""


def add_contents(app, docname, source):
    if docname == root_doc:
        source[0] += CONTENTS


def setup(app):
    app.connect("source-read", add_contents)
