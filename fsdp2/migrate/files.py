"""Rewrites several files at once: each by the rules of its kind; files that import one another stay on FSDP1 together."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from .report import Finding, Kind, Migrated

CONFIGS = (".yaml", ".yml")
"""Endings of accelerate's configuration files."""

_MAX_DEPTH = 1000
"""How many brackets may be open at once, those in strings included, and how deep Python's syntax tree may be."""


def migrate_files(files: Iterable[Path]) -> dict[Path, Migrated]:
    """The results for files that are read, by path; those with a syntax error get a finding. Nothing is written.

    Files that import each other stay on FSDP1's names together, because values that one makes are arguments in the other.
    """
    from .accelerate_config import migrate_config
    from .source import migrate_source

    texts: dict[Path, str] = {}
    results: dict[Path, Migrated] = {}
    for path in files:
        try:
            texts[path] = path.read_bytes().decode()
        except UnicodeDecodeError:
            results[path] = Migrated("", "", (Finding(1, Kind.LEFT, "not migrated: it is not UTF-8"),))
    for path, text in texts.items():
        results[path] = _checked(migrate_config if path.suffix in CONFIGS else partial(_python, path), text)
    on_compat = {path for path, result in results.items() if result.on_compat}
    todo = list(on_compat)
    while todo:
        path = todo.pop()
        for other in _neighbors(path, texts):
            if other not in on_compat:
                on_compat.add(other)
                todo.append(other)
                results[other] = migrate_source(texts[other], other, off={"fsdp1"})
    return results


def _checked(migrate: Callable[[str], Migrated], text: str) -> Migrated:
    """``migrate(text)``, if parsers can take it: they descend into brackets by recursion, and libcst's ends the process then."""
    ends = itertools.accumulate((char in "([{") - (char in ")]}") for char in text if char in "([{}])")
    with contextlib.suppress(RecursionError, MemoryError):  # a stack that overflows in Python's parser is a MemoryError
        if max(ends, default=0) <= _MAX_DEPTH:
            return migrate(text)
    return Migrated(text, text, (Finding(1, Kind.LEFT, "not migrated: it is nested too deeply"),))


def _python(path: Path, text: str) -> Migrated:
    from libcst import ParserSyntaxError

    from .source import migrate_source

    if _is_deep(text):
        raise RecursionError
    try:
        return migrate_source(text, path)
    except ParserSyntaxError as error:
        return Migrated(text, text, (Finding(error.raw_line, Kind.LEFT, f"not migrated: it is not Python: {error.message}"),))


def _is_deep(text: str) -> bool:
    """Whether libcst's tree of ``text`` would be too deep: libcst ends the process for ``----1``, and is slow for ``a.b.b``.

    Raises: RecursionError, MemoryError for what is too deep for Python's own parser, which is quick to find that out
    """
    try:
        todo: list[tuple[ast.AST, int]] = [(ast.parse(text), 0)]
    except (SyntaxError, ValueError):
        return False  # libcst says what is wrong, or knows a later Python
    while todo:
        node, depth = todo.pop()
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.BoolOp, ast.MatchOr)):  # one node for ``a and b and c``, where libcst has two
            depth += len(inner)
        elif isinstance(node, ast.alias):  # the same for ``import a.b.c``
            depth += node.name.count(".")
        if depth > _MAX_DEPTH:
            return True
        todo += [(each, depth + 1) for each in inner]
    return False


def _neighbors(path: Path, texts: dict[Path, str]) -> list[Path]:
    """Python files of ``texts`` that use FSDP1 and import ``path``, or are imported by it, judged by their names."""
    found = []
    own = imported_names(texts[path])
    for other, text in texts.items():
        if other == path or other.suffix != ".py" or "fsdp" not in text.lower():
            continue
        if other.stem in own or path.stem in imported_names(text):
            found.append(other)
    return found


def imported_names(text: str) -> set[str]:
    """The last parts of modules' names: ``{"policies", "train"}`` for ``from .policies import x`` and ``import a.train``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").rpartition(".")[2])
            found |= {alias.name for alias in node.names}
    return found
