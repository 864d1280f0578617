"""Links to files that are not on the site (``../examples/train_lm.py``, ``log.md``) become the file's name.

In the repository the same links lead to the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

_ROOT = Path(__file__).parents[2]


def _replace(app: Any, document: nodes.document) -> None:
    page = Path(app.env.doc2path(app.env.docname))
    for link in list(
        document.findall(lambda node: isinstance(node, (nodes.reference, addnodes.download_reference, addnodes.pending_xref)))
    ):
        target = (link.get("refuri") or link.get("reftarget") or "").split("#")[0]
        if not target or "://" in target:
            continue
        # MyST gives the target of a Markdown file without its suffix, from the folder of the site.
        path = Path(app.srcdir, f"{target}.md") if link.get("refdomain") == "doc" else (page.parent / target).resolve()
        on_site = path.is_relative_to(_ROOT / "docs") and (path.suffix != ".md" or app.env.path2doc(path) in app.env.found_docs)
        if path.is_file() and path.is_relative_to(_ROOT) and not on_site:
            link.replace_self(nodes.literal(text=str(path.relative_to(_ROOT))))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", _replace)
    return {"version": "1", "parallel_read_safe": True}
