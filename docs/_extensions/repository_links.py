"""Links of pages to files of the repository (``../examples/train_lm.py``) become the file's name: the site stands by itself.

On a page that is read in the repository the link leads to the file.
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
        if "://" in target or not target.startswith("."):
            continue
        path = (page.parent / target).resolve()
        if path.exists() and path.is_relative_to(_ROOT) and not path.is_relative_to(_ROOT / "docs"):
            link.replace_self(nodes.literal(text=str(path.relative_to(_ROOT))))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", _replace)
    return {"version": "1", "parallel_read_safe": True}
