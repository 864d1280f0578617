"""Which modules a file imports, by the last part of their names. It refuses to know where they are."""

from __future__ import annotations

import ast


def imported_names(text: str) -> set[str]:
    """``{"policies", "train"}`` for ``from .policies import x`` and ``import a.train``; empty if it is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").rpartition(".")[2])
            found |= {alias.name for alias in node.names}
    return found
