"""The documentation site: ``make docs`` builds ``docs/_build/html/index.html``, which opens from the file system.

Sphinx, because it generates a reference from live docstrings and fails on any link or name that does not exist; MyST, because the pages
are Markdown and read well without being built; Furo, because it is legible on phones and in the dark.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "fsdp2"
author = "The fsdp2 authors"
release = importlib.metadata.version("fsdp2")
copyright = "2026, the fsdp2 authors"  # noqa: A001 (Sphinx's name)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "house_docstrings", "repository_links"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "log.md"]  # log.md is a lab book for people who change the library
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100  # a longer one has a line for each argument

html_theme = "furo"
html_title = "fsdp2"
html_static_path = ["_static"]
html_css_files = ["fsdp2.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # "zero3" is an argument, to be copied
